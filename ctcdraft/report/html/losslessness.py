"""The certificate as a page: did the text stay the same, how sure is that, and under which circumstances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctcdraft.evaluation.losslessness import HALF, ROUNDINGS, TIE
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.tracing.records import Seen
from ctcdraft.report import markdown, tables
from ctcdraft.report.html.markup import Html, bullets, joined, table, tag

Row = dict[str, Any]
OWED = {"words": "every word", "law": "the base's law", "nothing": "nothing (LOSSY)"}


def certificate(rows: Sequence[Row], environment: Mapping[str, Any], seen: Seen | None) -> Html:
    noise = noise_of(seen)
    parts = [
        tag("h3", "In sentences"),
        bullets(markdown.statements(rows, dict(environment))),
        tag("h3", "Words: token ids against autoregression's, question by question"),
        equality(rows, noise),
        tag("p", rounding(rows, noise)),
    ]
    fitted = [row for row in rows if row["lossless"]["tokens"] is not None]
    if fitted:
        parts += [tag("h3", "Law: how the words fit what the base would draw"), law(fitted), tag("p", NULL)]
    return joined([*parts, tag("h3", "Circumstances"), circumstances(rows, environment)])


def noise_of(seen: Seen | None) -> dict[str, float]:
    """By contestant, the greatest noise of a margin that was seen."""
    worst: dict[str, float] = {}
    for answer in seen.answers if seen is not None else ():
        if answer.noise is not None:
            worst[answer.contestant] = max(answer.noise, worst.get(answer.contestant, 0.0))
    return worst


def equality(rows: Sequence[Row], noise: Mapping[str, float]) -> Html:
    header = ["drafter", "decoding", "T", "seed", "owes", "questions", "equal", "explained by rounding", "undecided",
              "wrong", "margins at first divergences", "noise of a margin"]  # fmt: skip
    return table(header, [equality_row(row, noise) for row in rows])


def equality_row(row: Row, noise: Mapping[str, float]) -> list[str]:
    lossless = row["lossless"]
    owed = lossless["owed"]
    margins = [margin for margin in lossless["first_divergence_margins"] if margin is not None]
    return [
        tables.named(row),
        row["decoding"],
        f"{row['temperature']:g}",
        str(row["seed"]),
        "is the yardstick" if row["drafter"] == AUTOREGRESSIVE else OWED[lossless["owes"]],
        str(lossless["prompts"]),
        str(lossless["equal"]),
        str(owed["explained"]),
        str(owed["undecided"]),
        str(owed["wrong"]),
        ", ".join(f"{margin:.1e}" for margin in sorted(margins)) or "none",
        f"{noise[row['drafter']]:.1e}" if row["drafter"] in noise else "not measured",
    ]


def rounding(rows: Sequence[Row], noise: Mapping[str, float]) -> str:
    dtype = rows[0]["dtype"]
    if any(str(half) == f"torch.{dtype}" for half in HALF):
        bound = (
            f"In {dtype} a divergence at a margin below {ROUNDINGS} roundings of the top logit is undecided, a greater "
            "one wrong."
        )
    else:
        bound = (
            f"A divergence at a margin below {TIE:g} is decoded again in float64, where it must vanish; a greater one "
            "is wrong."
        )
    if not noise:
        return f"{bound} The noise of margins was not measured here (explorer.questions=0)."
    return (
        f"{bound} The noise of a margin is the greatest difference between the base's top-2 margin as a pass read it "
        f"and as one reading of the finished text does; here it is at most {max(noise.values()):.1e}."
    )


NULL = (
    "The words said are marked in the base's own law and counted in equal cells. Autoregression's own total variation "
    "over as many words is what chance alone makes: the null that the others are to be held against. Where guesses are "
    "drawn this is all that is owed; elsewhere the words are autoregression's own, and so is their fit."
)


def law(rows: Sequence[Row]) -> Html:
    header = [
        "drafter",
        "tokens",
        "chi-square",
        "p",
        "total variation",
        "autoregression's own",
        "by what the draft favours",
    ]
    return table(header, [law_row(row) for row in rows])


def law_row(row: Row) -> list[str]:
    lossless = row["lossless"]
    favoured = lossless["by_draft"]
    return [
        tables.named(row),
        f"{lossless['tokens']:,}",
        tables.number(lossless["chi_square"], 1),
        tables.number(lossless["p_value"], 3),
        tables.number(lossless["tv"], 4),
        tables.number(lossless["null_tv"], 4),
        "-" if favoured is None else tables.fit(favoured),
    ]


def circumstances(rows: Sequence[Row], environment: Mapping[str, Any]) -> Html:
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
    return table(["", ""], facts.items(), "facts")
