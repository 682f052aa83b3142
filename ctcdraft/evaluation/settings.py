"""Values of evaluate.py that are refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctcdraft.errors import InputError, check_int


def refuse_impossible(config: Any) -> None:
    """Raise InputError for the first value with which nothing can be measured. config: as in configs/evaluate.yaml."""
    check_int(config.seed, "seed", least=0)
    check_int(config.timing.questions, "timing.questions", least=0)
    check_int(config.warm_up_tokens, "warm_up_tokens", least=0)
    if config.threads is not None:
        check_int(config.threads, "threads")


def as_list(value: Any, key: str) -> list[Any]:
    """Return a list, or of one string the list of it."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        raise InputError(f"{key}={value} is no list; give one such as {key}=[A,B]")
    return list(value)
