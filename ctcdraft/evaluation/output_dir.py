"""Output directory of one evaluation: records are appended, settings compared, the files of all shards read together.

settings.json        what must be equal for all records here
questions*.jsonl     one record per line; each shard writes its own file, and each process that shares it, until the end
timing*.json         the profile of each shard
explorer*.json       traces of a few answers, for report.html
sizes.json           what decoding.nodes=auto chose, before the first question
report.json, report.md, report.html, breakdown.svg, figures/
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ctcdraft.distributed import ALONE, Distributed, Shard
from ctcdraft.errors import InputError
from ctcdraft.evaluation.profiling import Profile
from ctcdraft.evaluation.records import Record, from_json, to_json
from ctcdraft.evaluation.trace import Trace, trace_to_json
from ctcdraft.io import write_text

SHARD_FILES = (("questions", ".jsonl"), ("timing", ".json"), ("explorer", ".json"))
REPORT_FILES = ("report.json", "report.md", "report.html", "breakdown.svg", "figures/*.svg")
EVALUATION_FILES = ("settings.json", "sizes.json", *(f"{start}*{end}" for start, end in SHARD_FILES), *REPORT_FILES)
VERSION_KEYS = ("version", "commit", "dirty")  # stored for error messages; the code is compared by its hash
NO_BENCHMARK = "something other than a benchmark"  # latencies, or external logs
OVERWRITE_ADVICE = "choose another out=, or add overwrite=true to replace it"


class OutputDir:
    """The files of one evaluation, from the view of one shard, or of one of the processes that share it."""

    def __init__(self, path: Path, shard: Shard, processes: Distributed = ALONE) -> None:
        self.path = path
        self.shard = shard
        self.processes = processes
        self._shard_file = path / f"questions{shard}.jsonl"
        rank = processes.rank
        self.questions_file = path / f"questions{shard}.rank{rank}.jsonl" if rank else self._shard_file
        self.profile_file = path / f"timing{shard}.json"
        self.trace_file = path / f"explorer{shard}.json"
        self._sizes = path / "sizes.json"

    def open(self, settings: dict[str, Any], questions: int, overwrite: bool) -> None:
        """Prepare the folder for `append`; raise InputError if it holds another evaluation or a larger report.

        All processes must call it.

        Args:
            questions: number of questions of all shards.
            overwrite: remove this shard's files, the report and the files of another split.
        """
        self.processes.from_main(lambda: self._open(settings, questions, overwrite))
        self.path.mkdir(parents=True, exist_ok=True)  # on the disk of another machine
        if overwrite and not self.processes.is_main:
            self.questions_file.unlink(missing_ok=True)
        self.collect()  # the records of a job that was killed

    def _open(self, settings: dict[str, Any], questions: int, overwrite: bool) -> None:
        existing = self._read_settings(overwrite)
        foreign_files = self._files_of_other_splits()
        if overwrite:
            # The files of other shards of this evaluation remain: they may be running.
            own_files = self.questions_file, self.profile_file, self.trace_file
            remove_files([*own_files, *self._rank_files(), *foreign_files, *self._matching_files(REPORT_FILES)])
            if existing is not None and differing_keys(existing, settings):
                remove_files(self._matching_files(EVALUATION_FILES))
                existing = None
        else:
            refuse_smaller_evaluation(self.path, settings["benchmark"]["name"], questions, settings["contestants"])
            if existing is not None:
                refuse_differences(existing, settings, f"{self.path} holds an evaluation in which")
            if foreign_files:
                split = f"{self.shard.number}/{self.shard.of}"
                raise InputError(
                    f"{self.path} holds {foreign_files[0].name}, which is no part of shard={split}; resume with the "
                    f"split it was started with, {OVERWRITE_ADVICE}"
                )
        if existing is None:  # otherwise settings.json keeps the version that started the evaluation
            write_text(self.path / "settings.json", json.dumps(settings, indent=1) + "\n")
        if self.questions_file.is_file():  # an interrupted process leaves an incomplete last line
            os.truncate(self.questions_file, self.questions_file.read_bytes().rfind(b"\n") + 1)

    def _rank_files(self) -> list[Path]:
        """Return the files of the further processes of this shard that are on this disk."""
        return sorted(self.path.glob(f"questions{self.shard}.rank*.jsonl"))

    def collect(self) -> None:
        """Move the records of all processes into the file of the first one; all processes must call it."""
        own = [] if self.processes.is_main else finished_lines(self.questions_file)
        gathered = [line for lines in self.processes.all_gather_object(own) for line in lines]
        self.processes.from_main(lambda: self._add_lines(gathered))
        if not self.processes.is_main:
            self.questions_file.unlink(missing_ok=True)

    def _add_lines(self, lines: list[str]) -> None:
        files = self._rank_files()  # also of processes that are not started again
        lines += [line for file in files for line in finished_lines(file)]
        if lines:
            by_index = {json.loads(line)["index"]: line for line in [*lines, *finished_lines(self._shard_file)]}
            write_text(self._shard_file, "".join(by_index[index] + "\n" for index in sorted(by_index)))
        remove_files(files)

    def _matching_files(self, patterns: Iterable[str]) -> list[Path]:
        return [file for pattern in patterns for file in self.path.glob(pattern)]

    def _files_of_other_splits(self) -> list[Path]:
        """Return the files of shards i/M where this one is i/N: they hold the same questions a second time."""
        present = self._matching_files(f"{start}*{end}" for start, end in SHARD_FILES)
        siblings = self.shard.siblings
        names = [f"{start}{siblings}{rank}{end}" for start, end in SHARD_FILES for rank in ("", ".rank*")]
        ours = self._matching_files(names)
        return sorted(set(present) - set(ours))

    def _read_settings(self, overwrite: bool) -> dict[str, Any] | None:
        """Return settings.json; None if there is none."""
        file = self.path / "settings.json"
        try:
            return json.loads(file.read_text()) if file.is_file() else None
        except ValueError as error:
            if overwrite:
                return {}  # differs from all settings, so everything is removed
            advice = f"restore that file, {OVERWRITE_ADVICE}"
            raise InputError(f"{self.path} holds an evaluation whose {file.name} is unreadable; {advice}") from error

    def append(self, record: Record) -> None:
        try:
            with self.questions_file.open("a") as stream:
                stream.write(to_json(record) + "\n")
        except OSError as error:
            advice = "free disk space and run again: finished questions are kept"
            raise InputError(f"cannot write {self.questions_file} ({error.strerror}); {advice}") from error

    def records(self, questions: int) -> list[Record]:
        """Return the finished questions of all shards with an index below `questions`, in the benchmark's order."""
        records: dict[int, Record] = {}
        for file in sorted(self.path.glob("questions*.jsonl")):
            # Text after the last line end is incomplete, or is being written by another shard.
            for number, line in enumerate(finished_lines(file), 1):
                try:
                    record = from_json(line)
                except (ValueError, KeyError, TypeError) as error:
                    where = f"line {number} of {file}"
                    raise InputError(f"{where} is no finished question; remove that line and run again") from error
                records.setdefault(record.index, record)
        return [records[index] for index in sorted(records) if index < questions]

    def sizes(self) -> dict[str, Any] | None:
        """Return sizes.json, or None if there is none."""
        if not self._sizes.is_file():
            return None
        try:
            stored = json.loads(self._sizes.read_text())
            return {"of": stored["of"], "prompts": [*stored.get("prompts", ())], "sizes": dict(stored["sizes"])}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{self._sizes} holds no tree sizes; remove it, and they are chosen again") from error

    def write_sizes(self, sizes: Mapping[str, Any]) -> None:
        write_text(self._sizes, json.dumps(sizes, indent=1) + "\n")

    def write_timing(self, timing: Profile) -> None:
        write_text(self.profile_file, json.dumps(timing.to_json(), indent=1) + "\n")

    def write_trace(self, trace: Trace) -> None:
        write_text(self.trace_file, trace_to_json(trace))

    def timings(self) -> list[Profile]:
        return [Profile.from_json(json.loads(file.read_text())) for file in sorted(self.path.glob("timing*.json"))]


