"""What has been made so far, on disk: trained heads and finished evaluations, with the words that made them.

What is there is not made again. It knows files and words, and runs nothing.

Command lines of this repository's scripts, run one after the other; what each took. It knows no method.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.errors import InputError
from ctcdraft.io import write_text
from ctcdraft.training.run_directory import RunDirectory

Entry = dict[str, Any]
RULES, TRAINING, MATCHING, EVALUATIONS, VERDICT = "rules", "training", "matching", "evaluations", "verdict"


@dataclass(frozen=True)
class ResultStore:
    """out/rules.json, training.json, matching.json, evaluations.json, verdict.json: names and what is known of each."""

    out: Path

    def read(self, part: str) -> dict[str, Entry]:
        file = self.out / f"{part}.json"
        try:
            return json.loads(file.read_text()) if file.is_file() else {}
        except ValueError as error:
            raise InputError(f"{file} is damaged ({error}); remove it, and what it told of is made again") from error

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
        """What is known of a head that is there; None if it has to be trained."""
        found = self.read(TRAINING).get(name)
        if found is None or not RunDirectory(self.run_folder(name)).head.is_file():
            return None
        self.refuse_changed_overrides(name, found["words"], overrides)
        return found

    def is_evaluated(self, name: str, overrides: Sequence[str]) -> bool:
        found = self.read(EVALUATIONS).get(name)
        if found is None or not (self.evaluation_folder(name) / "report.json").is_file():
            return False
        self.refuse_changed_overrides(name, found["words"], overrides)
        return True

    def refuse_changed_overrides(self, name: str, there: Sequence[str], now: Sequence[str]) -> None:
        """Raise InputError where something of that name was made with other words."""
        if list(there) != list(now):
            gone, new = ([word for word in one if word not in other] for one, other in ((there, now), (now, there)))
            raise InputError(
                f"{name} in {self.out} was made with {' '.join(gone) or 'fewer words'} and would now be made with "
                f"{' '.join(new) or 'fewer'}; give another arena.out=, or remove it there to have it made again"
            )


@dataclass(frozen=True)
class RunTime:
    """Seconds of a command. processor: of all its threads; a machine that is shared does not lengthen it much."""

    processor: float
    wall: float


def run_script(script: str, overrides: Sequence[str], log: Path | None = None) -> RunTime:
    """`python SCRIPT WORDS`; what it says goes to `log`, else to the terminal. Raises InputError if it fails."""
    print(shlex.join(["python", script, *overrides]), flush=True)
    command = [sys.executable, str(REPOSITORY / script), *overrides]
    before, began = os.times(), perf_counter()
    if log is None:
        status = subprocess.run(command).returncode
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stream:
            status = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT).returncode
    after = os.times()
    if status:
        raise InputError(failure_message(script, status, log))
    processor = after.children_user - before.children_user + after.children_system - before.children_system
    return RunTime(processor, perf_counter() - began)


def failure_message(script: str, status: int, log: Path | None) -> str:
    log_lines = (
        [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log is not None else []
    )
    last = f": {log_lines[-1].strip()}" if log_lines else ""
    where = f" (see {log})" if log is not None else ""
    return f"{script} ended with status {status}{last}{where}; what was finished is kept, so mend it and run again"
