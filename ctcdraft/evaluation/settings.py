"""Values of evaluate.py that are refused before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ctcdraft.errors import InputError, check_int


def refuse_impossible(config: Any) -> None:
    """Raise InputError for the first value with which nothing can be measured. config: as in configs/evaluate.yaml."""
    check_int(config.seed, "seed", least=0)
    check_int(config.timing.questions, "timing.questions", least=0)
    check_int(config.warm_up_tokens, "warm_up_tokens", least=0)
    if config.threads is not None:
        check_int(config.threads, "threads")


def as_list(value: Any, key: str) -> list[Any]:
    """Return a list, or of one string the list of it."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        raise InputError(f"{key}={value} is no list; give one such as {key}=[A,B]")
    return list(value)


NO_BENCHMARK = "something else than questions"  # latencies, or the answer files of others
OVERWRITE_ADVICE = "choose another out=, or add overwrite=true to replace it"


@dataclass(frozen=True)
class FinishedReport:
    """asked: questions of the benchmark under its limit. finished: those that the report counts, of all shards."""

    benchmark: str
    contestants: tuple[str, ...]
    question_count: int
    finished: int

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Return what a report holds; None where there is none, or one that cannot be read and is made again."""
        try:
            report = json.loads(file.read_text())
            rows, environment = report["rows"], report["environment"]
            finished = max(row.get("prompts", 0) for row in rows)
            asked = environment.get("questions", {}).get("asked", finished)
            drafters = dict.fromkeys(row.get("drafter", "") for row in rows)
            return cls(rows[0].get("benchmark", NO_BENCHMARK), tuple(drafters), asked, finished)
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
    """Raise InputError where the folder holds a report that this evaluation would replace by less.

    Fewer questions are less, so is another benchmark, and so are contestants left out. More questions go on.
    """
    report = FinishedReport.read(out / "report.json")
    if report is None:
        return
    if report.benchmark != benchmark:
        raise InputError(f"{out} holds {report}, and this evaluation is of {benchmark}; {OVERWRITE_ADVICE}")
    if report.question_count > questions:
        raise InputError(
            f"{out} holds {report}, and this evaluation asks {describe_count(questions)}; give benchmark.limit="
            f"{report.question_count} or more to go on, {OVERWRITE_ADVICE}"
        )
    if missing := [name for name in report.contestants if name not in set(contestants)]:
        raise InputError(
            f"{out} holds {report} with {len(report.contestants)} contestants, and this evaluation leaves out "
            f"{', '.join(missing)}; name all of them, {OVERWRITE_ADVICE}"
        )
