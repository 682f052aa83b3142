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
from ctcdraft.evaluation.records import NO_GUARANTEE, SAME_DISTRIBUTION, SAME_TOKENS
from ctcdraft.io import write_text
from ctcdraft.report import tables
from ctcdraft.report.figures import BREAKDOWN_TITLE, breakdown_figure
from ctcdraft.report.tables import Columns, Row

FEW_QUESTIONS = 20
TREE_SIZE_NOTE = (
    "Chosen before the first question, on other prompts: tau of every size is replayed from one run that drafts the "
    "largest tree after every token, the cost of a step is measured, and the chosen size maximises tau / cost."
)
ADAPTIVE_NOTE = (
    "Every draft keeps as many nodes as are worth their time, or is skipped. Acceptance probabilities are calibrated, "
    "and step times measured or given, before the first question, on other prompts. The first tables show what trees "
    "of fixed sizes would reach there, the second how reliable the probabilities are on questions of this benchmark."
)
RELIABILITY_COLUMNS: Columns = {
    "probability": lambda part: tables.format_number(part["probability"], 3),
    "accepted": lambda part: tables.format_number(part["accepted"], 3),
    "nodes": lambda part: f"{part['nodes']:,}",
}
SIZE_COLUMNS: Columns = {
    "nodes": lambda size: str(size["nodes"]),
    "tau": lambda size: tables.format_number(size["tau"], 3),
    "c + v + o": lambda size: tables.format_number(size["cost"], 3),
    "predicted": lambda size: tables.format_number(size["predicted_speedup"], 3),
}
CATEGORY_COLUMNS: Columns = {
    "category": lambda part: part["category"],
    "drafter": lambda part: part["drafter"],
    "prompts": lambda part: str(part["prompts"]),
    "tau": lambda part: tables.format_number(part["tau"]),
    "tau_paper": lambda part: tables.format_number(part["tau_paper"]),
    "speedup": lambda part: tables.format_number(part["speedup"]),
    "tokens/s": lambda part: tables.format_number(part["tokens_per_second"], 1),
    "equal": lambda part: (
        "-" if part["owes"] != SAME_TOKENS or part["equal"] is None else f"{part['equal']}/{part['prompts']}"
    ),
    "accuracy": lambda part: tables.format_share(part["accuracy"]),
}


