"""The files of one evaluation: lines are added, settings guarded, shards read together. It knows no model.

settings.json        what must be the same for all lines here
questions*.jsonl     one record a line; a shard writes a file of its own
timing*.json         the instrumented pass of each process
sizes.json           what decoding.nodes=auto chose, before the first question
report.json, report.md, breakdown.svg
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.evaluation.records import Record, from_json, to_json
from ctcdraft.evaluation.timing import Timing
from ctcdraft.files import write_text
from ctcdraft.shard import Shard

OURS = ("settings.json", "questions*.jsonl", "timing*.json", "report.json", "report.md", "breakdown.svg", "sizes.json")


class Folder:
    """One evaluation on disk, as one of its shards sees it."""

    def __init__(self, path: Path, shard: Shard) -> None:
        self.path = path
        self.shard = shard
        self.lines = path / f"questions{shard}.jsonl"
        self.timing = path / f"timing{shard}.json"
        self._sizes = path / "sizes.json"

    def open(self, settings: dict[str, Any], overwrite: bool) -> None:
        """Refuse to mix what cannot be compared; drop a torn last line; then the folder is ready for `append`.

        overwrite: a shard removes its own files and those of another split, but not its siblings', which may be
        at work, unless the folder holds another evaluation.
        """
        there = self._settings()
        strangers = self._of_another_split()
        if overwrite:
            remove([self.lines, self.timing, *strangers])
        if there is not None and there != settings:
            if not overwrite:
                raise InputError(
                    f"{self.path} holds an evaluation in which {differences(there, settings)}; repeat those "
                    "settings, choose another out=, or add overwrite=true to replace it"
                )
            remove(file for pattern in OURS for file in self.path.glob(pattern))
        if strangers and not overwrite:
            raise InputError(
                f"{self.path} holds {strangers[0].name}, which is no part of shard={self.shard.number}/{self.shard.of}"
                "; go on with the shards it was begun with, choose another out=, or add overwrite=true to replace it"
            )
        write_text(self.path / "settings.json", json.dumps(settings, indent=1) + "\n")
        if self.lines.is_file():
            os.truncate(self.lines, self.lines.read_bytes().rfind(b"\n") + 1)

    def _of_another_split(self) -> list[Path]:
        """Lines and timings of i/M where this is i/N: they answer the same questions a second time."""
        kinds = (("questions", ".jsonl"), ("timing", ".json"))
        found = {file for start, end in kinds for file in self.path.glob(f"{start}*{end}")}
        ours = {file for start, end in kinds for file in self.path.glob(f"{start}{self.shard.siblings}{end}")}
        return sorted(found - ours)

    def _settings(self) -> dict[str, Any] | None:
        file = self.path / "settings.json"
        if not file.is_file():
            return None
        try:
            return json.loads(file.read_text())
        except ValueError:
            return {file.name: "unreadable"}

    def append(self, record: Record) -> None:
        try:
            with self.lines.open("a") as stream:
                stream.write(to_json(record) + "\n")
        except OSError as error:
            raise InputError(
                f"cannot write {self.lines} ({error.strerror}); make room and run again: what was finished is kept"
            ) from error

    def records(self, questions: int) -> list[Record]:
        """Every finished question below `questions`, of all shards, once each and in the benchmark's order."""
        found: dict[int, Record] = {}
        for file in sorted(self.path.glob("questions*.jsonl")):
            # What follows the last line end is torn, or being written by a sibling right now.
            for number, line in enumerate(file.read_text().split("\n")[:-1], 1):
                try:
                    record = from_json(line)
                except (ValueError, KeyError, TypeError) as error:
                    raise InputError(
                        f"line {number} of {file} is not a finished question; remove that line and run again"
                    ) from error
                found.setdefault(record.index, record)
        return [found[index] for index in sorted(found) if index < questions]

    def sizes(self) -> dict[str, Any] | None:
        """What `write_sizes` wrote here."""
        if not self._sizes.is_file():
            return None
        try:
            kept = json.loads(self._sizes.read_text())
            kept["of"], kept["sizes"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{self._sizes} holds no tree sizes; remove it, and they are chosen anew") from error
        return kept

    def write_sizes(self, sizes: Mapping[str, Any]) -> None:
        write_text(self._sizes, json.dumps(sizes, indent=1) + "\n")

    def write_timing(self, timing: Timing) -> None:
        write_text(self.timing, json.dumps(timing.to_json(), indent=1) + "\n")

    def timings(self) -> list[Timing]:
        return [Timing.from_json(json.loads(file.read_text())) for file in sorted(self.path.glob("timing*.json"))]


def differences(there: dict[str, Any], now: dict[str, Any]) -> str:
    """decoding.nodes was 16 (now 8)"""
    flat_there, flat_now = flat(there), flat(now)
    keys = [key for key in {**flat_there, **flat_now} if flat_there.get(key) != flat_now.get(key)]
    said = [f"{key} was {flat_there.get(key)} (now {flat_now.get(key)})" for key in keys[:3]]
    return ", ".join(said) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def remove(files: Any) -> None:
    for file in files:
        file.unlink(missing_ok=True)
