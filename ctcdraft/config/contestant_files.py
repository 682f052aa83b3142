"""Lookup of the files that the names in contestants= stand for.

Separate from contestants.py, which builds drafters and imports torch: a name that is neither a run directory nor a
drafter is refused before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctcdraft.config.cli import CONFIGS
from ctcdraft.errors import InputError

DRAFTER_CONFIGS = CONFIGS / "drafter"
OUTSIDE_CONFIGS = CONFIGS / "outside"


def split_reading(name: str) -> tuple[str, str]:
    """Return run directory and tree option of RUN@TREE; the option is empty where none is named."""
    run, at, tree = name.rpartition("@")
    return (run, tree) if at and not Path(name).is_dir() else (name, "")


def drafter_file(name: str, run: Path) -> Path:
    """Return the YAML file of a drafter; raise InputError if there is none.

    Args:
        run: the name without @TREE, for the message.
    """
    for file in (DRAFTER_CONFIGS / f"{name}.yaml", OUTSIDE_CONFIGS / f"{name}.yaml", Path(name)):
        if file.suffix == ".yaml" and file.is_file() and not run.is_dir():
            return file
    drafters = sorted(file.stem for folder in (DRAFTER_CONFIGS, OUTSIDE_CONFIGS) for file in folder.glob("*.yaml"))
    raise InputError(
        f"contestant {name} is neither a run directory (there is no {run / 'config.yaml'}) nor one of the drafters "
        f"{', '.join(drafters)}"
    )


def refuse_unknown_contestants(contestants: list[Any]) -> None:
    """Raise InputError for the first contestant that is neither a run directory nor a drafter."""
    for contestant in contestants:
        name = str(next(iter(contestant)) if isinstance(contestant, Mapping) else contestant)
        run = Path(split_reading(name)[0])
        if not (run / "config.yaml").is_file():
            drafter_file(name, run)
