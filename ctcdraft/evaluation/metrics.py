"""Metrics of a report row, as pure functions of records: acceptance length, speed-up, cost and quality of the text.

`Questions` are the answers of one contestant, by question and turn. None stands for a ratio whose denominator is 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from ctcdraft.decoding.settings import DecodeStep, conditional_acceptance_rates
from ctcdraft.evaluation.bootstrap import QuestionSums, bootstrap_interval, ratio_interval
from ctcdraft.evaluation.environment import bandwidth_utilization
from ctcdraft.evaluation.losslessness import losslessness_metrics
from ctcdraft.evaluation.profiling import PASS_PARTS, Profile, relative_costs
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Answer, Questions, Record

# A minus is a sign only if no number or bracket precedes it: 5-3 holds 5 and 3.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?")
DEFINITIONS = {  # printed below the tables of a report
    "pass": "one forward pass of the base model after the prefill; autoregression takes one per token",
    "tokens": "tokens committed by forward passes; the first token of an answer comes from the prefill and does not "
    "count, nor do tokens after the first EOS or beyond max_new_tokens",
    "tau": "mean acceptance length: tokens / passes, a ratio of totals; the bonus token counts: autoregression has 1",
    "tau_mean": "mean over questions of tokens / passes",
    "tau_paper": "the paper's beta: divides by the last 0-based loop index of each turn; for cross-checks only",
    "alpha": "conditional acceptance rate at depth k, from 1: passes that accepted depth k / passes that accepted "
    "depth k-1 and had a node below it",
    "acceptance_rate": "accepted depth / drafted depth",
    "nodes": "limit of a tree's nodes, the root counted; with decoding.nodes=adaptive the mean number read per pass",
    "speedup": "tokens/s over autoregression's, prefill included; same prompts, interleaved; a ratio of totals",
    "speedup_decode": "speedup without prefill and first token",
    "speedup_paper": "the paper's gamma: mean per-question tokens/s over autoregression's",
    "ci": "95 % paired bootstrap over questions",
    "c, v, o": "time per pass, an answer's first one left out, of drafting (with tree building), of reading the tree, "
    "and of all else (verify, keep, other), in units of one autoregressive step of the same profiling run",
    "c_least": "lower bound of c from bytes: weights of a draft, each read once, / weights of a step of the base",
    "time": "seconds per pass in the profiling run, the first left out; prefill: seconds per answer",
    "predicted": "tau / (c + v + o), to be compared with speedup_decode",
    "roof_share": "memory-bandwidth utilization: bytes of weights and KV read per pass / measured copy bandwidth / "
    "measured seconds of the forward pass; above 1 if the weights fit into the processor's cache",
    "equal": "questions whose turns all equal autoregression's, token for token; `rounding` counts those that "
    "differ at a margin below 1e-4 (when sampling: margin times min(T, 1)) and are equal in float64, or in half "
    "precision those whose logits the base in float32 explains",
    "distribution test": "if draft tokens are sampled, or the verifier is lossy, tokens need not equal those of "
    "autoregression: a chi-square test in two token orders (base probability; draft over base) checks that they follow "
    "the base model's distribution; p: its p-value; LOSSY: not even that is promised",
    "ended": "share of answers that end with an EOS token",
    "repeated 4-grams": "share of 4-grams of tokens seen earlier in the same answer; such text is easy to draft",
    "accuracy": "share of questions whose last answer ends with the reference's number",
    "peak_memory_bytes": "on CUDA: most memory allocated while this contestant decoded, with all contestants loaded",
}


def report_row(
    name: str, records: Sequence[Record], timing: Profile | None, labels: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Return one row of report.json. labels: the fields that need no measurement (benchmark, decoding, ...)."""
    ours, theirs = paired_answers(name, records)
    answers = [answer for question in ours for answer in question]
    counted = acceptance_metrics(ours)
    peaks = [answer.peak_memory_bytes for answer in answers if answer.peak_memory_bytes is not None]
    return {
        "drafter": name,
        **labels,
        "seed": seed,
        "prompts": len(records),
        **counted,
        "mean_nodes": mean_nodes(ours),
        "alpha": alpha(ours),
        "acceptance_rate": acceptance_rate(ours),
        **speedups(ours, theirs),
        **metric_intervals(ours, theirs, seed),
        **cost_metrics(name, timing, counted["tau"]),
        "peak_memory_bytes": max(peaks, default=None),
        "lossless": losslessness_metrics(name, records),
        "accuracy": accuracy(ours, [record.reference for record in records]),
        "ended_share": mean_of_known([float(answer.ended) for answer in answers]),
        "repeated_4gram_share": repeated_4gram_share(ours),
        "categories": category_metrics(name, records),
    }


