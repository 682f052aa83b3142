"""From records to a row of the table. Pure: the same records always give the same row; nothing is measured here.

How long the accepted drafts are, from the counts of passes. Pure functions; they know no seconds and no text.

A question is the list of its answers, one a turn. None stands for a ratio without a denominator.

What became of the text: right or wrong, ended or cut off, stuttering or not. Pure functions of answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from ctcdraft.decoding.settings import DecodeStep, conditional_acceptance_rates
from ctcdraft.evaluation.bootstrap import bootstrap_interval, ratio_interval
from ctcdraft.evaluation.environment import bandwidth_utilization
from ctcdraft.evaluation.losslessness import losslessness_metrics
from ctcdraft.evaluation.profiling import PASS_PARTS, Profile, relative_costs
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Answer, Questions, Record

DEFINITIONS = {
    "pass": "one reading of the base after the prefill; autoregression does one per token",
    "tokens": "tokens committed by passes; the first token of an answer is the prefill's and does not count, "
    "nor do tokens after the first EOS or beyond max_new_tokens",
    "tau": "acceptance length: tokens / passes, a ratio of totals; the base's own token (bonus) counts, so "
    "autoregression has 1 and accepted drafts are tau - 1",
    "tau_mean": "mean over questions of tokens / passes",
    "tau_paper": "the paper's beta: divides by the last 0-based loop index of each turn; for cross-checks only",
    "alpha": "from depth 1: passes that accepted depth k / passes that accepted depth k-1 and had a node below it",
    "acceptance_rate": "accepted depth / drafted depth",
    "speedup": "tokens/s over autoregression: same prompts, same process, interleaved, prefill and first token "
    "included; a ratio of totals",
    "speedup_decode": "the same without prefill and first token",
    "speedup_paper": "the paper's gamma: mean per-question tokens/s over autoregression's",
    "ci": "95 % paired bootstrap over questions",
    "c, v, o": "drafting (with tree building), reading the tree, and all else (verify, keep, other) per pass, in "
    "whole autoregressive passes of the same separate instrumented session; autoregression's sum is 1",
    "time": "seconds per pass in the instrumented session; prefill: seconds per answer",
    "predicted": "tau / (c + v + o), to be compared with speedup_decode",
    "roof_share": "(bytes of weights and of KV really used per pass) / measured copy bandwidth / measured seconds of "
    "the read; above 1 where the weights fit into the processor's cache",
    "equal": "questions all of whose turns are autoregression's, token for token; `rounding` counts those that "
    "differ at a margin below 1e-4 (when sampling: margin times min(T, 1)) and are equal in float64",
    "law": "where guesses are drawn, or the verifier is lossy, no words are owed: the words said are marked in the "
    "base's law and counted in equal cells, laid out by the base's probabilities and by what the draft favours; p: "
    "the chance of fits no better; LOSSY: not even the law is owed",
    "ended": "answers that ended by themselves",
    "repeated 4-grams": "of all answers' 4-grams of token ids, the share that stood earlier in the same answer: "
    "looping text is easy to guess",
    "accuracy": "last number of the last answer equals the reference",
    "peak_memory_bytes": "on CUDA: the most that was allocated while this contestant answered; the base and all "
    "contestants are in memory",
}


def acceptance_metrics(questions: Questions) -> dict[str, Any]:
    return {
        "tokens": sum(map(committed_tokens, questions)),
        "passes": sum(map(count_passes, questions)),
        "tau": tau(questions),
        "tau_mean": tau_mean(questions),
        "tau_paper": tau_paper(questions),
    }


def tokens_per_second(questions: Questions) -> float | None:
    """Tokens a second, prefill and first token included."""
    answers = [answer for question in questions for answer in question]
    return ratio(sum(len(answer.tokens) for answer in answers), sum(answer.seconds for answer in answers))


def decode_tokens_per_second(questions: Questions) -> float | None:
    answers = [answer for question in questions for answer in question]
    return ratio(sum(answer.committed for answer in answers), sum(answer.seconds_decode for answer in answers))


def mean_tokens_per_second(questions: Questions) -> float | None:
    return mean_of_known([tokens_per_second([question]) for question in questions])


def speedups(ours: Questions, theirs: Questions) -> dict[str, Any]:
    """Ours over autoregression's."""
    return {
        "speedup": optional_ratio(tokens_per_second(ours), tokens_per_second(theirs)),
        "speedup_decode": optional_ratio(decode_tokens_per_second(ours), decode_tokens_per_second(theirs)),
        "speedup_paper": optional_ratio(mean_tokens_per_second(ours), mean_tokens_per_second(theirs)),
        "tokens_per_second": tokens_per_second(ours),
    }


def optional_ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ratio(ours, theirs)


def metric_intervals(ours: Questions, theirs: Questions, seed: int) -> dict[str, Any]:
    """Of tau and of the speed-up, over the same draws of questions."""
    count = [[sum(len(answer.tokens) for answer in question) for question in side] for side in (ours, theirs)]
    spent = [[sum(answer.seconds for answer in question) for question in side] for side in (ours, theirs)]
    columns: list[Sequence[float]] = [count[0], spent[0], count[1], spent[1]]
    return {
        "tau_ci": ratio_interval([*map(committed_tokens, ours)], [*map(count_passes, ours)], seed),
        "speedup_ci": bootstrap_interval(lambda a, b, c, d: (a / b) / (c / d), columns, seed),
    }