def write(folder: OutputDir, rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> None:
    """Write report.json, report.md and the figure of the time per step."""
    content = {"rows": rows, "environment": environment, "differences": differences}
    write_text(folder.path / "report.json", json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
    write_text(folder.path / "report.md", markdown(rows, environment, differences))
    write_text(folder.path / tables.BREAKDOWN_FILE, breakdown_figure(rows, BREAKDOWN_TITLE).file())


def terminal(rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> str:
    """Return the main table, at most 110 columns wide, and the sentences that qualify it."""
    columns = tables.MAIN_COLUMNS if not environment.get("replay") else tables.REPLAY_COLUMNS
    lines = tables.aligned_lines([list(columns), *([cell(row) for cell in columns.values()] for row in rows)])
    lines += [f"{tables.describe_difference(pair)} (95 %, paired)" for pair in differences]
    return "\n".join([*lines, *statements(rows, environment)])


def markdown(rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> str:
    """Return report.md."""
    first = rows[0]
    parts = [
        f"# {first['benchmark']}, {first['decoding']} decoding, base {environment['base']}",
        f"{first['hardware']}, {first['dtype']}, seed {first['seed']}, {environment['date']}; "
        f"forward passes: {environment['reads']}\n\n    {environment['command']}",
        tables.markdown_table(rows, tables.FULL_COLUMNS),
        tables.markdown_table(rows, tables.DETAIL_COLUMNS),
        "## Time per step, milliseconds (instrumented session)",
        tables.markdown_table(
            rows, {"drafter": tables.drafter_label, **tables.millisecond_columns(list(first["time"]))}
        ),
        f"![]({tables.BREAKDOWN_FILE})",
    ]
    if differences:
        parts += [
            "## Differences, paired over questions",
            tables.markdown_table(differences, tables.DIFFERENCE_COLUMNS),
        ]
    if sizes := environment["sizes"]:
        adaptive = any("policy" in choice for choice in sizes.values())
        parts += ["## Tree sizes", ADAPTIVE_NOTE if adaptive else TREE_SIZE_NOTE]
        for name, choice in sizes.items():
            chosen = f"{choice['chosen']} nodes"
            if "policy" in choice:
                chosen = f"adaptive, expected speed-up {choice['predicted']:.3f}"
            parts += [f"{name}: {chosen}", tables.markdown_table(choice["sizes"], SIZE_COLUMNS)]
            if bins := choice.get("reliability"):
                parts += [tables.markdown_table(bins, RELIABILITY_COLUMNS)]
    categories = [
        {"drafter": tables.drafter_label(row), "category": name, "owes": row["lossless"]["owes"], **part}
        for row in rows
        for name, part in row["categories"].items()
    ]
    parts += [
        "## Categories",
        tables.markdown_table(categories, CATEGORY_COLUMNS),
        "## Losslessness",
        "\n".join(f"- {statement}" for statement in statements(rows, environment)),
        tables.markdown_definitions(DEFINITIONS),
    ]
    return "\n\n".join(parts) + "\n"


def statements(rows: Sequence[Row], environment: dict[str, Any]) -> list[str]:
    """Return sentences on losslessness, truncated prompts and unfinished questions."""
    lines = []
    for row in rows:
        # Of sampled drafts both are checked: the distribution of all tokens, and the tokens of those responses in which
        # no draft token was sampled.
        fit = describe_distribution_fit(row) if row["lossless"]["owes"] != SAME_TOKENS else None
        lines += [statement for statement in (fit, describe_divergence(row)) if statement is not None]
        if row["lossless"]["owes"] == NO_GUARANTEE and row["temperature"] == 0:
            equal = f"{row['lossless']['equal']} of {row['lossless']['prompts']} questions"
            lines.append(f"{tables.drafter_label(row)} has no guarantee; its tokens equal the baseline's on {equal}")
    if not rows[0]["prompts"]:  # of this shard
        lines.append("no question is finished here, so there is nothing to compare")
    elif not lines:
        decoded = rows[0]["lossless"]["prompts"]  # in a replay only some questions are decoded by the loop
        lines.append(f"every method's tokens equal the baseline's on all {decoded} questions")
    if any(row["lossless"]["owes"] == NO_GUARANTEE for row in rows):
        lines.append("LOSSY: this verifier may accept tokens that the base model would not produce")
    lines += [f"{row['drafter']} is {row['crossing']}" for row in rows if row.get("crossing")]
    lines += tables.describe_steps(rows)
    older = [row["drafter"] for row in rows if row.get("quantised_since")]
    lines += [f"the head of {name} was trained on {environment['base']} before it was quantized" for name in older]
    cut, questions = environment["cut"], environment["questions"]
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
    if "timed" in questions:
        lines.append(
            f"times and speed-ups are those of {questions['timed']} questions, which one process answered alone"
        )
    if 1 < rows[0]["prompts"] < FEW_QUESTIONS:
        lines.append(
            f"95 % intervals of {rows[0]['prompts']} questions are too narrow: in a simulation those of 5 hold the "
            "true value in 80 % of cases, those of 10 in 87 %"
        )
    if questions.get("reused"):
        lines.append(
            f"the responses to {questions['reused']} of {questions['finished']} questions are reused from an earlier "
            "start or another shard with the same settings, code, versions and hardware"
        )
    return lines


def describe_divergence(row: Row) -> str | None:
    """Return on how many questions tokens differ that should be identical, and whether rounding explains it."""
    lossless = row["lossless"]
    wrong, undecided, explained = (lossless["owed"][kind] for kind in ("wrong", "undecided", "explained"))
    different = wrong + undecided + explained
    if not different:
        return None
    margins = [margin for margin in lossless["first_divergence_margins"] if margin is not None]
    sentence = f"{row['drafter']} differs on {different} of {lossless['prompts']} questions"
    if lossless["owes"] != SAME_TOKENS:
        sentence += " in responses without sampled draft tokens"
    if margins:
        sentence += f" (margins {min(margins):.1e} to {max(margins):.1e})"
    if explained:
        how = "equal in float64" if row["dtype"] == "float32" else "as the base in float32 shows"
        sentence += f"; {explained} of them by rounding, {how}"
    if undecided:  # in half precision alone, and where no copy of the base in float32 is possible
        which = f"{undecided} of them are" if wrong or explained else "this is"
        sentence += f"; near ties may flip in {row['dtype']}, so {which} undecided{tables.describe_null(row)}"
    return f"NOT LOSSLESS: {sentence}" if wrong else sentence


def describe_distribution_fit(row: Row) -> str | None:
    """Return how well the tokens of sampled drafts, or of a lossy verifier, fit the base model's distribution."""
    lossless = row["lossless"]
    if lossless["tokens"] is None:
        return None
    by_draft, p_value = lossless["by_draft"], tables.distribution_p_value(row)
    if lossless["owes"] == SAME_DISTRIBUTION:
        guarantee = (
            "must follow the base model's distribution, not reproduce its tokens, because draft tokens are sampled"
        )
    else:
        guarantee = "has no guarantee; the fit to the base model's distribution"
    wrong = lossless["owes"] == SAME_DISTRIBUTION and p_value is not None and p_value < tables.MIN_P_VALUE
    statement = (
        f"{'NOT LOSSLESS: ' if wrong else ''}{tables.drafter_label(row)} {guarantee}: {tables.format_fit(lossless)}, "
        f"total variation {lossless['tv']:.4f} (the baseline's own: {lossless['null_tv']:.4f})"
    )
    return statement if by_draft is None else f"{statement}; in the order of q/p {tables.format_fit(by_draft)}"
