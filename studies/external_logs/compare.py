"""Two recorded arms beside each other, and in words what their files do not hold. It measures nothing itself.

The report of recorded runs: every number with the sentences that belong beside it. It prints what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.io import write_text
from ctcdraft.report.tables import Row, format_number, format_with_interval, markdown_table
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
from studies.external_logs.read import LoggedRun

MAX_SECONDS_APART = 7 * 24 * 3600  # seconds between two arms, beyond which they were hardly one session on one machine


@dataclass(frozen=True)
class Note:
    """Something that a number does not say of itself. about: the fields it belongs beside. arm: whose; "" for both."""

    arm: str
    about: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class LogComparison:
    rows: list[dict[str, Any]]
    notes: list[Note]


def compare_logs(run: LoggedRun, baseline: LoggedRun | None, seed: int) -> LogComparison:
    """A row for the run, and one for its baseline where there is one."""
    notes = [*arm_notes(run), missing_fields_note()]
    run, left_out = drop_uncounted(run)
    if not run.answers:
        raise InputError(f"no question of {run.name} has token counts; were run and baseline exchanged?")
    notes += left_out
    if baseline is None:
        absent = Note(
            "", (*SPEEDUP_MEASURES, "equal"), "no baseline was given (recorded.baseline=): nothing to compare"
        )
        return LogComparison([log_row(run, None, seed)], [*notes, absent])
    notes += arm_notes(baseline)
    stands_in = [turn for turn in baseline.turns() if not turn.token_count]
    filled = {one: tuple(replace(turn, token_count=turn.token_count or turn.pass_count) for turn in answer)
              for one, answer in baseline.answers.items()}  # fmt: skip
    theirs = replace(baseline, answers=filled)
    notes += stand_in_notes(run, theirs, len(stands_in)) + pair_notes(run, theirs)
    rows = [log_row(run, theirs, seed), log_row(theirs, theirs, seed)]
    rows[1]["equal"] = None  # to itself
    if stands_in:  # by construction one token a pass: that measures nothing
        rows[1] |= dict.fromkeys([*ACCEPTANCE_MEASURES, *(f"{name}_ci" for name in ACCEPTANCE_MEASURES)])
    return LogComparison(rows, notes)


def drop_uncounted(run: LoggedRun) -> tuple[LoggedRun, list[Note]]:
    """The run without the questions of which it does not hold all token counts, and the sentence about them."""
    kept = {one: answer for one, answer in run.answers.items() if all(turn.token_count for turn in answer)}
    lost = len(run.answers) - len(kept)
    if not lost:
        return run, []
    text = f"{lost} of {len(run.answers)} questions lack a token count and are left out: passes do not tell tokens here"
    return replace(run, answers=kept), [Note(run.name, ("prompts", *ACCEPTANCE_MEASURES, *SPEEDUP_MEASURES), text)]


def missing_fields_note() -> Note:
    text = "answer files hold no passes one by one and no times within a turn: no alpha, acceptance rate, c, v or o"
    return Note("", ("tau",), text)


def arm_notes(run: LoggedRun) -> list[Note]:
    """Of one file alone."""
    notes = []
    if run.repeated:
        repeated = abbreviate_ids(run.repeated)
        text = f"{len(run.repeated)} questions stand there more than once ({repeated}); the last line counts"
        notes.append(Note(run.name, ("prompts",), text))
    if run.choices > 1:
        text = f"there are up to {run.choices} answers to a question; only the first counts"
        notes.append(Note(run.name, ("prompts",), text))
    if len(run.models) > 1:
        text = f"the lines come from {len(run.models)} models or settings: {', '.join(run.models)}"
        notes.append(Note(run.name, ("prompts",), text))
    untimed = sum(not has_times(answer) for answer in run.answers.values())
    if untimed:
        text = f"{untimed} of {len(run.answers)} questions have a time of zero and are left out of every speed"
        notes.append(Note(run.name, ("tokens_per_second", *SPEEDUP_MEASURES), text))
    if not any(run.categories):
        text = "the file holds neither categories nor MT-Bench's question ids: there are no rows by category"
        notes.append(Note(run.name, ("prompts",), text))
    return notes


def stand_in_notes(run: LoggedRun, baseline: LoggedRun, turns: int) -> list[Note]:
    """baseline: with passes where it lacked counts. turns: how many those are."""
    if not turns:
        return []
    fewer = {
        one: tuple(replace(turn, token_count=turn.token_count - 1) for turn in answer)
        for one, answer in baseline.answers.items()
    }
    chosen = timed_in_both(run, baseline)
    other = log_speedups([run.answers[one] for one in chosen], [fewer[one] for one in chosen], 0)["speedup_paper"]
    text = (
        f"{turns} of {len(baseline.turns())} turns hold a token count of zero; passes (idxs + 1) stand in, since "
        "autoregression says one token a pass, and its own acceptance is not measured; with idxs in their place, one "
        f"token a turn too few, speedup_paper would be {'undefined' if other is None else f'{other:.2f}'}"
    )
    return [Note(baseline.name, ("tokens_per_second", *SPEEDUP_MEASURES), text)]


def pair_notes(run: LoggedRun, baseline: LoggedRun) -> list[Note]:
    """Of two files together."""
    notes = []
    for one, other in ((run, baseline), (baseline, run)):
        missing = [question for question in one.answers if question not in other.answers]
        if missing:
            ids = abbreviate_ids(missing)
            text = f"{len(missing)} questions are in {one.name} alone ({ids}): only the rest is compared"
            notes.append(Note("", (*SPEEDUP_MEASURES, "equal"), text))
    off = sum(turn.token_count != turn.pass_count for turn in baseline.turns())
    if off:
        text = f"tokens and passes differ in {off} of {len(baseline.turns())} turns: this is no plain autoregression"
        notes.append(Note(baseline.name, SPEEDUP_MEASURES, text))
    both = [one for one in run.answers if one in baseline.answers]
    turns = [one for one in both if len(run.answers[one]) != len(baseline.answers[one])]
    if turns:
        text = f"{len(turns)} of {len(both)} questions have another number of turns: are these of one benchmark?"
        notes.append(Note("", (*SPEEDUP_MEASURES, "equal"), text))
    other_text = sum(turn_texts(run.answers[one]) != turn_texts(baseline.answers[one]) for one in both)
    if other_text:
        text = f"{other_text} of {len(both)} questions have another text than the baseline's: the arms did other work"
        notes.append(Note("", (*SPEEDUP_MEASURES, "equal"), text))
    if run.began is not None and baseline.began is not None and abs(run.began - baseline.began) > MAX_SECONDS_APART:
        days = abs(run.began - baseline.began) / 86400
        dates = f"run {iso_date(run.began)}, baseline {iso_date(baseline.began)}"
        text = f"recorded {days:.0f} days apart ({dates}): hardly one session, perhaps not one machine or one version"
        notes.append(Note("", SPEEDUP_MEASURES, text))
    return notes


def iso_date(stamp: float) -> str:
    return datetime.fromtimestamp(stamp, UTC).date().isoformat()


def abbreviate_ids(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")


COLUMNS: dict[str, Callable[[Row], str]] = {
    "prompts": lambda row: f"{row['prompts']:,}",
    "tau": lambda row: format_with_interval(row["tau"], row["tau_ci"]),
    "tau_mean": lambda row: format_with_interval(row["tau_mean"], row["tau_mean_ci"]),
    "tau_paper": lambda row: format_with_interval(row["tau_paper"], row["tau_paper_ci"]),
    "speedup": lambda row: format_with_interval(row["speedup"], row["speedup_ci"]),
    "speedup_paper": lambda row: format_with_interval(row["speedup_paper"], row["speedup_paper_ci"]),
    "speedup_turns": lambda row: format_with_interval(row["speedup_turns"], row["speedup_turns_ci"]),
    "tokens_per_second": lambda row: format_number(row["tokens_per_second"], 1),
    "equal": lambda row: "-" if row["equal"] is None else f"{row['equal']:,}",
    "doubled": lambda row: format_number(row["doubled_per_1000"]),
}


def write(out: Path, made: LogComparison, environment: dict[str, Any]) -> None:
    held = {"rows": made.rows, "notes": [vars(note) for note in made.notes], "environment": environment}
    write_text(out / "report.json", json.dumps(held, separators=(",", ":"), allow_nan=False) + "\n")
    write_text(out / "report.md", markdown(made, environment))


def note_marks(name: str, arm: str, notes: Sequence[Note]) -> str:
    """` (1, 3)`: the numbers of the notes that belong beside a field of an arm. A speed-up has two arms' notes."""
    found = [
        str(place)
        for place, note in enumerate(notes, 1)
        if name in note.about and (note.arm in ("", arm) or name in SPEEDUP_MEASURES)
    ]
    return f" ({', '.join(found)})" if found else ""


