"""Comparison of two measured answer files, with notes on what the files do not hold; report.json and report.md.

A note qualifies a number and is printed beside every field that it is about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.io import write_text
from ctcdraft.report.tables import (
    Columns,
    Row,
    aligned_lines,
    format_number,
    format_with_interval,
    markdown_definitions,
    markdown_table,
)
from studies.external_logs.metrics import (
    ACCEPTANCE_MEASURES,
    DEFINITIONS,
    SPEEDUP_MEASURES,
    has_times,
    log_row,
    log_speedups,
    timed_in_both,
    turn_texts,
)
from studies.external_logs.read import LoggedRun, LoggedTurn

MAX_SECONDS_APART = 7 * 24 * 3600  # beyond it two arms were hardly recorded on one machine with one version
SPEEDS = ("tokens_per_second", *SPEEDUP_MEASURES)
COMPARED = (*SPEEDUP_MEASURES, "equal")


@dataclass(frozen=True)
class Note:
    """A sentence on the fields `about` of an arm, or of both where `arm` is empty."""

    arm: str
    about: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class LogComparison:
    rows: list[dict[str, Any]]
    notes: list[Note]


def compare_logs(run: LoggedRun, baseline: LoggedRun | None, seed: int) -> LogComparison:
    """Measure a run, and its baseline where there is one; `seed` is that of the bootstrap."""
    missing = "answer files hold neither single steps nor times within a turn: no alpha, acceptance rate, c, v or o"
    notes = [*arm_notes(run), Note("", ("tau",), missing)]
    run, uncounted = drop_uncounted(run)
    if not run.answers:
        raise InputError(f"no question of {run.name} has token counts; were run and baseline exchanged?")
    notes += uncounted
    if baseline is None:
        absent = Note("", COMPARED, "no baseline was given (recorded.baseline=): nothing to compare with")
        return LogComparison([log_row(run, None, seed)], [*notes, absent])
    notes += arm_notes(baseline)
    replaced = sum(not turn.token_count for turn in baseline.turns())
    # Autoregression has one token per forward pass, so its forward passes count tokens that the file does not hold.
    baseline = recounted(baseline, lambda turn: turn.token_count or turn.pass_count)
    notes += replaced_count_notes(run, baseline, replaced) + pair_notes(run, baseline)
    rows = [log_row(run, baseline, seed), log_row(baseline, baseline, seed) | {"equal": None}]
    if replaced:  # one token per forward pass by construction, which measures nothing
        rows[1] |= dict.fromkeys([*ACCEPTANCE_MEASURES, *(f"{name}_ci" for name in ACCEPTANCE_MEASURES)])
    return LogComparison(rows, notes)


def recounted(run: LoggedRun, count: Callable[[LoggedTurn], int]) -> LoggedRun:
    answers = {
        question: tuple(replace(turn, token_count=count(turn)) for turn in answer)
        for question, answer in run.answers.items()
    }
    return replace(run, answers=answers)


def drop_uncounted(run: LoggedRun) -> tuple[LoggedRun, list[Note]]:
    kept = {one: answer for one, answer in run.answers.items() if all(turn.token_count for turn in answer)}
    lost = len(run.answers) - len(kept)
    text = f"{lost} of {len(run.answers)} questions lack a token count and are left out: forward passes differ"
    about = ("prompts", *ACCEPTANCE_MEASURES, *SPEEDUP_MEASURES)
    return replace(run, answers=kept), [Note(run.name, about, text)] if lost else []


def arm_notes(run: LoggedRun) -> list[Note]:
    untimed, total = sum(not has_times(answer) for answer in run.answers.values()), len(run.answers)
    repeated = f"{len(run.repeated)} questions occur more than once ({abbreviate_ids(run.repeated)}); the last counts"
    models = f"the lines come from {len(run.models)} models or settings: {', '.join(run.models)}"
    cases = [
        (run.repeated, ("prompts",), repeated),
        (run.choices > 1, ("prompts",), f"up to {run.choices} responses to a question; only the first counts"),
        (len(run.models) > 1, ("prompts",), models),
        (untimed, SPEEDS, f"{untimed} of {total} questions have a time of zero and are left out of every speed"),
        (not any(run.categories), ("prompts",), "neither categories nor MT-Bench's question ids: no rows by category"),
    ]
    return [Note(run.name, about, text) for applies, about, text in cases if applies]


def replaced_count_notes(run: LoggedRun, baseline: LoggedRun, turns: int) -> list[Note]:
    """Return a note on `turns` turns of the baseline whose token counts are replaced by their forward passes."""
    if not turns:
        return []
    fewer = recounted(baseline, lambda turn: turn.token_count - 1).answers
    timed = timed_in_both(run, baseline)
    other = log_speedups([run.answers[one] for one in timed], [fewer[one] for one in timed], 0)["speedup_paper"]
    text = (
        f"{turns} of {len(baseline.turns())} turns hold a token count of zero; forward passes (idxs + 1) replace it, "
        "since autoregression has one token per forward pass, and the baseline's acceptance is not measured; with idxs "
        "instead, one token per turn too few, speedup_paper would be "
        + ("undefined" if other is None else f"{other:.2f}")
    )
    return [Note(baseline.name, SPEEDS, text)]


def pair_notes(run: LoggedRun, baseline: LoggedRun) -> list[Note]:
    both = [question for question in run.answers if question in baseline.answers]
    off = sum(turn.token_count != turn.pass_count for turn in baseline.turns())
    turns = sum(len(run.answers[one]) != len(baseline.answers[one]) for one in both)
    texts = sum(turn_texts(run.answers[one]) != turn_texts(baseline.answers[one]) for one in both)
    cases: list[tuple[Any, str, tuple[str, ...], str]] = []
    for one, other in ((run, baseline), (baseline, run)):
        alone = [question for question in one.answers if question not in other.answers]
        text = f"{len(alone)} questions are in {one.name} alone ({abbreviate_ids(alone)}): only the rest is compared"
        cases.append((alone, "", COMPARED, text))
    uneven = f"tokens and forward passes differ in {off} of {len(baseline.turns())} turns"
    some = f"of {len(both)} questions have another"
    cases += [
        (off, baseline.name, SPEEDUP_MEASURES, f"{uneven}: this is not plain autoregression"),
        (turns, "", COMPARED, f"{turns} {some} number of turns: are these of one benchmark?"),
        (texts, "", COMPARED, f"{texts} {some} text than the baseline's: the arms did other work"),
    ]
    if run.began is not None and baseline.began is not None and abs(run.began - baseline.began) > MAX_SECONDS_APART:
        days = abs(run.began - baseline.began) / 86400
        dates = "run {:%Y-%m-%d}, baseline {:%Y-%m-%d}".format(
            *(datetime.fromtimestamp(one, UTC) for one in (run.began, baseline.began))
        )
        text = f"recorded {days:.0f} days apart ({dates}): perhaps not on one machine or with one version"
        cases.append((True, "", SPEEDUP_MEASURES, text))
    return [Note(arm, about, text) for applies, arm, about, text in cases if applies]


def abbreviate_ids(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")


def interval_column(name: str) -> Callable[[Row], str]:
    return lambda row: format_with_interval(row[name], row[f"{name}_ci"])


COLUMNS: dict[str, Callable[[Row], str]] = {
    "prompts": lambda row: f"{row['prompts']:,}",
    **{name: interval_column(name) for name in (*ACCEPTANCE_MEASURES, *SPEEDUP_MEASURES)},
    "tokens_per_second": lambda row: format_number(row["tokens_per_second"], 1),
    "equal": lambda row: "-" if row["equal"] is None else f"{row['equal']:,}",
    "doubled": lambda row: format_number(row["doubled_per_1000"]),
}


def write(out: Path, comparison: LogComparison, environment: dict[str, Any]) -> None:
    report = {"rows": comparison.rows, "notes": list(map(vars, comparison.notes)), "environment": environment}
    write_text(out / "report.json", json.dumps(report, separators=(",", ":"), allow_nan=False) + "\n")
    write_text(out / "report.md", markdown(comparison, environment))


def note_marks(name: str, arm: str, notes: Sequence[Note]) -> str:
    """Return ` (1, 3)`: the numbers of the notes on a field of an arm."""
    marks = [  # a speed-up is of two arms, so it has the notes of both
        str(number)
        for number, note in enumerate(notes, 1)
        if name in note.about and (note.arm in ("", arm) or name in SPEEDUP_MEASURES)
    ]
    return f" ({', '.join(marks)})" if marks else ""


def row_cells(row: Row, arm: str, notes: Sequence[Note]) -> list[str]:
    return [cell(row) + note_marks(name, arm, notes) for name, cell in COLUMNS.items()]


def arm_cells(comparison: LogComparison) -> list[list[str]]:
    return [[row["drafter"], *row_cells(row, row["drafter"], comparison.notes)] for row in comparison.rows]


def category_cells(comparison: LogComparison) -> list[list[str]]:
    run = comparison.rows[0]
    return [[name, *row_cells(row, run["drafter"], comparison.notes)] for name, row in run["categories"].items()]


def numbered_notes(notes: Sequence[Note]) -> list[str]:
    return [f"({number}) {f'{note.arm}: ' if note.arm else ''}{note.text}" for number, note in enumerate(notes, 1)]


def cells_table(first: str, lines: Sequence[Sequence[str]]) -> str:
    columns: Columns = {key: itemgetter(key) for key in (first, *COLUMNS)}
    return markdown_table([dict(zip(columns, line, strict=True)) for line in lines], columns)


def markdown(comparison: LogComparison, environment: dict[str, Any]) -> str:
    parts = [
        f"# Recorded: {comparison.rows[0]['drafter']}",
        f"Read on {environment['date']}\n\n    {environment['command']}",
        cells_table("arm", arm_cells(comparison)),
        "\n".join(f"- {note}" for note in numbered_notes(comparison.notes)),
    ]
    if categories := category_cells(comparison):
        parts += ["## Categories", cells_table("category", categories)]
    return "\n\n".join([*parts, markdown_definitions(DEFINITIONS)]) + "\n"


def terminal(comparison: LogComparison) -> str:
    """Return a line per measure with the arms side by side, then the notes."""
    lines = aligned_lines(list(zip(["", *COLUMNS], *arm_cells(comparison), strict=True)))
    return "\n".join([*lines, "", *numbered_notes(comparison.notes)])
