"""The files of the comparison: the rows of finished trainings, and the folders of its heads and evaluations.

    results/trainings.csv   a row per finished training        results/evaluations.jsonl.gz   a line per evaluation
    results/costs.json      counted costs                      results/comparison.json   rules of the published tables
    out/heads/NAME   run directories      out/evaluations/NAME   reports with responses
    out/jobs.json    overrides of every job that was begun

What is finished in `results`, which may be committed while the study runs, is not made again, also where `out` was
lost; a head is trained again only if an evaluation that is missing needs it. Changed overrides are refused instead of
mixing results. Several processes may work on one comparison: each holds a lock of the job it runs.
"""

from __future__ import annotations

import csv
import fcntl
import gzip
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.devices import end_with_parent
from ctcdraft.errors import InputError
from ctcdraft.io import atomic_write, write_text
from studies.comparison.config import FACTORS
from studies.comparison.jobs import Row

RULES, TRAININGS, COSTS, EVALUATIONS = "comparison.json", "trainings.csv", "costs.json", "evaluations.jsonl.gz"
NUMBERS = {"seed": int, "steps": int, "frames": int, "parameters": int, "learning_rate": float, "seconds": float}
NUMBERS |= {"tau": float, "loss": float}
# Keys on which no result depends.
INERT = ("run=", "out=", "hidden_states.path=", "trainer.checkpoint_", "trainer.save_total_limit=")
COLUMNS = (
    *("job", "base", "role", "method", "seed", "learning_rate", "steps", "frames", "parameters", "seconds", "tau"),
    *("loss", *FACTORS, "commit", "settings"),
)


