"""The files of a comparison (trained heads, finished evaluations, matched sizes), and the commands that make them.

What is recorded is not made again. Every entry keeps the overrides it was made with, so that a changed config is
refused instead of mixing results.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.errors import InputError
from ctcdraft.io import write_text
from ctcdraft.renamed import OPTIONS, current_argument
from ctcdraft.training.run_directory import RunDirectory

Entry = dict[str, Any]
RULES, TRAINING, MATCHING, EVALUATIONS, VERDICT = "rules", "training", "matching", "evaluations", "verdict"
OLD_KEYS = {"again": "extra_seeds", "dials": "size_keys", "rates": "learning_rates", "words": "overrides"}


@dataclass(frozen=True)
class ResultStore:
    """out/rules.json, training.json, matching.json, evaluations.json and verdict.json: entries by name."""

    out: Path

    def read(self, part: str) -> dict[str, Entry]:
        file = self.out / f"{part}.json"
        try:
            return present_keys(json.loads(file.read_text())) if file.is_file() else {}
        except ValueError as error:
            raise InputError(f"{file} is damaged ({error}); remove it to have its results made again") from error

    def write(self, part: str, content: Mapping[str, Any]) -> None:
        write_text(self.out / f"{part}.json", json.dumps(content, indent=1) + "\n")

    def add(self, part: str, name: str, entry: Entry) -> Entry:
        self.write(part, {**self.read(part), name: entry})
        return entry

    def run_folder(self, name: str) -> Path:
        return self.out / "runs" / name

    def log_file(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    def evaluation_folder(self, name: str) -> Path:
        return self.out / "evaluations" / name

    def find_trained(self, name: str, overrides: Sequence[str]) -> Entry | None:
        return self.find_made(TRAINING, name, RunDirectory(self.run_folder(name)).head, overrides)

    def find_evaluated(self, name: str, overrides: Sequence[str]) -> Entry | None:
        return self.find_made(EVALUATIONS, name, self.evaluation_folder(name) / "report.json", overrides)

    def find_made(self, part: str, name: str, result: Path, overrides: Sequence[str]) -> Entry | None:
        """Return the entry of a result; None if it has to be made."""
        entry = self.read(part).get(name)
        if entry is None or not result.is_file():  # a removed result is made again
            return None
        self.refuse_changed_overrides(name, entry["overrides"], overrides)
        return entry

    def refuse_changed_overrides(self, name: str, before: Sequence[str], now: Sequence[str]) -> None:
        """Raise InputError if a result of this name was made with other overrides."""
        if len(before) != len(now) or not all(map(is_same_override, before, now)):
            old, new = (
                " ".join(argument for argument in one if argument not in other) or "fewer overrides"
                for one, other in ((before, now), (now, before))
            )
            raise InputError(
                f"{name} in {self.out} was made with {old} and would now be made with {new}; choose another "
                "arena.out=, or remove it there to have it made again"
            )


def present_keys(node: Any) -> Any:
    """Return the content of a file in which keys of earlier versions have their present names."""
    if isinstance(node, dict):
        return {OLD_KEYS.get(key, key): present_keys(value) for key, value in node.items()}
    return list(map(present_keys, node)) if isinstance(node, list) else node


def is_same_override(before: str, now: str) -> bool:
    """Return whether an override recorded before a renaming, RUN@TREE included, is what it is called now.

    Some old names were options of two groups: @drawn is @sampled of a parallel drafter, @sampled_sequential of others.
    """
    old, new = (re.split(r"(?<=@)(\w+)", current_argument(override)) for override in (before, now))
    groups = [OPTIONS["drafter/growth"], OPTIONS["drafter/paths"]]
    return len(old) == len(new) and all(
        one == other or other in [group.get(one) for group in groups] for one, other in zip(old, new, strict=True)
    )


@dataclass(frozen=True)
class RunTime:
    """Seconds of a command."""

    processor: float  # of all threads; it hardly grows on a machine that others use as well
    wall: float


def run_script(script: str, overrides: Sequence[str], log: Path | None = None) -> RunTime:
    """Run `python SCRIPT OVERRIDES`, with its output in `log` or on the terminal. Raises InputError if it fails."""
    print(shlex.join(["python", script, *overrides]), flush=True)
    command = [sys.executable, str(REPOSITORY / script), *overrides]
    before, began = os.times(), perf_counter()
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") if log is not None else nullcontext() as stream:
        errors = subprocess.STDOUT if stream is not None else None
        status = subprocess.run(command, stdout=stream, stderr=errors).returncode
    after = os.times()
    if status:
        # Its last line alone: the log may hold hours of progress.
        output = log.read_text(errors="replace").splitlines() if log is not None else []
        last = "".join(f": {line.strip()}" for line in [line for line in output if line.strip()][-1:])
        where = f" (see {log})" if log is not None else ""
        kept = "finished results are kept, so fix it and run again"
        raise InputError(f"{script} ended with status {status}{last}{where}; {kept}")
    processor = after.children_user - before.children_user + after.children_system - before.children_system
    return RunTime(processor, perf_counter() - began)
