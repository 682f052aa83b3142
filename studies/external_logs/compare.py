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
from ctcdraft.report.tables import Row, number, table, with_interval
from studies.external_logs.metrics import ACCEPTANCE, DEFINITIONS, SPEEDUPS, pairs, row, speedups, texts_of, timed
from studies.external_logs.read import RecordedRun

APART = 7 * 24 * 3600  # seconds between two arms, beyond which they were hardly one session on one machine


@dataclass(frozen=True)
class Note:
    """Something that a number does not say of itself. about: the fields it belongs beside. arm: whose; "" for both."""

    arm: str
    about: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Comparison:
    rows: list[dict[str, Any]]
    notes: list[Note]


def compare(run: RecordedRun, baseline: RecordedRun | None, seed: int) -> Comparison:
    """A row for the run, and one for its baseline where there is one."""
    notes = [*about_arm(run), note_of_missing()]
    run, left_out = with_tokens(run)
    if not run.answers:
        raise InputError(f"no question of {run.name} has token counts; were run and baseline exchanged?")
    notes += left_out
    if baseline is None:
        absent = Note("", (*SPEEDUPS, "equal"), "no baseline was given (recorded.baseline=): nothing to compare")
        return Comparison([row(run, None, seed)], [*notes, absent])
    notes += about_arm(baseline)
    stands_in = [turn for turn in baseline.turns() if not turn.counted]
    filled = {one: tuple(replace(turn, counted=turn.counted or turn.steps) for turn in answer)
              for one, answer in baseline.answers.items()}  # fmt: skip
    theirs = replace(baseline, answers=filled)
    notes += about_stand_in(run, theirs, len(stands_in)) + about_pair(run, theirs)
    rows = [row(run, theirs, seed), row(theirs, theirs, seed)]
    rows[1]["equal"] = None  # to itself
    if stands_in:  # by construction one token a pass: that measures nothing
        rows[1] |= dict.fromkeys([*ACCEPTANCE, *(f"{name}_ci" for name in ACCEPTANCE)])
    return Comparison(rows, notes)


def with_tokens(run: RecordedRun) -> tuple[RecordedRun, list[Note]]:
    """The run without the questions of which it does not hold all token counts, and the sentence about them."""
    kept = {one: answer for one, answer in run.answers.items() if all(turn.counted for turn in answer)}
    lost = len(run.answers) - len(kept)
    if not lost:
        return run, []
    text = f"{lost} of {len(run.answers)} questions lack a token count and are left out: passes do not tell tokens here"
    return replace(run, answers=kept), [Note(run.name, ("prompts", *ACCEPTANCE, *SPEEDUPS), text)]


def note_of_missing() -> Note:
    text = "answer files hold no passes one by one and no times within a turn: no alpha, acceptance rate, c, v or o"
    return Note("", ("tau",), text)


def about_arm(run: RecordedRun) -> list[Note]:
    """Of one file alone."""
    notes = []
    if run.repeated:
        text = f"{len(run.repeated)} questions stand there more than once ({some(run.repeated)}); the last line counts"
        notes.append(Note(run.name, ("prompts",), text))
    if run.choices > 1:
        text = f"there are up to {run.choices} answers to a question; only the first counts"
        notes.append(Note(run.name, ("prompts",), text))
    if len(run.models) > 1:
        text = f"the lines come from {len(run.models)} models or settings: {', '.join(run.models)}"
        notes.append(Note(run.name, ("prompts",), text))
    untimed = sum(not timed(answer) for answer in run.answers.values())
    if untimed:
        text = f"{untimed} of {len(run.answers)} questions have a time of zero and are left out of every speed"
        notes.append(Note(run.name, ("tokens_per_second", *SPEEDUPS), text))
    if not any(run.categories):
        text = "the file holds neither categories nor MT-Bench's question ids: there are no rows by category"
        notes.append(Note(run.name, ("prompts",), text))
    return notes


def about_stand_in(run: RecordedRun, baseline: RecordedRun, turns: int) -> list[Note]:
    """baseline: with passes where it lacked counts. turns: how many those are."""
    if not turns:
        return []
    fewer = {
        one: tuple(replace(turn, counted=turn.counted - 1) for turn in answer)
        for one, answer in baseline.answers.items()
    }
    chosen = pairs(run, baseline)
    other = speedups([run.answers[one] for one in chosen], [fewer[one] for one in chosen], 0)["speedup_paper"]
    text = (
        f"{turns} of {len(baseline.turns())} turns hold a token count of zero; passes (idxs + 1) stand in, since "
        "autoregression says one token a pass, and its own acceptance is not measured; with idxs in their place, one "
        f"token a turn too few, speedup_paper would be {'undefined' if other is None else f'{other:.2f}'}"
    )
    return [Note(baseline.name, ("tokens_per_second", *SPEEDUPS), text)]


