"""The files of one evaluation: lines are added, settings guarded, shards read together. It knows no model.

settings.json        what must be the same for all lines here
questions*.jsonl     one record a line; a shard writes a file of its own
timing*.json         the instrumented pass of each process
explorer*.json       a few answers seen from inside, for the page
sizes.json           what decoding.nodes=auto chose, before the first question
report.json, report.md, report.html, breakdown.svg, figures/
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.evaluation.profiling import Profile
from ctcdraft.evaluation.records import Record, from_json, to_json
from ctcdraft.evaluation.settings import OVERWRITE_ADVICE, refuse_smaller_evaluation
from ctcdraft.evaluation.tracing.records import Trace
from ctcdraft.evaluation.tracing.records import trace_to_json as seen_json
from ctcdraft.io import write_text

REPORT_FILES = ("report.json", "report.md", "report.html", "breakdown.svg", "figures/*.svg")
EVALUATION_FILES = ("settings.json", "questions*.jsonl", "timing*.json", "explorer*.json", "sizes.json", *REPORT_FILES)
VERSION_KEYS = ("version", "commit", "dirty")  # recorded, not compared: what counts of the code is its hash


class OutputDir:
    """One evaluation on disk, as one of its shards sees it."""

    def __init__(self, path: Path, shard: Shard) -> None:
        self.path = path
        self.shard = shard
        self.questions_file = path / f"questions{shard}.jsonl"
        self.profile_file = path / f"timing{shard}.json"
        self.trace_file = path / f"explorer{shard}.json"
        self._sizes = path / "sizes.json"

    def open(self, settings: dict[str, Any], questions: int, overwrite: bool) -> None:
        """Refuse to mix what cannot be compared; drop a torn last line; then the folder is ready for `append`.

        questions: of all shards; a report of more is not replaced. overwrite: a shard removes its own files, the
        report, and files of another split, but not its siblings', which may be at work, unless the folder holds
        another evaluation.
        """
        existing = self._read_settings(overwrite)
        strangers = self._files_of_other_splits()
        if overwrite:
            remove_files(
                [
                    self.questions_file,
                    self.profile_file,
                    self.trace_file,
                    *strangers,
                    *self._matching_files(REPORT_FILES),
                ]
            )
        else:
            refuse_smaller_evaluation(self.path, settings["benchmark"]["name"], questions, settings["contestants"])
        if existing is not None and (unlike := describe_differences(existing, settings)):
            if not overwrite:
                raise InputError(
                    f"{self.path} holds an evaluation in which {unlike}; {describe_resume(existing, settings)}, "
                    f"{OVERWRITE_ADVICE}"
                )
            remove_files(self._matching_files(EVALUATION_FILES))
            existing = None
        if strangers and not overwrite:
            raise InputError(
                f"{self.path} holds {strangers[0].name}, which is no part of shard={self.shard.number}/{self.shard.of}"
                f"; go on with the shards it was begun with, {OVERWRITE_ADVICE}"
            )
        if existing is None:  # else the version that began it stays named
            write_text(self.path / "settings.json", json.dumps(settings, indent=1) + "\n")
        if self.questions_file.is_file():
            os.truncate(self.questions_file, self.questions_file.read_bytes().rfind(b"\n") + 1)

    def _matching_files(self, patterns: Iterable[str]) -> list[Path]:
        return [file for pattern in patterns for file in self.path.glob(pattern)]

    def _files_of_other_splits(self) -> list[Path]:
        """What was measured by i/M where this is i/N: they answer the same questions a second time."""
        kinds = (("questions", ".jsonl"), ("timing", ".json"), ("explorer", ".json"))
        found = {file for start, end in kinds for file in self.path.glob(f"{start}*{end}")}
        ours = {file for start, end in kinds for file in self.path.glob(f"{start}{self.shard.siblings}{end}")}
        return sorted(found - ours)

    def _read_settings(self, overwrite: bool) -> dict[str, Any] | None:
        """What all lines here share; nothing where that cannot be read and is overwritten."""
        file = self.path / "settings.json"
        if not file.is_file():
            return None
        try:
            return json.loads(file.read_text())
        except ValueError as error:
            if overwrite:
                return {}
            raise InputError(
                f"{self.path} holds an evaluation whose {file.name} was unreadable; restore that file, "
                f"{OVERWRITE_ADVICE}"
            ) from error

    def append(self, record: Record) -> None:
        try:
            with self.questions_file.open("a") as stream:
                stream.write(to_json(record) + "\n")
        except OSError as error:
            raise InputError(
                f"cannot write {self.questions_file} ({error.strerror}); make room and run again: what was finished "
                "is kept"
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
            stored = json.loads(self._sizes.read_text())
            stored["of"], stored["sizes"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{self._sizes} holds no tree sizes; remove it, and they are chosen anew") from error
        return stored

    def write_sizes(self, sizes: Mapping[str, Any]) -> None:
        write_text(self._sizes, json.dumps(sizes, indent=1) + "\n")

    def write_timing(self, timing: Profile) -> None:
        write_text(self.profile_file, json.dumps(timing.to_json(), indent=1) + "\n")

    def write_trace(self, seen: Trace) -> None:
        write_text(self.trace_file, seen_json(seen))

    def timings(self) -> list[Profile]:
        return [Profile.from_json(json.loads(file.read_text())) for file in sorted(self.path.glob("timing*.json"))]


def describe_differences(stored: dict[str, Any], now: dict[str, Any]) -> str:
    """Return what differs, for a sentence, "" where nothing does that must be the same.

    decoding.nodes was 16 (now 8)
    """
    flat_there, flat_now = flatten(stored), flatten(now)
    keys = [key for key in differing_keys(stored, now) if key != "code"]
    changes = [f"{key} was {flat_there.get(key)} (now {flat_now.get(key)})" for key in keys[:3]]
    text = ", ".join(changes) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    if "code" not in differing_keys(stored, now):
        return text
    code = f"the code was {describe_version(stored)} (now other in files that tokens or times come from)"
    return f"{text}, and {code}" if text else code


def describe_resume(stored: dict[str, Any], now: dict[str, Any]) -> str:
    """Return how to go on with what is there."""
    keys = differing_keys(stored, now)
    ways = ["repeat those settings"] if set(keys) - {"code"} else []
    return " and ".join([*ways, *(["go on with the version that began it"] if "code" in keys else [])])


def differing_keys(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the keys that differ, of those that must not."""
    flat_there, flat_now = flatten(stored), flatten(now)
    keys = {**flat_there, **flat_now}
    return [key for key in keys if key not in VERSION_KEYS and flat_there.get(key) != flat_now.get(key)]


def describe_version(settings: dict[str, Any]) -> str:
    """ctcdraft 0.1.0 at commit 0123456 with changes that were not committed"""
    name = " ".join(["ctcdraft", *([settings["version"]] if settings.get("version") else [])])
    commit = f" at commit {settings['commit'][:7]}" if settings.get("commit") else ""
    return name + commit + (" with changes that were not committed" if settings.get("dirty") else "")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def remove_files(files: Any) -> None:
    for file in files:
        file.unlink(missing_ok=True)
