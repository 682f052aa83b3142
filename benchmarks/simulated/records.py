"""Records of what operations on the simulated accelerator cost: launches, transfers and host synchronisations.

`count()` yields a report of all operations in its block; reports may be nested. Every entry names the operation and the
source line of ctcdraft or transformers that caused it, so that an excess can be removed where it arises.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import transformers

REPOSITORY = Path(__file__).resolve().parents[2]
TORCH, TRANSFORMERS = (Path(str(package.__file__)).parent for package in (torch, transformers))
OWN_FOLDER = Path(__file__).resolve().parent
DISPATCH = REPOSITORY / "ctcdraft" / "fused.py"  # calls the operations of others


class Cause(NamedTuple):
    """An operation and the source line that called it."""

    line: str
    operation: str

    def __str__(self) -> str:
        return f"{self.line} {self.operation}"


@dataclass
class Report:
    """Counts by cause."""

    launches: Counter[Cause] = field(default_factory=Counter)
    transfers: Counter[Cause] = field(default_factory=Counter)
    bytes: Counter[Cause] = field(default_factory=Counter)  # of the transfers
    synchronisations: Counter[Cause] = field(default_factory=Counter)

    def clear(self) -> None:
        for counter in vars(self).values():
            counter.clear()

    def totals(self) -> dict[str, int]:
        return {name: counter.total() for name, counter in vars(self).items()}

    def __str__(self) -> str:
        lines = []
        for name, counter in vars(self).items():
            lines.append(f"{name}: {counter.total()}")
            lines += [f"  {number:6} {cause}" for cause, number in counter.most_common()]
        return "\n".join(lines)


REPORTS: list[Report] = []  # of the open `count` blocks


@contextmanager
def collected() -> Iterator[Report]:
    """Yield a report that is filled until the end of the block."""
    report = Report()
    REPORTS.append(report)
    try:
        yield report
    finally:
        REPORTS.remove(next(one for one in REPORTS if one is report))


def record(kind: str, cause: Cause, number: int = 1) -> None:
    for report in REPORTS:
        getattr(report, kind)[cause] += number


def cause_of(operation: str) -> Cause:
    """Return the cause of an operation that is executed now."""
    frame: FrameType | None = sys._getframe(1)
    other = None
    while frame is not None:
        named = named_file(frame.f_code.co_filename)
        if named is not None:
            name, of_package = named
            if of_package:
                return Cause(f"{name}:{frame.f_lineno}", operation)
            other = other or f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return Cause(other or "unknown", operation)


@cache
def named_file(filename: str) -> tuple[str, bool] | None:
    """Return a file's short name, and whether it is of ctcdraft or transformers; None for torch and this folder."""
    path = Path(filename)
    if path.parent == OWN_FOLDER or path.is_relative_to(TORCH) or path.name == "contextlib.py" or path == DISPATCH:
        return None
    if path.is_relative_to(TRANSFORMERS.parent):
        return str(path.relative_to(TRANSFORMERS.parent)), path.is_relative_to(TRANSFORMERS)
    inside = path.is_relative_to(REPOSITORY)
    return str(path.relative_to(REPOSITORY)) if inside else path.name, path.is_relative_to(REPOSITORY / "ctcdraft")