def about_pair(run: RecordedRun, baseline: RecordedRun) -> list[Note]:
    """Of two files together."""
    notes = []
    for one, other in ((run, baseline), (baseline, run)):
        missing = [question for question in one.answers if question not in other.answers]
        if missing:
            text = f"{len(missing)} questions are in {one.name} alone ({some(missing)}): only the rest is compared"
            notes.append(Note("", (*SPEEDUPS, "equal"), text))
    off = sum(turn.counted != turn.steps for turn in baseline.turns())
    if off:
        text = f"tokens and passes differ in {off} of {len(baseline.turns())} turns: this is no plain autoregression"
        notes.append(Note(baseline.name, SPEEDUPS, text))
    both = [one for one in run.answers if one in baseline.answers]
    turns = [one for one in both if len(run.answers[one]) != len(baseline.answers[one])]
    if turns:
        text = f"{len(turns)} of {len(both)} questions have another number of turns: are these of one benchmark?"
        notes.append(Note("", (*SPEEDUPS, "equal"), text))
    other_text = sum(texts_of(run.answers[one]) != texts_of(baseline.answers[one]) for one in both)
    if other_text:
        text = f"{other_text} of {len(both)} questions have another text than the baseline's: the arms did other work"
        notes.append(Note("", (*SPEEDUPS, "equal"), text))
    if run.began is not None and baseline.began is not None and abs(run.began - baseline.began) > APART:
        days = abs(run.began - baseline.began) / 86400
        dates = f"run {day(run.began)}, baseline {day(baseline.began)}"
        text = f"recorded {days:.0f} days apart ({dates}): hardly one session, perhaps not one machine or one version"
        notes.append(Note("", SPEEDUPS, text))
    return notes


def day(stamp: float) -> str:
    return datetime.fromtimestamp(stamp, UTC).date().isoformat()


def some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")


COLUMNS: dict[str, Callable[[Row], str]] = {
    "prompts": lambda row: f"{row['prompts']:,}",
    "tau": lambda row: with_interval(row["tau"], row["tau_ci"]),
    "tau_mean": lambda row: with_interval(row["tau_mean"], row["tau_mean_ci"]),
    "tau_paper": lambda row: with_interval(row["tau_paper"], row["tau_paper_ci"]),
    "speedup": lambda row: with_interval(row["speedup"], row["speedup_ci"]),
    "speedup_paper": lambda row: with_interval(row["speedup_paper"], row["speedup_paper_ci"]),
    "speedup_turns": lambda row: with_interval(row["speedup_turns"], row["speedup_turns_ci"]),
    "tokens_per_second": lambda row: number(row["tokens_per_second"], 1),
    "equal": lambda row: "-" if row["equal"] is None else f"{row['equal']:,}",
    "doubled": lambda row: number(row["doubled_per_1000"]),
}


def write(out: Path, made: Comparison, environment: dict[str, Any]) -> None:
    held = {"rows": made.rows, "notes": [vars(note) for note in made.notes], "environment": environment}
    write_text(out / "report.json", json.dumps(held, separators=(",", ":"), allow_nan=False) + "\n")
    write_text(out / "report.md", markdown(made, environment))


def marked(name: str, arm: str, notes: Sequence[Note]) -> str:
    """` (1, 3)`: the numbers of the notes that belong beside a field of an arm. A speed-up has two arms' notes."""
    found = [
        str(place)
        for place, note in enumerate(notes, 1)
        if name in note.about and (note.arm in ("", arm) or name in SPEEDUPS)
    ]
    return f" ({', '.join(found)})" if found else ""


def cells(row: Row, arm: str, notes: Sequence[Note]) -> list[str]:
    return [cell(row) + marked(name, arm, notes) for name, cell in COLUMNS.items()]


def lines(made: Comparison, first: str, rows: Sequence[tuple[str, Row, str]]) -> str:
    """A table whose first column is given: (its cell, the row, its arm)."""
    columns: dict[str, Callable[[Row], str]] = {first: lambda row: row["cells"][0]}
    for place, name in enumerate(COLUMNS, 1):
        columns[name] = lambda row, place=place: row["cells"][place]  # type: ignore[misc]
    return table([{"cells": [label, *cells(row, arm, made.notes)]} for label, row, arm in rows], columns)


def numbered(notes: Sequence[Note]) -> list[str]:
    return [f"({place}) {f'{note.arm}: ' if note.arm else ''}{note.text}" for place, note in enumerate(notes, 1)]


def markdown(made: Comparison, environment: dict[str, Any]) -> str:
    run = made.rows[0]
    arms = [(row["drafter"], row, row["drafter"]) for row in made.rows]
    parts = [
        f"# Recorded: {run['drafter']}",
        f"Read on {environment['date']}\n\n    {environment['command']}",
        lines(made, "arm", arms),
        "\n".join(f"- {note}" for note in numbered(made.notes)),
    ]
    if run["categories"]:
        parts += ["## Categories", lines(made, "category", [(name, row, run["drafter"]) for name, row in
                                                            run["categories"].items()])]  # fmt: skip
    parts += ["## What the words mean", "\n".join(f"- **{word}**: {text}" for word, text in DEFINITIONS.items())]
    return "\n\n".join(parts) + "\n"


def terminal(made: Comparison) -> str:
    """One measure a line, the arms beside each other, then the notes."""
    shown = [["", *(row["drafter"] for row in made.rows)]]
    all_cells = [cells(row, row["drafter"], made.notes) for row in made.rows]
    shown += [[name, *(column[place] for column in all_cells)] for place, name in enumerate(COLUMNS)]
    widths = [max(len(line[column]) for line in shown) for column in range(len(shown[0]))]
    said = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in shown]
    return "\n".join([*said, "", *numbered(made.notes)])