@dataclass(frozen=True)
class ResultStore:
    """The folders `out` and `results`."""

    out: Path
    results: Path

    @property
    def trainings(self) -> Path:
        return self.results / TRAININGS

    @property
    def evaluations(self) -> Path:
        return self.results / EVALUATIONS

    @property
    def costs(self) -> Path:
        return self.results / COSTS

    def head_folder(self, name: str) -> Path:
        return self.out / "heads" / name

    def evaluation_folder(self, name: str) -> Path:
        return self.out / "evaluations" / name

    def log_file(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    def rows(self) -> dict[str, Row]:
        return read_rows(self.trainings)

    def append_row(self, row: Row) -> None:
        """Add a line to trainings.csv in one write, so that a kill or another process leaves whole lines."""
        if not self.trainings.is_file():
            write_text(self.trainings, ",".join(COLUMNS) + "\n")
        text = ",".join(csv_cell(row.get(column)) for column in COLUMNS)
        with self.trainings.open("a") as stream:
            stream.write(text + "\n")

    def measured(self) -> dict[str, Row]:
        return read_evaluations(self.evaluations)

    def append_evaluation(self, name: str, **values: Any) -> None:
        """Add a line to evaluations.jsonl.gz, without the names of this machine's folders."""
        line = without_folders(json.dumps({"evaluation": name, **values}, separators=(",", ":")) + "\n")
        with self.lock(self.evaluations.name, wait=True):
            before = self.evaluations.read_bytes() if self.evaluations.is_file() else b""
            text = before + gzip.compress(line.encode(), 9, mtime=0)
            atomic_write(self.evaluations, lambda file: file.write_bytes(text))

    def jobs(self) -> dict[str, dict[str, Any]]:
        file = self.out / "jobs.json"
        try:
            return json.loads(file.read_text()) if file.is_file() else {}
        except ValueError as error:
            raise InputError(f"{file} is damaged ({error}); remove it, and overrides are not compared") from error

    def note(self, name: str, **values: Any) -> None:
        """Add values to the entry of a job."""
        with self.lock("jobs.json", wait=True):
            jobs = self.jobs()
            jobs[name] = {**jobs.get(name, {}), **values}
            write_text(self.out / "jobs.json", json.dumps(jobs, indent=1) + "\n")

    def refuse_changed(self, name: str, before: Sequence[str], overrides: Sequence[str]) -> None:
        """Raise InputError if a job was begun with overrides that make it another job."""
        before, overrides = counting(before), counting(overrides)
        if before != overrides:
            old, new = (
                " ".join(each for each in one if each not in other) or "fewer overrides"
                for one, other in ((before, overrides), (overrides, before))
            )
            raise InputError(
                f"{name} in {self.out} was made with {old} and would now be made with {new}; choose another out= and "
                "results="
            )

    def refuse_other(self, name: str, row: Row, overrides: Sequence[str]) -> None:
        """Raise InputError if a job that is finished in `results` was made with overrides that make it another job."""
        if (before := row.get("settings")) and before != settings_digest(overrides):
            raise InputError(
                f"{name} in {self.results} was made with other settings (digest {before} instead of "
                f"{settings_digest(overrides)}), for example with other corpora; choose another results= and out="
            )

    @contextmanager
    def lock(self, name: str, wait: bool = False, shared: bool = False) -> Iterator[bool]:
        """Hold the lock of a name, alone or with others that share it; without `wait` yield False where that fails."""
        file = self.out / "locks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as stream:  # the system releases it when a process is killed
            try:
                fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True


def read_rows(file: Path) -> dict[str, Row]:
    """Return the rows of trainings.csv by the name of their job; a damaged line is refused."""
    if not file.is_file():
        return {}
    rows: dict[str, Row] = {}
    for line in csv.DictReader(file.read_text().splitlines()):
        try:
            rows[line["job"]] = {
                key: NUMBERS[key](value) if key in NUMBERS and value else value or None for key, value in line.items()
            }
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(f"{file} has a damaged line: {line} ({error}); correct it or remove the line") from error
    return rows


def read_evaluations(file: Path) -> dict[str, Row]:
    """Return the lines of evaluations.jsonl.gz by the name of their job."""
    try:
        text = gzip.decompress(file.read_bytes()).decode()
        return {line["evaluation"]: line for line in map(json.loads, text.splitlines())}
    except FileNotFoundError:
        return {}
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is damaged ({error}); restore it from the repository's history") from error


def counting(overrides: Sequence[str]) -> list[str]:
    """Return the overrides on which a result depends, of every path, also in lists and mappings, its last part."""
    return [re.sub(r"(?<=[=:,\[])[^=:,\[\]{}]*/", "", each) for each in overrides if not each.startswith(INERT)]


def settings_digest(overrides: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(counting(overrides)).encode()).hexdigest()[:8]


def without_folders(text: str) -> str:
    """Return a text in which of every absolute path the last part stays: /home/me/gsm8k/test.jsonl is test.jsonl."""
    return re.sub(r"""(?<=[\s="'\[,:])(?:/[\w.-]+)+/(?=[\w.-])""", "", text)


def csv_cell(value: Any) -> str:
    text = "" if value is None else f"{value:.8g}" if isinstance(value, float) else str(value)
    assert not re.search(r'[",\n]', text), text
    return text


def run_script(script: str, overrides: Sequence[str], log: Path) -> dict[str, float]:
    """Run `python SCRIPT OVERRIDES`, with its output in `log`; return its times. Raises InputError if it fails."""
    print(shlex.join(["python", script, *overrides]), flush=True)
    command = [sys.executable, str(REPOSITORY / script), *overrides]
    began, before = perf_counter(), processor_of_children()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        # In a session of its own, so that one signal reaches it: a training saves its state, and ends at a second one.
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_parent
        )
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status:
        # Its last line alone: the log may hold hours of progress.
        output = log.read_text(errors="replace").splitlines()
        last = "".join(f": {line.strip()}" for line in [line for line in output if line.strip()][-1:])
        kept = "finished results are kept, so fix it and run again"
        raise InputError(f"{script} ended with status {status}{last} (see {log}); {kept}")
    return {"seconds": perf_counter() - began, "processor_seconds": processor_of_children() - before}


def processor_of_children() -> float:
    times = os.times()  # of children that have ended
    return times.children_user + times.children_system