def finished_lines(file: Path) -> list[str]:
    """Return the lines of a file without an incomplete last one; none where it is absent."""
    return file.read_text().split("\n")[:-1] if file.is_file() else []


def refuse_differences(stored: dict[str, Any], now: dict[str, Any], start: str) -> None:
    """Raise InputError, in a sentence with this start, if the settings differ: decoding.nodes was 16 (now 8)."""
    differing = differing_keys(stored, now)
    if not differing:
        return
    flat_stored, flat_now, keys = flatten(stored), flatten(now), [key for key in differing if key != "code"]
    named = [f"{key} was {flat_stored.get(key)} (now {flat_now.get(key)})" for key in keys[:3]]
    changes = [", ".join(named) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")] if keys else []
    ways = ["repeat those settings"] if keys else []
    if "code" in differing:
        changes += [f"the code was {describe_version(stored)} (now different in files that tokens or times depend on)"]
        ways += ["resume with the version that started it"]
    raise InputError(f"{start} {', and '.join(changes)}; {' and '.join(ways)}, {OVERWRITE_ADVICE}")


def differing_keys(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the dotted keys whose values differ, VERSION_KEYS excepted."""
    flat_stored, flat_now = flatten(stored), flatten(now)
    keys = {**flat_stored, **flat_now}
    return [key for key in keys if key not in VERSION_KEYS and flat_stored.get(key) != flat_now.get(key)]


def describe_version(settings: dict[str, Any]) -> str:
    """Return such as: ctcdraft 0.1.0 at commit 0123456 with uncommitted changes"""
    name = " ".join(["ctcdraft", *([settings["version"]] if settings.get("version") else [])])
    commit = f" at commit {settings['commit'][:7]}" if settings.get("commit") else ""
    return name + commit + (" with uncommitted changes" if settings.get("dirty") else "")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def remove_files(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def refuse_existing_report(out: Path, overwrite: bool) -> None:
    if (out / "report.json").exists() and not overwrite:
        raise InputError(f"{out} holds a report; {OVERWRITE_ADVICE}")


def refuse_smaller_evaluation(out: Path, benchmark: str, questions: int, contestants: Iterable[str]) -> None:
    """Raise InputError if the folder holds a report of more questions, other contestants or another benchmark."""
    try:
        report = json.loads((out / "report.json").read_text())
        rows, counts = report["rows"], report["environment"].get("questions", {})
        finished = max(row.get("prompts", 0) for row in rows)
        asked, stored_benchmark = counts.get("asked", finished), rows[0].get("benchmark")
        drafters = dict.fromkeys(row.get("drafter", "") for row in rows)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return  # there is none, or it is unreadable and will be written again
    share = f"{finished:,} of " if finished < asked else ""
    held = f"{share}{asked:,} question{'s' * (asked != 1)} of {stored_benchmark}" if stored_benchmark else NO_BENCHMARK
    held = f"{out} holds a report of {held}"
    if stored_benchmark != benchmark:
        raise InputError(f"{held}, and this evaluation is of {benchmark}; {OVERWRITE_ADVICE}")
    if asked > questions:
        raise InputError(
            f"{held}, and this evaluation asks {questions:,} question{'s' * (questions != 1)}; give benchmark.limit="
            f"{asked} or more to resume, {OVERWRITE_ADVICE}"
        )
    if missing := [name for name in drafters if name not in set(contestants)]:
        raise InputError(
            f"{held} with {len(drafters)} contestants, and this evaluation leaves out {', '.join(missing)}; name all "
            f"of them, {OVERWRITE_ADVICE}"
        )
