"""Values of data/prepare.py that are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

from ctcdraft.distributed import Shard
from ctcdraft.errors import check_int


def refuse_impossible(config: Any) -> None:
    """Raise InputError for the first value with which nothing can be prepared. config: as in configs/prepare.yaml."""
    Shard.parse(config.shard)
    check_int(config.show, "show", least=0)
    check_int(config.show_labels, "show_labels")
