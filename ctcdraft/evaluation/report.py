"""report.json and report.md of one evaluation, and the table on the terminal. It prints what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ctcdraft.evaluation import breakdown
from ctcdraft.evaluation.fit import CELLS, FEWEST
from ctcdraft.evaluation.folder import Folder
from ctcdraft.evaluation.metrics import DEFINITIONS
from ctcdraft.files import write_text

OWED = {
    "law": "the base's law, not the same words, because its guesses are drawn",
    "nothing": "nothing, but this is how its words fit the base's law",
}
BREAKDOWN = "breakdown.svg"
SIZED = (
    "Chosen before the first question, on prompts that are none: tau of every size is replayed from one run that "
    "drafts the largest tree behind every token, the cost of a pass is measured, and tau / cost is greatest at the "
    "size chosen."
)
UNLIKELY = 1e-4  # of a fit no better by chance: one honest row in ten thousand falls below it

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]


def write(folder: Folder, rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> None:
    content = {"rows": rows, "environment": environment, "differences": differences}
    write_text(folder.path / "report.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_text(folder.path / "report.md", markdown(rows, environment, differences))
    write_text(folder.path / BREAKDOWN, breakdown.svg(rows, "Time of a pass, milliseconds"))


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def with_interval(value: float | None, bounds: Sequence[float] | None) -> str:
    return number(value) + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")


def signed(value: float | None, bounds: Sequence[float] | None) -> str:
    """+0.31 [+0.22, +0.40]"""
    if value is None:
        return "-"
    return f"{value:+.2f}" + (f" [{bounds[0]:+.2f}, {bounds[1]:+.2f}]" if bounds else "")


def in_words(pair: Row) -> str:
    speed = "" if pair["speedup"] is None else f", speed-up {signed(pair['speedup'], pair['speedup_ci'])}"
    tau = signed(pair["tau"], pair["tau_ci"])
    return f"{pair['more']} less {pair['less']}, {pair['nodes']} nodes: tau {tau}{speed}"


def named(row: Row) -> str:
    """The drafter's name, with a mark in every table where its text is not the base's, or its frames are read
    otherwise than they were taught."""
    lossy = " (LOSSY)" if row["lossless"]["owes"] == "nothing" else ""
    return f"{row['drafter']}{' (crossing)' if row.get('crossing') else ''}{lossy}"


def equal(row: Row) -> str:
    """118+2/120: equal, + those that rounding explains, of all. Where no words are owed, how well the law fits."""
    lossless = row["lossless"]
    if lossless["owes"] != "words":
        return f"law p={number(p_of_law(row), 3)}"
    rounding = f"+{lossless['rounding']}" if lossless["rounding"] else ""
    return f"{lossless['equal']}{rounding}/{lossless['prompts']}"


MAIN: Columns = {
    "drafter": named,
    "tau": lambda row: with_interval(row["tau"], row["tau_ci"]),
    "speedup": lambda row: with_interval(row["speedup"], row["speedup_ci"]),
    "tokens/s": lambda row: number(row["tokens_per_second"], 1),
    "c": lambda row: number(row["c"]),
    "v": lambda row: number(row["v"]),
    "o": lambda row: number(row["o"]),
    "predicted": lambda row: number(row["predicted_speedup"]),
    "decode": lambda row: number(row["speedup_decode"]),
    "equal": equal,
}
FULL: Columns = {
    "drafter": MAIN["drafter"],
    "benchmark": lambda row: row["benchmark"],
    "T": lambda row: f"{row['temperature']:g}",
    "nodes": lambda row: str(row["nodes"]),
    "prompts": lambda row: str(row["prompts"]),
    **{name: cell for name, cell in MAIN.items() if name not in ("drafter", "decode", "equal")},
    "speedup_decode": MAIN["decode"],
    "alpha": lambda row: " ".join(number(rate) for rate in row["alpha"]) or "-",
    "equal": equal,
    "ended": lambda row: share(row["ended_share"]),
    "repeated 4-grams": lambda row: share(row["repeated_4gram_share"]),
    "accuracy": lambda row: share(row["accuracy"]),
}
REPLAY: Columns = {
    **{name: FULL[name] for name in ("drafter", "nodes", "prompts", "tau", "alpha")},
    "equal": equal,
    "passes alike": lambda row: "{alike}/{answers}".format(**row["replay"]),
}
DIFFERENCES: Columns = {
    "more": lambda pair: pair["more"],
    "less": lambda pair: pair["less"],
    "nodes": lambda pair: str(pair["nodes"]),
    "tau": lambda pair: signed(pair["tau"], pair["tau_ci"]),
    "speedup": lambda pair: signed(pair["speedup"], pair["speedup_ci"]),
}
MORE: Columns = {
    "drafter": MAIN["drafter"],
    "tau_mean": lambda row: number(row["tau_mean"]),
    "tau_paper": lambda row: number(row["tau_paper"]),
    "speedup_paper": lambda row: number(row["speedup_paper"]),
    "acceptance_rate": lambda row: number(row["acceptance_rate"], 3),
    "tokens": lambda row: f"{row['tokens']:,}",
    "passes": lambda row: f"{row['passes']:,}",
    "parameters": lambda row: f"{row['draft_parameters']:,}",
    "roof_share": lambda row: share(row["roof_share"]),
    "peak memory": lambda row: "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e9:.2f} GB",
}


def terminal(rows: Sequence[Row], environment: dict[str, Any], differences: Sequence[Row] = ()) -> str:
    """The main table in 110 columns, and what must be said with it."""
    columns = MAIN if not environment.get("replay") else REPLAY
    cells = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
    told = [f"{said} (95 %, paired)" for said in map(in_words, differences)]
    return "\n".join([line.rstrip() for line in [*lines, *told, *statements(rows, environment)]])


def table(rows: Sequence[Row], columns: Columns) -> str:
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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


def null(row: Row) -> str:
    """How often other kernels alone make autoregression differ from itself; nothing for the row that shows it."""
    found = row["lossless"].get("null")
    if found is not None:
        return f"; autoregression by other kernels ({found['drafter']}) differs from itself on {found['different']}"
    return (
        ""
        if row.get("other_kernels")
        else "; how often autoregression does, contestants=[...,transformers_eager] tells"
    )


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


def fit(found: dict[str, Any]) -> str:
    tokens = f"{found['tokens']:,} tokens"
    if found["p_value"] is None:
        return f"{tokens} are too few to tell (it takes {FEWEST})"
    return f"chi-square {found['chi_square']:.1f} in {CELLS} cells over {tokens} (p = {found['p_value']:.2g})"


def p_of_law(row: Row) -> float | None:
    """The worse of the two fits; with two of them chance has two tries, so it counts twice."""
    both = [row["lossless"], row["lossless"]["by_draft"] or {"p_value": None}]
    found = [one["p_value"] for one in both if one["p_value"] is not None]
    return min(1.0, len(found) * min(found)) if found else None
