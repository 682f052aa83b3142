"""Reports that lie in an output folder already, and whether a new evaluation may replace them.

Only fast imports here: these checks run before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ctcdraft.errors import InputError

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
