"""report.json and report.md of one evaluation, and the table on the terminal. It prints what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.evaluation.output_dir import Folder
from ctcdraft.io import write_text
from ctcdraft.report import figures
from ctcdraft.report.tables import (
    BREAKDOWN,
    DIFFERENCES,
    FULL,
    MAIN,
    MORE,
    OWED,
    REPLAY,
    SIZED,
    UNLIKELY,
    fit,
    in_words,
    named,
    null,
    number,
    p_of_law,
    share,
    table,
)

if TYPE_CHECKING:
    from ctcdraft.report.tables import Columns, Row


def write(folder: Folder, rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> None:
    content = {"rows": rows, "environment": environment, "differences": differences}
    write_text(folder.path / "report.json", json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
    write_text(folder.path / "report.md", markdown(rows, environment, differences))
    write_text(folder.path / BREAKDOWN, figures.svg(rows, "Time of a pass, milliseconds"))


def terminal(rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> str:
    """The main table in 110 columns, and what must be said with it."""
    columns = MAIN if not environment.get("replay") else REPLAY
    cells = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
    told = [f"{said} (95 %, paired)" for said in map(in_words, differences)]
    return "\n".join([line.rstrip() for line in [*lines, *told, *statements(rows, environment)]])


def markdown(rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> str:
    first = rows[0]
    told = ["## Differences, paired over questions", table(differences, DIFFERENCES)] if differences else []
    parts = [
        f"# {first['benchmark']}, {first['decoding']} decoding, base {environment['base']}",
        f"{first['hardware']}, {first['dtype']}, seed {first['seed']}, {environment['date']}; "
        f"reads: {environment['reads']}\n\n"
        f"    {environment['command']}",
        table(rows, FULL),
        table(rows, MORE),
        "## Time of a pass, milliseconds (instrumented session)",
        table(rows, times(first)),
        f"![]({BREAKDOWN})",
        *told,
        *sizes(environment["sizes"] or {}),
        "## Categories",
        table([part for row in rows for part in category_rows(row)], category_columns()),
        "## Certificate",
        "\n".join(f"- {statement}" for statement in statements(rows, environment)),
        "## What the words mean",
        "\n".join(f"- **{word}**: {meaning}" for word, meaning in DEFINITIONS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def sizes(chosen: dict[str, Any]) -> list[str]:
    """What `decoding.nodes=auto` chose, and between what."""
    if not chosen:
        return []
    parts = ["## Tree sizes", SIZED]
    for name, found in chosen.items():
        columns: Columns = {
            name: lambda size: str(size["nodes"]),
            "tau": lambda size: number(size["tau"], 3),
            "c + v + o": lambda size: number(size["cost"], 3),
            "predicted": lambda size: number(size["predicted_speedup"], 3),
        }
        parts.append(f"{name}: {found['chosen']} nodes")
        parts.append(table(found["sizes"], columns))
    return parts


def times(row: Row) -> Columns:
    def milliseconds(part: str) -> Callable[[Row], str]:
        return lambda row: "-" if row["time"][part] is None else number(row["time"][part] * 1e3, 3)

    return {"drafter": MAIN["drafter"], **{part: milliseconds(part) for part in row["time"]}}


def category_rows(row: Row) -> list[Row]:
    return [
        {"drafter": named(row), "category": name, "owes": row["lossless"]["owes"], **part}
        for name, part in row["categories"].items()
    ]


def category_columns() -> Columns:
    return {
        "category": lambda part: part["category"],
        "drafter": lambda part: part["drafter"],
        "prompts": lambda part: str(part["prompts"]),
        "tau": lambda part: number(part["tau"]),
        "tau_paper": lambda part: number(part["tau_paper"]),
        "speedup": lambda part: number(part["speedup"]),
        "tokens/s": lambda part: number(part["tokens_per_second"], 1),
        "equal": lambda part: (
            "-" if part["owes"] != "words" or part["equal"] is None else f"{part['equal']}/{part['prompts']}"
        ),
        "accuracy": lambda part: share(part["accuracy"]),
    }


def statements(rows: Sequence[Row], environment: dict[str, Any]) -> list[str]:
    """In sentences: whether the text stayed the same, what was cut, what is still missing."""
    said = [statement for row in rows for statement in verdict(row)]
    prompts = rows[0]["lossless"]["prompts"]  # those that the loop decoded
    if not rows[0]["prompts"]:
        said.append("no question is finished here, so there is nothing to compare")
    elif not said:
        said.append(f"all contestants say what autoregression says on all {prompts} questions")
    if any(row["lossless"]["owes"] == "nothing" for row in rows):
        said.append("LOSSY: this verifier may accept what the base would not have said")
    said += [f"{row['drafter']} is {row['crossing']}" for row in rows if row.get("crossing")]
    said += [
        f"the head of {row['drafter']} was trained on {environment['base']} before it was quantised"
        for row in rows
        if row.get("quantised_since")
    ]
    if replay := environment.get("replay"):
        said.append(
            f"tau is replayed along autoregression's own answers to {rows[0]['prompts']} questions; the loop decoded "
            f"{replay['checked']} of them as well, at every size, and {replay['alike']} of {replay['answers']} answers "
            "took exactly the passes that were replayed"
        )
    if environment["cut"]["turns"]:
        said.append(
            f"{environment['cut']['turns']} prompts did not fit and lost {environment['cut']['tokens']:,} tokens "
            "on the left"
        )
    questions = environment["questions"]
    if questions["finished"] < questions["asked"]:
        said.append(f"{questions['finished']} of {questions['asked']} questions are finished; other shards may follow")
    if questions.get("reused"):
        said.append(
            f"the answers to {questions['reused']} of {questions['finished']} questions are reused: an earlier start "
            "or another shard gave them, with the same settings, code and versions, on the same hardware"
        )
    return said


def verdict(row: Row) -> list[str]:
    """Nothing where every question is equal. A row that owes the law still owes words where nothing was drawn."""
    law = fitted(row) if row["lossless"]["owes"] != "words" else None
    return [said for said in (law, differing(row)) if said is not None]


def differing(row: Row) -> str | None:
    """On how many questions words differ that are owed, and whether rounding explains it."""
    lossless = row["lossless"]
    wrong, undecided, explained = (lossless["owed"][kind] for kind in ("wrong", "undecided", "explained"))
    different = wrong + undecided + explained
    if not different:
        return None
    margins = [margin for margin in lossless["first_divergence_margins"] if margin is not None]
    where = f"{row['drafter']} differs on {different} of {lossless['prompts']} questions"
    if lossless["owes"] != "words":
        where += " in answers for which nothing was drawn"
    if margins:
        where += f" (margins {min(margins):.1e} to {max(margins):.1e})"
    if explained:
        where += f"; {explained} of them by rounding, equal in float64"
    if undecided:
        which = f"{undecided} of them are" if wrong or explained else "this is"
        where += f"; in {row['dtype']} a close call may flip, so {which} no error and no proof either{null(row)}"
    return f"NOT LOSSLESS: {where}" if wrong else where


def fitted(row: Row) -> str | None:
    """How the words of one that owes the law alone fit it; a lossy one's too, which shows how far off it is."""
    lossless = row["lossless"]
    if lossless["tokens"] is None:
        return None
    p_value = p_of_law(row)
    wrong = lossless["owes"] == "law" and p_value is not None and p_value < UNLIKELY
    said = (
        f"{'NOT LOSSLESS: ' if wrong else ''}{named(row)} owes {OWED[lossless['owes']]}: "
        f"{fit(lossless)}, total variation {lossless['tv']:.4f} (autoregression's own: {lossless['null_tv']:.4f})"
    )
    return said if lossless["by_draft"] is None else f"{said}; by what the draft favours {fit(lossless['by_draft'])}"