def row_cells(row: Row, arm: str, notes: Sequence[Note]) -> list[str]:
    return [cell(row) + note_marks(name, arm, notes) for name, cell in COLUMNS.items()]


def arms_markdown_table(made: LogComparison, first: str, rows: Sequence[tuple[str, Row, str]]) -> str:
    """A table whose first column is given: (its cell, the row, its arm)."""
    columns: dict[str, Callable[[Row], str]] = {first: lambda row: row["cells"][0]}
    for place, name in enumerate(COLUMNS, 1):
        columns[name] = lambda row, place=place: row["cells"][place]  # type: ignore[misc]
    return markdown_table([{"cells": [label, *row_cells(row, arm, made.notes)]} for label, row, arm in rows], columns)


def numbered_notes(notes: Sequence[Note]) -> list[str]:
    return [f"({place}) {f'{note.arm}: ' if note.arm else ''}{note.text}" for place, note in enumerate(notes, 1)]


def markdown(made: LogComparison, environment: dict[str, Any]) -> str:
    run = made.rows[0]
    arms = [(row["drafter"], row, row["drafter"]) for row in made.rows]
    parts = [
        f"# Recorded: {run['drafter']}",
        f"Read on {environment['date']}\n\n    {environment['command']}",
        arms_markdown_table(made, "arm", arms),
        "\n".join(f"- {note}" for note in numbered_notes(made.notes)),
    ]
    if run["categories"]:
        parts += ["## Categories", arms_markdown_table(made, "category", [(name, row, run["drafter"]) for name, row in
                                                            run["categories"].items()])]  # fmt: skip
    parts += ["## What the words mean", "\n".join(f"- **{word}**: {text}" for word, text in DEFINITIONS.items())]
    return "\n\n".join(parts) + "\n"


def terminal(made: LogComparison) -> str:
    """One measure a line, the arms beside each other, then the notes."""
    shown = [["", *(row["drafter"] for row in made.rows)]]
    all_cells = [row_cells(row, row["drafter"], made.notes) for row in made.rows]
    shown += [[name, *(column[place] for column in all_cells)] for place, name in enumerate(COLUMNS)]
    widths = [max(len(line[column]) for line in shown) for column in range(len(shown[0]))]
    text_lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in shown
    ]
    return "\n".join([*text_lines, "", *numbered_notes(made.notes)])