def category_metrics(name: str, records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each category of the benchmark."""
    by_category = {}
    for category in dict.fromkeys(record.category for record in records):
        members = [record for record in records if record.category == category]
        ours, theirs = paired_answers(name, members)
        by_category[category] = {
            "prompts": len(members),
            **acceptance_metrics(ours),
            **speedups(ours, theirs),
            "equal": losslessness_metrics(name, members)["equal"],
            "accuracy": accuracy(ours, [record.reference for record in members]),
        }
    return by_category


def paired_answers(name: str, records: Sequence[Record]) -> tuple[list[list[Answer]], list[list[Answer]]]:
    """Return the answers of a contestant and of autoregression to the same questions."""
    return [record.answers(name) for record in records], [record.answers(AUTOREGRESSIVE) for record in records]


def acceptance_metrics(questions: Questions) -> dict[str, Any]:
    return {
        "tokens": sum(map(committed_tokens, questions)),
        "passes": sum(map(count_passes, questions)),
        "tau": tau(questions),
        "tau_mean": tau_mean(questions),
        "tau_paper": tau_paper(questions),
    }


def speedups(ours: Questions, theirs: Questions) -> dict[str, Any]:
    """Return speed relative to autoregression, `theirs`, and our tokens per second."""
    mean_ours, mean_theirs = (mean_of_known([tokens_per_second([one]) for one in side]) for side in (ours, theirs))
    return {
        "speedup": ratio(tokens_per_second(ours), tokens_per_second(theirs)),
        "speedup_decode": ratio(decode_tokens_per_second(ours), decode_tokens_per_second(theirs)),
        "speedup_paper": ratio(mean_ours, mean_theirs),
        "tokens_per_second": tokens_per_second(ours),
    }


def tokens_per_second(questions: Questions) -> float | None:
    """Return tokens per second, prefill and first token included, of the answers that were timed."""
    answers = [answer for question in questions for answer in question if answer.seconds]
    return ratio(sum(len(answer.tokens) for answer in answers), sum(answer.seconds for answer in answers))


def decode_tokens_per_second(questions: Questions) -> float | None:
    answers = [answer for question in questions for answer in question if answer.seconds]
    return ratio(sum(answer.committed for answer in answers), sum(answer.seconds_decode for answer in answers))


def metric_intervals(ours: Questions, theirs: Questions, seed: int) -> dict[str, Any]:
    """Return the intervals of tau and speed-up, over the same resampled questions."""
    sums, base = QuestionSums.from_questions(ours), QuestionSums.from_questions(theirs)
    speed = [sums.said, sums.seconds, base.said, base.seconds]  # empty if nothing was timed
    return {
        "tau_ci": ratio_interval(sums.committed, sums.passes, seed),
        "speedup_ci": bootstrap_interval(lambda a, b, c, d: (a / b) / (c / d), speed, seed) if all(speed) else None,
    }


def cost_metrics(name: str, timing: Profile | None, tau: float | None) -> dict[str, Any]:
    """Return the profiled costs per step and the speed-up they predict; all None if nothing was profiled."""
    costs = relative_costs(timing.spent, name) if timing else None
    if timing is None or costs is None:
        unknown = dict.fromkeys((*PASS_PARTS, "prefill"))
        return {"time": unknown, **dict.fromkeys(("c", "v", "o", "predicted_speedup", "roof_share"))}
    spent = timing.spent[name]
    per_pass = {part: spent.seconds[part] / spent.passes for part in PASS_PARTS}
    return {
        "time": {**per_pass, "prefill": spent.seconds["prefill"] / spent.answers},
        **costs,
        "predicted_speedup": ratio(tau, sum(costs.values())),
        "roof_share": bandwidth_utilization(spent, timing.weight_bytes, timing.bandwidth),
    }


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    known = [value for value in values if value is not None]
    return ratio(sum(known), len(known))


def committed_tokens(question: Sequence[Answer]) -> int:
    return sum(answer.committed for answer in question)


def count_passes(question: Sequence[Answer]) -> int:
    return sum(len(answer.passes) for answer in question)


def tau(questions: Questions) -> float | None:
    """Return committed tokens / forward passes, a ratio of totals.

    4 tokens in 2 forward passes, 6 tokens in 2   ->   10 / 4 = 2.5
    """
    return ratio(sum(map(committed_tokens, questions)), sum(map(count_passes, questions)))


def tau_mean(questions: Questions) -> float | None:
    """Return the mean over questions of tokens / forward passes."""
    return mean_of_known([ratio(committed_tokens(question), count_passes(question)) for question in questions])


def tau_paper(questions: Questions) -> float | None:
    """Return the paper's beta, which divides by the last 0-based loop index of each turn: one forward pass less.

    4 tokens in 2 forward passes, 6 tokens in 2   ->   mean of 4 / 1 and 6 / 1 = 5
    """
    last_indices = [sum(max(len(answer.passes) - 1, 0) for answer in question) for question in questions]
    return mean_of_known(list(map(ratio, map(committed_tokens, questions), last_indices)))


def all_decode_steps(questions: Questions) -> list[DecodeStep]:
    return [step for question in questions for answer in question for step in answer.passes]


def alpha(questions: Questions) -> list[float | None]:
    return conditional_acceptance_rates(all_decode_steps(questions))


def mean_nodes(questions: Questions) -> float | None:
    """Return nodes read / forward passes, the roots counted."""
    steps = all_decode_steps(questions)
    return ratio(sum(step.nodes for step in steps), len(steps))


def acceptance_rate(questions: Questions) -> float | None:
    """Return accepted depth / drafted depth."""
    steps = all_decode_steps(questions)
    return ratio(sum(step.accepted for step in steps), sum(step.drafted for step in steps))


def last_number(text: str) -> Decimal | None:
    """`so 5-3 = $1,002.50.`   ->   1002.50"""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def accuracy(questions: Questions, references: Sequence[str | None]) -> float | None:
    """Return the share of correct last numbers, over the questions whose reference holds a number."""
    wanted = [last_number(reference) if reference is not None else None for reference in references]
    found = [last_number(question[-1].text) for question in questions]
    pairs = zip(found, wanted, strict=True)
    return mean_of_known([float(number == right) for number, right in pairs if right is not None])


def repeated_4gram_share(questions: Questions) -> float | None:
    """Return the share of 4-grams of token ids that occurred earlier in the same answer.

    1 2 1 2 1 2   ->   1212 2121 1212: one of three
    """
    total = repeated = 0
    for answer in (answer for question in questions for answer in question):
        grams = [answer.tokens[start : start + 4] for start in range(len(answer.tokens) - 3)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return ratio(repeated, total)
