"""The certificate as a page: did the text stay the same, how sure is that, and under which circumstances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.evaluation.losslessness import HALF_PRECISION_ROUNDING, MAX_ROUNDINGS, TIE_MARGIN
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.tracing.records import Trace
from ctcdraft.report import markdown, tables
from ctcdraft.report.html.markup import Html, bullets, html_table, join_html, tag

Row = dict[str, Any]
GUARANTEE_LABELS = {"words": "every word", "law": "the base's law", "nothing": "nothing (LOSSY)"}


def losslessness_section(rows: Sequence[Row], environment: Mapping[str, Any], seen: Trace | None) -> Html:
    noise = margin_noise(seen)
    parts = [
        tag("h3", "In sentences"),
        bullets(markdown.statements(rows, dict(environment))),
        tag("h3", "Words: token ids against autoregression's, question by question"),
        equality_table(rows, noise),
        tag("p", rounding_note(rows, noise)),
    ]
    fitted = [row for row in rows if row["lossless"]["tokens"] is not None]
    if fitted:
        parts += [
            tag("h3", "Law: how the words fit what the base would draw"),
            distribution_table(fitted),
            tag("p", NULL_NOTE),
        ]
    return join_html([*parts, tag("h3", "Circumstances"), environment_table(rows, environment)])


def margin_noise(seen: Trace | None) -> dict[str, float]:
    """By contestant, the greatest noise of a margin that was seen."""
    worst: dict[str, float] = {}
    for answer in seen.answers if seen is not None else ():
        if answer.noise is not None:
            worst[answer.contestant] = max(answer.noise, worst.get(answer.contestant, 0.0))
    return worst


def equality_table(rows: Sequence[Row], noise: Mapping[str, float]) -> Html:
    header = ["drafter", "decoding", "T", "seed", "owes", "questions", "equal", "explained by rounding", "undecided",
              "wrong", "margins at first divergences", "noise of a margin"]  # fmt: skip
    return html_table(header, [equality_row(row, noise) for row in rows])


def equality_row(row: Row, noise: Mapping[str, float]) -> list[str]:
    lossless = row["lossless"]
    owed = lossless["owed"]
    margins = [margin for margin in lossless["first_divergence_margins"] if margin is not None]
    return [
        tables.drafter_label(row),
        row["decoding"],
        f"{row['temperature']:g}",
        str(row["seed"]),
        "is the yardstick" if row["drafter"] == AUTOREGRESSIVE else GUARANTEE_LABELS[lossless["owes"]],
        str(lossless["prompts"]),
        str(lossless["equal"]),
        str(owed["explained"]),
        str(owed["undecided"]),
        str(owed["wrong"]),
        ", ".join(f"{margin:.1e}" for margin in sorted(margins)) or "none",
        f"{noise[row['drafter']]:.1e}" if row["drafter"] in noise else "not measured",
    ]


def rounding_note(rows: Sequence[Row], noise: Mapping[str, float]) -> str:
    dtype = rows[0]["dtype"]
    if any(str(half) == f"torch.{dtype}" for half in HALF_PRECISION_ROUNDING):
        bound = (
            f"In {dtype} a divergence at a margin below {MAX_ROUNDINGS} roundings of the top logit is undecided, a "
            "greater "
            "one wrong."
        )
    else:
        bound = (
            f"A divergence at a margin below {TIE_MARGIN:g} is decoded again in float64, where it must vanish; a "
            "greater one "
            "is wrong."
        )
    if not noise:
        return f"{bound} The noise of margins was not measured here (explorer.questions=0)."
    return (
        f"{bound} The noise of a margin is the greatest difference between the base's top-2 margin as a pass read it "
        f"and as one reading of the finished text does; here it is at most {max(noise.values()):.1e}."
    )


NULL_NOTE = (
    "The words said are marked in the base's own law and counted in equal cells. Autoregression's own total variation "
    "over as many words is what chance alone makes: the null that the others are to be held against. Where guesses are "
    "drawn this is all that is owed; elsewhere the words are autoregression's own, and so is their fit."
)


def distribution_table(rows: Sequence[Row]) -> Html:
    header = [
        "drafter",
        "tokens",
        "chi-square",
        "p",
        "total variation",
        "autoregression's own",
        "by what the draft favours",
    ]
    return html_table(header, [distribution_row(row) for row in rows])


def distribution_row(row: Row) -> list[str]:
    lossless = row["lossless"]
    favoured = lossless["by_draft"]
    return [
        tables.drafter_label(row),
        f"{lossless['tokens']:,}",
        tables.format_number(lossless["chi_square"], 1),
        tables.format_number(lossless["p_value"], 3),
        tables.format_number(lossless["tv"], 4),
        tables.format_number(lossless["null_tv"], 4),
        "-" if favoured is None else tables.format_fit(favoured),
    ]


def environment_table(rows: Sequence[Row], environment: Mapping[str, Any]) -> Html:
    git = environment["git"]
    commit = "not under git" if git is None else git["commit"] + (" (with changes)" if git["dirty"] else "")
    facts = {
        "base": environment["base"],
        "base's fingerprint": ", ".join(f"{key} {value}" for key, value in rows[0]["fingerprint"].items()),
        "hardware": environment["hardware"],
        "precision": rows[0]["dtype"],
        "reads": environment.get("reads") or "not recorded",
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        "commit": commit,
        "seeds": ", ".join(map(str, environment["seeds"])),
        "questions": f"{environment['questions']['finished']} of {environment['questions']['asked']} finished",
        "date": environment["date"],
        "command": environment["command"],
    }
    return html_table(["", ""], facts.items(), "facts")
