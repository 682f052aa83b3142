"""The losslessness section: whether the output stayed the same, how certain that is, and in which environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ctcdraft.evaluation.losslessness import HALF_PRECISION_ROUNDING, MAX_ROUNDINGS, TIE_MARGIN
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.trace import Trace
from ctcdraft.report.html.render import render
from ctcdraft.report.markdown import statements
from ctcdraft.report.tables import GUARANTEES, Columns, drafter_label, format_fit, format_number

Row = dict[str, Any]


def losslessness_section(rows: Sequence[Row], environment: Mapping[str, Any], trace: Trace | None) -> Markup:
    noise = margin_noise(trace)
    return render(
        "losslessness",
        statements=statements(rows, dict(environment)),
        rows=rows,
        equality=equality_columns(noise),
        rounding_note=rounding_note(rows, noise),
        tested=[row for row in rows if row["lossless"]["tokens"] is not None],
        distribution=DISTRIBUTION_COLUMNS,
        facts=environment_facts(rows, environment),
    )


def margin_noise(trace: Trace | None) -> dict[str, float]:
    """Return the largest observed noise of a top-2 margin, by method."""
    largest: dict[str, float] = {}
    for answer in trace.answers if trace is not None else ():
        if answer.noise is not None:
            largest[answer.contestant] = max(answer.noise, largest.get(answer.contestant, 0.0))
    return largest


def equality_columns(noise: Mapping[str, float]) -> Columns:
    def owed(kind: str) -> Any:
        return lambda row: str(row["lossless"]["owed"][kind])

    def margins(row: Row) -> str:
        known = [margin for margin in row["lossless"]["first_divergence_margins"] if margin is not None]
        return ", ".join(f"{margin:.1e}" for margin in sorted(known)) or "none"

    return {
        "drafter": drafter_label,
        "decoding": lambda row: row["decoding"],
        "T": lambda row: f"{row['temperature']:g}",
        "seed": lambda row: str(row["seed"]),
        "guarantee": lambda row: (
            "baseline" if row["drafter"] == AUTOREGRESSIVE else GUARANTEES[row["lossless"]["owes"]]
        ),
        "questions": lambda row: str(row["lossless"]["prompts"]),
        "equal": lambda row: str(row["lossless"]["equal"]),
        "explained by rounding": owed("explained"),
        "undecided": owed("undecided"),
        "wrong": owed("wrong"),
        "margins at first divergences": margins,
        "noise of a margin": lambda row: f"{noise[row['drafter']]:.1e}" if row["drafter"] in noise else "not measured",
    }


def rounding_note(rows: Sequence[Row], noise: Mapping[str, float]) -> str:
    dtype = rows[0]["dtype"]
    if any(str(half) == f"torch.{dtype}" for half in HALF_PRECISION_ROUNDING):
        bound = (
            f"In {dtype} a divergence at a margin below {MAX_ROUNDINGS} roundings of the top logit is undecided, a "
            "larger one wrong."
        )
    else:
        bound = (
            f"Where tokens diverge at a margin below {TIE_MARGIN:g}, both methods decode again in float64 and must "
            "agree; at a larger margin the divergence is wrong."
        )
    if not noise:
        return f"{bound} The noise of margins was not measured here (explorer.questions=0)."
    return (
        f"{bound} The noise of a margin is the largest difference between the base model's top-2 margin in a step and "
        f"in one forward pass over the finished text; here it is at most {max(noise.values()):.1e}."
    )


DISTRIBUTION_COLUMNS: Columns = {
    "drafter": drafter_label,
    "tokens": lambda row: f"{row['lossless']['tokens']:,}",
    "chi-square": lambda row: format_number(row["lossless"]["chi_square"], 1),
    "p": lambda row: format_number(row["lossless"]["p_value"], 3),
    "total variation": lambda row: format_number(row["lossless"]["tv"], 4),
    "baseline's own": lambda row: format_number(row["lossless"]["null_tv"], 4),
    "in the order of q/p": lambda row: (
        "-" if row["lossless"]["by_draft"] is None else format_fit(row["lossless"]["by_draft"])
    ),
}


def environment_facts(rows: Sequence[Row], environment: Mapping[str, Any]) -> dict[str, str]:
    git = environment["git"]
    commit = "not under git" if git is None else git["commit"] + (" (with changes)" if git["dirty"] else "")
    return {
        "base": environment["base"],
        "base's fingerprint": ", ".join(f"{key} {value}" for key, value in rows[0]["fingerprint"].items()),
        "hardware": environment["hardware"],
        "precision": rows[0]["dtype"],
        "forward passes": environment.get("reads") or "not recorded",
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        "commit": commit,
        "seeds": ", ".join(map(str, environment["seeds"])),
        "questions": f"{environment['questions']['finished']} of {environment['questions']['asked']} finished",
        "date": environment["date"],
        "command": environment["command"],
    }
