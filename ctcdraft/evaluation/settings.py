"""Checks of evaluate.py before a base model is loaded: values of the config, and a finished report in the way.

Only fast imports here: these checks run before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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


def count_questions(count: int) -> str:
    return f"{count:,} question{'' if count == 1 else 's'}"


def refuse_existing_report(out: Path, overwrite: bool) -> None:
    """Raise InputError where the folder holds a report that is not to be overwritten."""
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
    held = f"{share}{count_questions(asked)} of {stored_benchmark}" if stored_benchmark else NO_BENCHMARK
    held = f"{out} holds a report of {held}"
    if stored_benchmark != benchmark:
        raise InputError(f"{held}, and this evaluation is of {benchmark}; {OVERWRITE_ADVICE}")
    if asked > questions:
        raise InputError(
            f"{held}, and this evaluation asks {count_questions(questions)}; give benchmark.limit={asked} or more to "
            f"resume, {OVERWRITE_ADVICE}"
        )
    if missing := [name for name in drafters if name not in set(contestants)]:
        raise InputError(
            f"{held} with {len(drafters)} contestants, and this evaluation leaves out {', '.join(missing)}; name all "
            f"of them, {OVERWRITE_ADVICE}"
        )
