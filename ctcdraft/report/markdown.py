"""report.json and report.md of one evaluation, and the table on the terminal. It prints what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.io import write_text
from ctcdraft.report import figures
from ctcdraft.report.tables import (
    BREAKDOWN_FILE,
    DETAIL_COLUMNS,
    DIFFERENCE_COLUMNS,
    FULL_COLUMNS,
    GUARANTEES,
    MAIN_COLUMNS,
    MIN_P_VALUE,
    REPLAY_COLUMNS,
    TREE_SIZE_NOTE,
    describe_difference,
    describe_null,
    distribution_p_value,
    drafter_label,
    format_fit,
    format_number,
    format_share,
    markdown_table,
)

if TYPE_CHECKING:
    from ctcdraft.report.tables import Columns, Row


def write(folder: OutputDir, rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> None:
    content = {"rows": rows, "environment": environment, "differences": differences}
    write_text(folder.path / "report.json", json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
    write_text(folder.path / "report.md", markdown(rows, environment, differences))
    write_text(folder.path / BREAKDOWN_FILE, figures.breakdown_svg(rows, "Time of a pass, milliseconds"))


def terminal(rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> str:
    """The main table in 110 columns, and what must be said with it."""
    columns = MAIN_COLUMNS if not environment.get("replay") else REPLAY_COLUMNS
    cells = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
    difference_lines = [
        f"{difference_text} (95 %, paired)" for difference_text in map(describe_difference, differences)
    ]
    return "\n".join([line.rstrip() for line in [*lines, *difference_lines, *statements(rows, environment)]])


def markdown(rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> str:
    first = rows[0]
    difference_part = (
        ["## Differences, paired over questions", markdown_table(differences, DIFFERENCE_COLUMNS)]
        if differences
        else []
    )
    parts = [
        f"# {first['benchmark']}, {first['decoding']} decoding, base {environment['base']}",
        f"{first['hardware']}, {first['dtype']}, seed {first['seed']}, {environment['date']}; "
        f"reads: {environment['reads']}\n\n"
        f"    {environment['command']}",
        markdown_table(rows, FULL_COLUMNS),
        markdown_table(rows, DETAIL_COLUMNS),
        "## Time of a pass, milliseconds (instrumented session)",
        markdown_table(rows, time_columns(first)),
        f"![]({BREAKDOWN_FILE})",
        *difference_part,
        *tree_size_section(environment["sizes"] or {}),
        "## Categories",
        markdown_table([part for row in rows for part in category_rows(row)], category_columns()),
        "## Certificate",
        "\n".join(f"- {statement}" for statement in statements(rows, environment)),
        "## What the words mean",
        "\n".join(f"- **{word}**: {meaning}" for word, meaning in DEFINITIONS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def tree_size_section(chosen: dict[str, Any]) -> list[str]:
    """What `decoding.nodes=auto` chose, and between what."""
    if not chosen:
        return []
    parts = ["## Tree sizes", TREE_SIZE_NOTE]
    for name, found in chosen.items():
        columns: Columns = {
            name: lambda size: str(size["nodes"]),
            "tau": lambda size: format_number(size["tau"], 3),
            "c + v + o": lambda size: format_number(size["cost"], 3),
            "predicted": lambda size: format_number(size["predicted_speedup"], 3),
        }
        parts.append(f"{name}: {found['chosen']} nodes")
        parts.append(markdown_table(found["sizes"], columns))
    return parts


def time_columns(row: Row) -> Columns:
    def milliseconds(part: str) -> Callable[[Row], str]:
        return lambda row: "-" if row["time"][part] is None else format_number(row["time"][part] * 1e3, 3)

    return {"drafter": MAIN_COLUMNS["drafter"], **{part: milliseconds(part) for part in row["time"]}}


def category_rows(row: Row) -> list[Row]:
    return [
        {"drafter": drafter_label(row), "category": name, "owes": row["lossless"]["owes"], **part}
        for name, part in row["categories"].items()
    ]


def category_columns() -> Columns:
    return {
        "category": lambda part: part["category"],
        "drafter": lambda part: part["drafter"],
        "prompts": lambda part: str(part["prompts"]),
        "tau": lambda part: format_number(part["tau"]),
        "tau_paper": lambda part: format_number(part["tau_paper"]),
        "speedup": lambda part: format_number(part["speedup"]),
        "tokens/s": lambda part: format_number(part["tokens_per_second"], 1),
        "equal": lambda part: (
            "-" if part["owes"] != "words" or part["equal"] is None else f"{part['equal']}/{part['prompts']}"
        ),
        "accuracy": lambda part: format_share(part["accuracy"]),
    }


def statements(rows: Sequence[Row], environment: dict[str, Any]) -> list[str]:
    """In sentences: whether the text stayed the same, what was cut, what is still missing."""
    lines = [statement for row in rows for statement in row_statements(row)]
    prompts = rows[0]["lossless"]["prompts"]  # those that the loop decoded
    if not rows[0]["prompts"]:
        lines.append("no question is finished here, so there is nothing to compare")
    elif not lines:
        lines.append(f"all contestants say what autoregression says on all {prompts} questions")
    if any(row["lossless"]["owes"] == "nothing" for row in rows):
        lines.append("LOSSY: this verifier may accept what the base would not have said")
    lines += [f"{row['drafter']} is {row['crossing']}" for row in rows if row.get("crossing")]
    lines += [
        f"the head of {row['drafter']} was trained on {environment['base']} before it was quantised"
        for row in rows
        if row.get("quantised_since")
    ]
    if replay := environment.get("replay"):
        lines.append(
            f"tau is replayed along autoregression's own answers to {rows[0]['prompts']} questions; the loop decoded "
            f"{replay['checked']} of them as well, at every size, and {replay['alike']} of {replay['answers']} answers "
            "took exactly the passes that were replayed"
        )
    if environment["cut"]["turns"]:
        lines.append(
            f"{environment['cut']['turns']} prompts did not fit and lost {environment['cut']['tokens']:,} tokens "
            "on the left"
        )
    questions = environment["questions"]
    if questions["finished"] < questions["asked"]:
        lines.append(f"{questions['finished']} of {questions['asked']} questions are finished; other shards may follow")
    if questions.get("reused"):
        lines.append(
            f"the answers to {questions['reused']} of {questions['finished']} questions are reused: an earlier start "
            "or another shard gave them, with the same settings, code and versions, on the same hardware"
        )
    return lines


def row_statements(row: Row) -> list[str]:
    """Nothing where every question is equal. A row that owes the law still owes words where nothing was drawn."""
    fit_statement = describe_distribution_fit(row) if row["lossless"]["owes"] != "words" else None
    return [statement for statement in (fit_statement, describe_divergence(row)) if statement is not None]


def describe_divergence(row: Row) -> str | None:
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
        where += (
            f"; in {row['dtype']} a close call may flip, so {which} no error and no proof either{describe_null(row)}"
        )
    return f"NOT LOSSLESS: {where}" if wrong else where


def describe_distribution_fit(row: Row) -> str | None:
    """How the words of one that owes the law alone fit it; a lossy one's too, which shows how far off it is."""
    lossless = row["lossless"]
    if lossless["tokens"] is None:
        return None
    p_value = distribution_p_value(row)
    wrong = lossless["owes"] == "law" and p_value is not None and p_value < MIN_P_VALUE
    statement = (
        f"{'NOT LOSSLESS: ' if wrong else ''}{drafter_label(row)} owes {GUARANTEES[lossless['owes']]}: "
        f"{format_fit(lossless)}, total variation {lossless['tv']:.4f} (autoregression's own: "
        f"{lossless['null_tv']:.4f})"
    )
    return (
        statement
        if lossless["by_draft"] is None
        else f"{statement}; by what the draft favours {format_fit(lossless['by_draft'])}"
    )
