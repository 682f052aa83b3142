"""Checks of evaluate.py before a base model is loaded: values of the config, and a finished report in the way.

Only fast imports here: these checks run before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ctcdraft.errors import InputError, check_int


def refuse_impossible(config: Any) -> None:
    """Raise InputError for the first value of configs/evaluate.yaml that is out of range."""
    check_int(config.seed, "seed", least=0)
    check_int(config.timing.questions, "timing.questions", least=0)
    check_int(config.warm_up_tokens, "warm_up_tokens", least=0)
    if config.threads is not None:
        check_int(config.threads, "threads")


def as_list(value: Any, key: str) -> list[Any]:
    """Return a value as a list; a string becomes a list of one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        raise InputError(f"{key} must be a list such as {key}=[A,B], got {value}")
    return list(value)


NO_BENCHMARK = "something other than a benchmark"  # latencies, or external logs
OVERWRITE_ADVICE = "choose another out=, or add overwrite=true to replace it"


@dataclass(frozen=True)
class FinishedReport:
    """What a report.json covers, read from the file alone.

    Args:
        question_count: questions of the benchmark under its limit.
        finished: those that the report counts, of all shards.
    """

    benchmark: str
    contestants: tuple[str, ...]
    question_count: int
    finished: int

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Return what a report covers; None if there is none, or if it is unreadable and will be written again."""
        try:
            report = json.loads(file.read_text())
            rows, environment = report["rows"], report["environment"]
            finished = max(row.get("prompts", 0) for row in rows)
            question_count = environment.get("questions", {}).get("asked", finished)
            drafters = dict.fromkeys(row.get("drafter", "") for row in rows)
            return cls(rows[0].get("benchmark", NO_BENCHMARK), tuple(drafters), question_count, finished)
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            return None

    def __str__(self) -> str:
        if self.benchmark == NO_BENCHMARK:
            return f"a report of {NO_BENCHMARK}"
        part = f"{self.finished:,} of " if self.finished < self.question_count else ""
        return f"a report of {part}{describe_count(self.question_count)} of {self.benchmark}"


def describe_count(questions: int) -> str:
    return f"{questions:,} question{'' if questions == 1 else 's'}"


def refuse_existing_report(out: Path, overwrite: bool) -> None:
    """Raise InputError where the folder holds a report that is not to be overwritten."""
    if (out / "report.json").exists() and not overwrite:
        raise InputError(f"{out} holds a report; {OVERWRITE_ADVICE}")


def refuse_smaller_evaluation(out: Path, benchmark: str, questions: int, contestants: Iterable[str]) -> None:
    """Raise InputError if the folder holds a report of more questions, other contestants or another benchmark."""
    report = FinishedReport.read(out / "report.json")
    if report is None:
        return
    if report.benchmark != benchmark:
        raise InputError(f"{out} holds {report}, and this evaluation is of {benchmark}; {OVERWRITE_ADVICE}")
    if report.question_count > questions:
        raise InputError(
            f"{out} holds {report}, and this evaluation asks {describe_count(questions)}; give benchmark.limit="
            f"{report.question_count} or more to resume, {OVERWRITE_ADVICE}"
        )
    if missing := [name for name in report.contestants if name not in set(contestants)]:
        raise InputError(
            f"{out} holds {report} with {len(report.contestants)} contestants, and this evaluation leaves out "
            f"{', '.join(missing)}; name all of them, {OVERWRITE_ADVICE}"
        )
