"""The tables that READMEs quote from single evaluations. It knows reports, and measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ctcdraft.evaluation.benchmarks import WHOLE
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.report.tables import equal, named, number, with_interval
from studies.readme_quotes import BY_HAND, Quoted, Report, Row


def every_drafter(report: Report) -> Sequence[Row]:
    return list(report.values())


def once(report: Report) -> Sequence[Report]:
    return [report]


def only_ctc(report: Report) -> Sequence[Row]:
    return [report["ctc"]]


def drawn(report: Report) -> Sequence[Row]:
    """Whose guesses were drawn, so that the base's law is all they owe."""
    return [row for row in report.values() if row["lossless"]["by_draft"]]


def base_of(report: Report) -> str:
    return str(report["ctc"]["fingerprint"]["base"])


def with_width(row: Row, measure: str) -> str:
    """A value and its interval; autoregression's own has no width and is left out."""
    return (
        number(row[measure]) if row["drafter"] == AUTOREGRESSIVE else with_interval(row[measure], row[f"{measure}_ci"])
    )


def asked(report: Report) -> str:
    """What was asked, in words."""
    row = report[AUTOREGRESSIVE]
    names = {
        "tiny": "tiny, {} prompts",
        "mt_bench": "MT-Bench, {} questions",
        "gsm8k": "GSM8K test, all {}" if row["prompts"] == WHOLE["gsm8k"] else "GSM8K test, first {}",
    }
    return names[row["benchmark"]].format(row["prompts"])


def temperature(report: Report) -> str:
    return f"{report[AUTOREGRESSIVE]['temperature']:g}"


def of_all(cell: Callable[[Row], str], between: str = ", ") -> Callable[[Report], str]:
    """What a cell says of every contestant: once where all say the same."""
    return lambda report: between.join(dict.fromkeys(cell(row) for row in report.values()))


def percent(measure: str) -> Callable[[Report], str]:
    return lambda report: f"{report[AUTOREGRESSIVE][measure]:.1%}".replace("%", " %")


def tau_of(drafter: str) -> Callable[[Report], str]:
    return lambda report: with_width(report[drafter], "tau")


def speedup_of(drafter: str) -> Callable[[Report], str]:
    return lambda report: number(report[drafter]["speedup"])


ELSEWHERE = ["demo_mt_bench", "demo_gsm8k", "demo_mt_bench_sampling", "demo_gsm8k_sampling"]
BASES = ("tiny", "stories260K", "tinystories-656K", "tinytalk-3M")
LOSSLESS = [f"lossless/{base}_{questions}_{decoding}" for base in BASES
            for decoding in ("greedy", "sampling") for questions in ("mt_bench", "gsm8k")]  # fmt: skip
LAW = ["gsm8k_rejection", "rejection_stories260K", "rejection_tinystories-656K",
       "gsm8k_k_sequential", "k_sequential_stories260K", "k_sequential_tinystories-656K"]  # fmt: skip
TABLES = (
    Quoted(
        "README.md",
        ["demo"],
        every_drafter,
        {
            "drafter": named,
            "tau": lambda row: with_width(row, "tau"),
            "speed-up": lambda row: with_width(row, "speedup"),
            "tokens/s": lambda row: number(row["tokens_per_second"], 0),
            **{part: lambda row, part=part: number(row[part]) for part in "cvo"},  # type: ignore[misc]
            "equal": equal,
        },
    ),
    Quoted(
        "README.md",
        ELSEWHERE,
        once,
        {
            "benchmark": asked,
            "T": temperature,
            "tau of ctc": tau_of("ctc"),
            "tau of prompt_lookup": tau_of("prompt_lookup"),
            "speed-up of ctc": speedup_of("ctc"),
            "of prompt_lookup": speedup_of("prompt_lookup"),
            "equal": of_all(equal),
        },
    ),
    Quoted(
        "results/README.md",
        ["demo", *ELSEWHERE],
        once,
        {
            "benchmark": asked,
            "T": temperature,
            "tau ctc": tau_of("ctc"),
            "tau prompt_lookup": tau_of("prompt_lookup"),
            "speed-up ctc": speedup_of("ctc"),
            "speed-up prompt_lookup": speedup_of("prompt_lookup"),
            "equal": of_all(equal),
            "ended": percent("ended_share"),
            "repeated 4-grams": percent("repeated_4gram_share"),
        },
    ),
    Quoted(
        "results/foreign/README.md",
        [f"foreign/{base}" for base in ("stories260K", "tinytalk-3M", "tinystories-656K")],
        only_ctc,
        {
            "base": lambda row: str(row["fingerprint"]["base"]),
            "what it is": BY_HAND,
            "training": BY_HAND,
            "tau": lambda row: with_width(row, "tau"),
            "speed-up": lambda row: with_width(row, "speedup"),
            "c": lambda row: number(row["c"]),
            "v": lambda row: number(row["v"]),
            "equal": equal,
        },
    ),
    Quoted(
        "results/lossless/README.md",
        LOSSLESS,
        once,
        {
            "base": base_of,
            "questions": asked,
            "T": temperature,
            "contestants": lambda report: str(len(report) - 1),
            "equal, each of them": of_all(equal),
            "of these by rounding": of_all(lambda row: str(row["lossless"]["rounding"])),
            "tokens of autoregression": lambda report: f"{report[AUTOREGRESSIVE]['tokens']:,}",
        },
    ),
    Quoted(
        "results/law/README.md",
        [f"law/{name}" for name in LAW],
        drawn,
        {
            "base": lambda row: str(row["fingerprint"]["base"]),
            "verifier": lambda row: str(row["decoding"]),
            "drafter": named,
            "tau": lambda row: with_width(row, "tau"),
            "chi-square": lambda row: number(row["lossless"]["chi_square"], 1),
            "p": lambda row: number(row["lossless"]["p_value"]),
            "p, by the draft": lambda row: number(row["lossless"]["by_draft"]["p_value"]),
            "tv": lambda row: number(row["lossless"]["tv"], 3),
            "null tv": lambda row: number(row["lossless"]["null_tv"], 3),
            "tokens": lambda row: f"{row['lossless']['tokens']:,}",
        },
    ),
)
