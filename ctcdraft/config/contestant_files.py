"""Files behind the names in contestants=, found without reading any of them.

Apart from contestants.py, which builds what it finds and needs torch for that: a name that is neither a run nor a
drafter is refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctcdraft.config.cli import CONFIGS
from ctcdraft.errors import InputError

DRAFTER_CONFIGS = CONFIGS / "drafter"
OUTSIDE_CONFIGS = CONFIGS / "outside"


def split_reading(word: str) -> tuple[str, str]:
    """Return the place and the tree of RUN@TREE; the tree is empty where none is named."""
    place, at, tree = word.rpartition("@")
    return (place, tree) if at and not Path(word).is_dir() else (word, "")


def drafter_file(word: str, run: Path) -> Path:
    """Return the YAML of a drafter that is not a run. run: the name without @TREE."""
    candidates = (DRAFTER_CONFIGS / f"{word}.yaml", OUTSIDE_CONFIGS / f"{word}.yaml", Path(word))
    for file in candidates:
        if file.suffix == ".yaml" and file.is_file() and not run.is_dir():
            return file
    there = ", ".join(
        sorted(file.stem for folder in (DRAFTER_CONFIGS, OUTSIDE_CONFIGS) for file in folder.glob("*.yaml"))
    )
    raise InputError(
        f"contestant {word} is neither a run directory (there is no {run / 'config.yaml'}) nor one of the drafters "
        f"{there}"
    )


def refuse_unknown_contestants(words: list[Any]) -> None:
    """Raise InputError for the first contestant that is neither a run nor a drafter."""
    for word in words:
        name = str(next(iter(word)) if isinstance(word, Mapping) else word)
        place = Path(split_reading(name)[0])
        if not (place / "config.yaml").is_file():
            drafter_file(name, place)
