"""report.json and report.md of one evaluation, and its table on the terminal.

Beside the numbers stand the sentences that qualify them: whether the output was lossless, what was truncated, and what
is still missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.io import write_text
from ctcdraft.report.figures import BREAKDOWN_TITLE, breakdown_svg
from ctcdraft.report.tables import (
    BREAKDOWN_FILE,
    DETAIL_COLUMNS,
    DIFFERENCE_COLUMNS,
    FULL_COLUMNS,
    MAIN_COLUMNS,
    MIN_P_VALUE,
    REPLAY_COLUMNS,
    Columns,
    Row,
    aligned_lines,
    describe_difference,
    describe_null,
    distribution_p_value,
    drafter_label,
    format_fit,
    format_number,
    format_share,
    markdown_definitions,
    markdown_table,
    millisecond_columns,
)

TREE_SIZE_NOTE = (
    "Chosen before the first question, on prompts of no benchmark: tau of every size is replayed from one run that "
    "drafts the largest tree after every token, the cost of a step is measured, and the chosen size maximises tau / "
    "cost."
)
SIZE_COLUMNS: Columns = {
    "nodes": lambda size: str(size["nodes"]),
    "tau": lambda size: format_number(size["tau"], 3),
    "c + v + o": lambda size: format_number(size["cost"], 3),
    "predicted": lambda size: format_number(size["predicted_speedup"], 3),
}
CATEGORY_COLUMNS: Columns = {
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


def write(folder: OutputDir, rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> None:
    """Write report.json, report.md and the figure of the time per step."""
    content = {"rows": rows, "environment": environment, "differences": differences}
    write_text(folder.path / "report.json", json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
    write_text(folder.path / "report.md", markdown(rows, environment, differences))
    write_text(folder.path / BREAKDOWN_FILE, breakdown_svg(rows, BREAKDOWN_TITLE))


def terminal(rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> str:
    """Return the main table, at most 110 columns wide, and the sentences that qualify it."""
    columns = MAIN_COLUMNS if not environment.get("replay") else REPLAY_COLUMNS
    lines = aligned_lines([list(columns), *([cell(row) for cell in columns.values()] for row in rows)])
    lines += [f"{describe_difference(pair)} (95 %, paired)" for pair in differences]
    return "\n".join([*lines, *statements(rows, environment)])


def markdown(rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> str:
    """Return report.md."""
    first = rows[0]
    parts = [
        f"# {first['benchmark']}, {first['decoding']} decoding, base {environment['base']}",
        f"{first['hardware']}, {first['dtype']}, seed {first['seed']}, {environment['date']}; "
        f"forward passes: {environment['reads']}\n\n    {environment['command']}",
        markdown_table(rows, FULL_COLUMNS),
        markdown_table(rows, DETAIL_COLUMNS),
        "## Time per step, milliseconds (instrumented session)",
        markdown_table(rows, {"drafter": drafter_label, **millisecond_columns(list(first["time"]))}),
        f"![]({BREAKDOWN_FILE})",
    ]
    if differences:
        parts += ["## Differences, paired over questions", markdown_table(differences, DIFFERENCE_COLUMNS)]
    if sizes := environment["sizes"]:
        parts += ["## Tree sizes", TREE_SIZE_NOTE]
        for name, choice in sizes.items():
            parts += [f"{name}: {choice['chosen']} nodes", markdown_table(choice["sizes"], SIZE_COLUMNS)]
    parts += [
        "## Categories",
        markdown_table([part for row in rows for part in category_rows(row)], CATEGORY_COLUMNS),
        "## Losslessness",
        "\n".join(f"- {statement}" for statement in statements(rows, environment)),
        markdown_definitions(DEFINITIONS),
    ]
    return "\n\n".join(parts) + "\n"


def category_rows(row: Row) -> list[Row]:
    return [
        {"drafter": drafter_label(row), "category": name, "owes": row["lossless"]["owes"], **part}
        for name, part in row["categories"].items()
    ]


def statements(rows: Sequence[Row], environment: dict[str, Any]) -> list[str]:
    """Return sentences on losslessness, truncated prompts and unfinished questions."""
    lines = [statement for row in rows for statement in row_statements(row)]
    if not rows[0]["prompts"]:
        lines.append("no question is finished here, so there is nothing to compare")
    elif not lines:
        decoded = rows[0]["lossless"]["prompts"]  # in a replay only some questions are decoded by the loop
        lines.append(f"every method's tokens equal the baseline's on all {decoded} questions")
    if any(row["lossless"]["owes"] == "nothing" for row in rows):
        lines.append("LOSSY: this verifier may accept tokens that the base model would not produce")
    lines += [f"{row['drafter']} is {row['crossing']}" for row in rows if row.get("crossing")]
    lines += [
        f"the head of {row['drafter']} was trained on {environment['base']} before it was quantized"
        for row in rows
        if row.get("quantised_since")
    ]
    return lines + environment_statements(rows, environment)


def environment_statements(rows: Sequence[Row], environment: dict[str, Any]) -> list[str]:
    lines, cut, questions = [], environment["cut"], environment["questions"]
    if replay := environment.get("replay"):
        lines.append(
            f"tau is replayed along the baseline's responses to {rows[0]['prompts']} questions; the loop decoded "
            f"{replay['checked']} of them as well, at every size, and {replay['alike']} of {replay['answers']} "
            "responses took exactly the replayed steps"
        )
    if cut["turns"]:
        lines.append(
            f"{cut['turns']} prompts exceeded the context and were truncated on the left by {cut['tokens']:,} tokens"
        )
    if questions["finished"] < questions["asked"]:
        lines.append(f"{questions['finished']} of {questions['asked']} questions are finished; other shards may follow")
    if questions.get("reused"):
        lines.append(
            f"the responses to {questions['reused']} of {questions['finished']} questions are reused from an earlier "
            "start or another shard with the same settings, code, versions and hardware"
        )
    return lines


def row_statements(row: Row) -> list[str]:
    """Return nothing where all questions are equal. Of sampled drafts both are checked: the distribution of all
    tokens, and the tokens of those responses in which no draft token was sampled."""
    fit = describe_distribution_fit(row) if row["lossless"]["owes"] != "words" else None
    return [statement for statement in (fit, describe_divergence(row)) if statement is not None]


def describe_divergence(row: Row) -> str | None:
    """Return on how many questions tokens differ that should be identical, and whether rounding explains it."""
    lossless = row["lossless"]
    wrong, undecided, explained = (lossless["owed"][kind] for kind in ("wrong", "undecided", "explained"))
    different = wrong + undecided + explained
    if not different:
        return None
    margins = [margin for margin in lossless["first_divergence_margins"] if margin is not None]
    sentence = f"{row['drafter']} differs on {different} of {lossless['prompts']} questions"
    if lossless["owes"] != "words":
        sentence += " in responses without sampled draft tokens"
    if margins:
        sentence += f" (margins {min(margins):.1e} to {max(margins):.1e})"
    if explained:
        sentence += f"; {explained} of them by rounding, equal in float64"
    if undecided:
        which = f"{undecided} of them are" if wrong or explained else "this is"
        sentence += f"; near ties may flip in {row['dtype']}, so {which} undecided{describe_null(row)}"
    return f"NOT LOSSLESS: {sentence}" if wrong else sentence


def describe_distribution_fit(row: Row) -> str | None:
    """Return how well the tokens of sampled drafts, or of a lossy verifier, fit the base model's distribution."""
    lossless = row["lossless"]
    if lossless["tokens"] is None:
        return None
    p_value = distribution_p_value(row)
    wrong = lossless["owes"] == "law" and p_value is not None and p_value < MIN_P_VALUE
    guarantee = (
        "must follow the base model's distribution, not reproduce its tokens, because draft tokens are sampled"
        if lossless["owes"] == "law"
        else "has no guarantee; the fit to the base model's distribution"
    )
    statement = (
        f"{'NOT LOSSLESS: ' if wrong else ''}{drafter_label(row)} {guarantee}: {format_fit(lossless)}, total variation "
        f"{lossless['tv']:.4f} (the baseline's own: {lossless['null_tv']:.4f})"
    )
    by_draft = lossless["by_draft"]
    return statement if by_draft is None else f"{statement}; in the order of q/p {format_fit(by_draft)}"