def category_metrics(name: str, records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    parts = {}
    for category in dict.fromkeys(record.category for record in records):
        here = [record for record in records if record.category == category]
        ours, theirs = paired_answers(name, here)
        parts[category] = {
            "prompts": len(here),
            **acceptance_metrics(ours),
            **speedups(ours, theirs),
            "equal": losslessness_metrics(name, here)["equal"],
            "accuracy": accuracy(ours, [record.reference for record in here]),
        }
    return parts


def paired_answers(name: str, records: Sequence[Record]) -> tuple[list[list[Answer]], list[list[Answer]]]:
    return [record.answers(name) for record in records], [record.answers(AUTOREGRESSIVE) for record in records]


def cost_metrics(name: str, timing: Profile | None, tau: float | None) -> dict[str, Any]:
    """What a pass costs and hence what tau should buy; all null where no pass was instrumented."""
    shares = relative_costs(timing.spent, name) if timing else None
    if timing is None or shares is None:
        unknown = dict.fromkeys((*PASS_PARTS, "prefill"))
        return {"time": unknown, **dict.fromkeys(("c", "v", "o", "predicted_speedup", "roof_share"))}
    spent = timing.spent[name]
    per_pass = {part: spent.seconds[part] / spent.passes for part in PASS_PARTS}
    return {
        "time": {**per_pass, "prefill": spent.seconds["prefill"] / spent.answers},
        **shares,
        "predicted_speedup": None if tau is None else ratio(tau, sum(shares.values())),
        "roof_share": bandwidth_utilization(spent, timing.weight_bytes, timing.bandwidth),
    }


def report_row(
    name: str, records: Sequence[Record], timing: Profile | None, labels: dict[str, Any], seed: int
) -> dict[str, Any]:
    """All fields of the contract for one contestant. labels: what is known without measuring (base, decoding, ...)."""
    ours, theirs = paired_answers(name, records)
    counted = acceptance_metrics(ours)
    peaks = [answer.peak_memory_bytes for question in ours for answer in question]
    return {
        "drafter": name,
        **labels,
        "seed": seed,
        "prompts": len(records),
        **counted,
        "alpha": alpha(ours),
        "acceptance_rate": acceptance_rate(ours),
        **speedups(ours, theirs),
        **metric_intervals(ours, theirs, seed),
        **cost_metrics(name, timing, counted["tau"]),
        "peak_memory_bytes": max((peak for peak in peaks if peak is not None), default=None),
        "lossless": losslessness_metrics(name, records),
        "accuracy": accuracy(ours, [record.reference for record in records]),
        "ended_share": ended_share(ours),
        "repeated_4gram_share": repeated_4gram_share(ours),
        "categories": category_metrics(name, records),
    }


def ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Of the values there are."""
    known = [value for value in values if value is not None]
    return ratio(sum(known), len(known))


def committed_tokens(question: Sequence[Answer]) -> int:
    return sum(answer.committed for answer in question)


def count_passes(question: Sequence[Answer]) -> int:
    return sum(len(answer.passes) for answer in question)


def tau(questions: Questions) -> float | None:
    """Tokens committed by passes / passes, a ratio of totals.

    4 tokens in 2 passes, 6 tokens in 2   ->   10 / 4 = 2.5
    """
    return ratio(sum(map(committed_tokens, questions)), sum(map(count_passes, questions)))


def tau_mean(questions: Questions) -> float | None:
    """Mean over questions of tokens / passes."""
    return mean_of_known([ratio(committed_tokens(question), count_passes(question)) for question in questions])


def tau_paper(questions: Questions) -> float | None:
    """The paper's beta: each turn counts its last loop index, which starts at 0, so one pass is missing.

    4 tokens in 2 passes, 6 tokens in 2   ->   mean of 4 / 1 and 6 / 1 = 5
    """
    last = [sum(max(len(answer.passes) - 1, 0) for answer in question) for question in questions]
    return mean_of_known(
        [ratio(committed_tokens(question), index) for question, index in zip(questions, last, strict=True)]
    )


def all_decode_steps(questions: Questions) -> list[DecodeStep]:
    return [step for question in questions for answer in question for step in answer.passes]


def alpha(questions: Questions) -> list[float | None]:
    """From depth 1; see `alpha_of`."""
    return conditional_acceptance_rates(all_decode_steps(questions))


def acceptance_rate(questions: Questions) -> float | None:
    """Accepted guesses / depth of what was drafted."""
    steps = all_decode_steps(questions)
    return ratio(sum(step.accepted for step in steps), sum(step.drafted for step in steps))


# A minus belongs to the number only where nothing stands to its left that could be subtracted from: not in 5-3.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """`so 5-3 = $1,002.50.`   ->   1002.50"""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def accuracy(questions: Questions, references: Sequence[str | None]) -> float | None:
    """Share of the questions with a number as reference whose last answer ends on that number."""
    correct = [
        float(last_number(question[-1].text) == wanted)
        for question, reference in zip(questions, references, strict=True)
        if reference is not None and (wanted := last_number(reference)) is not None
    ]
    return mean_of_known(correct)


def ended_share(questions: Questions) -> float | None:
    """Answers that ended by themselves, not by running out of room."""
    return mean_of_known([float(answer.ended) for question in questions for answer in question])


def repeated_4gram_share(questions: Questions) -> float | None:
    """4-grams of token ids that stood in the same answer before: a text that loops is easy to guess.

    1 2 1 2 1 2   ->   1212 2121 1212: one of three
    """
    total = repeated = 0
    for question in questions:
        for answer in question:
            grams = [answer.tokens[start : start + 4] for start in range(len(answer.tokens) - 3)]
            total += len(grams)
            repeated += len(grams) - len(set(grams))
    return ratio(repeated, total)
