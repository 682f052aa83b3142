"""Acceptance and speed-up of answer files, by the functions that measure our own runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ctcdraft.errors import InputError
from ctcdraft.evaluation import metrics
from ctcdraft.evaluation.bootstrap import bootstrap_interval, ratio_interval
from ctcdraft.evaluation.metrics import mean_of_known, ratio
from studies.external_logs.read import LoggedRun, LoggedTurn

ACCEPTANCE_MEASURES = ("tau", "tau_mean", "tau_paper")
SPEEDUP_MEASURES = ("speedup", "speedup_paper", "speedup_turns")

DEFINITIONS = {
    "forward pass": "idxs + 1 of a turn, or Spec-Bench's decoding_steps",
    "tau": "tokens / forward passes, a ratio of totals",
    "tau_mean": "mean over questions of tokens / forward passes",
    "tau_paper": "the paper's beta: mean over questions of tokens / idxs, one forward pass per turn too few",
    "speedup": "tokens/s over the baseline's, a ratio of totals",
    "speedup_paper": "ratio of the means over questions of tokens/s: the paper's gamma",
    "speedup_turns": "ratio of the means over turns of tokens/s",
    "ci": "95 % paired bootstrap over questions",
    "equal": "questions with the baseline's text in all turns",
    "doubled": "alphabetic words that occur twice in a row, per 1,000 words: `the the`",
}

LoggedAnswer = tuple[LoggedTurn, ...]


def timed_in_both(run: LoggedRun, baseline: LoggedRun) -> list[str]:
    """Return the questions that both arms timed in every turn. Raises InputError if they share none."""
    both = [one for one in run.answers if one in baseline.answers]
    if not both:
        raise InputError(f"{run.name} and {baseline.name} have no question in common; give two runs of one benchmark")
    return [one for one in both if has_times(run.answers[one]) and has_times(baseline.answers[one])]


def has_times(answer: LoggedAnswer) -> bool:
    return all(turn.seconds > 0 for turn in answer)


def log_row(run: LoggedRun, baseline: LoggedRun | None, seed: int) -> dict[str, Any]:
    ids = list(run.answers)
    by_category: dict[str, list[str]] = {}
    for one in ids:
        if one in run.categories:
            by_category.setdefault(run.categories[one], []).append(one)
    categories = {name: log_measures(run, baseline, members, seed) for name, members in by_category.items()}
    whole = log_measures(run, baseline, ids, seed)
    return {"drafter": run.name, "models": list(run.models), **whole, "categories": categories}


def log_measures(run: LoggedRun, baseline: LoggedRun | None, ids: Sequence[str], seed: int) -> dict[str, Any]:
    """Return the measures of the questions `ids`; the speed-ups are of those that both arms hold and timed."""
    ours: Any = [run.answers[one] for one in ids]
    texts = [turn.text for answer in ours for turn in answer]
    measures: dict[str, Any] = {
        "prompts": len(ids),
        **metrics.acceptance_metrics(ours),
        **acceptance_intervals(ours, seed),
        "tokens_per_second": metrics.tokens_per_second([answer for answer in ours if has_times(answer)]),
        "doubled_per_1000": doubled_words_per_1000(texts),
    }
    if baseline is None:
        intervals = [f"{name}_ci" for name in SPEEDUP_MEASURES]
        return measures | dict.fromkeys([*SPEEDUP_MEASURES, *intervals, "equal", "compared"])
    timed = [one for one in timed_in_both(run, baseline) if one in ids]
    both = [one for one in ids if one in baseline.answers]
    equal = sum(turn_texts(run.answers[one]) == turn_texts(baseline.answers[one]) for one in both)
    sides = [run.answers[one] for one in timed], [baseline.answers[one] for one in timed]
    return {**measures, **log_speedups(*sides, seed), "equal": equal, "compared": len(timed)}


def acceptance_intervals(ours: Any, seed: int) -> dict[str, Any]:
    # With equal weights, a mean over questions is a ratio of totals, too: one bootstrap serves all three.
    tokens = [sum(turn.token_count for turn in answer) for answer in ours]
    passes = [sum(turn.pass_count for turn in answer) for answer in ours]
    # The paper divides by the 0-based index of the last forward pass.
    last = [sum(max(turn.pass_count - 1, 0) for turn in answer) for answer in ours]
    return {
        "tau_ci": ratio_interval(tokens, passes, seed),
        "tau_mean_ci": mean_interval([ratio(*pair) for pair in zip(tokens, passes, strict=True)], seed),
        "tau_paper_ci": mean_interval([ratio(*pair) for pair in zip(tokens, last, strict=True)], seed),
    }


def mean_interval(values: Sequence[float | None], seed: int) -> list[float] | None:
    known = [value for value in values if value is not None]
    return ratio_interval(known, [1.0] * len(known), seed)


def log_speedups(ours: Any, theirs: Any, seed: int) -> dict[str, Any]:
    """Return three speed-ups over the same questions in both arms, with their intervals."""
    sums: list[list[float]] = []  # tokens and seconds of ours, then of theirs
    for side in (ours, theirs):
        sums.append([sum(turn.token_count for turn in answer) for answer in side])
        sums.append([sum(turn.seconds for turn in answer) for answer in side])
    questions = [[metrics.tokens_per_second([answer]) or 0.0 for answer in side] for side in (ours, theirs)]
    per_turn: list[Sequence[float]] = []
    flat = []
    for side in (ours, theirs):  # a mean over turns is a ratio of totals too, over the number of turns
        speeds = [[metrics.tokens_per_second([[turn]]) or 0.0 for turn in answer] for answer in side]
        per_turn += [list(map(sum, speeds)), list(map(len, speeds))]
        flat.append([speed for answer in speeds for speed in answer])

    def ratio_of_ratios(a: Any, b: Any, c: Any, d: Any) -> Any:
        return (a / b) / (c / d)

    return {
        "speedup": ratio(metrics.tokens_per_second(ours), metrics.tokens_per_second(theirs)),
        "speedup_paper": ratio(mean_of_known(questions[0]), mean_of_known(questions[1])),
        "speedup_turns": ratio(mean_of_known(flat[0]), mean_of_known(flat[1])),
        "speedup_ci": bootstrap_interval(ratio_of_ratios, sums, seed),
        "speedup_paper_ci": ratio_interval(questions[0], questions[1], seed),
        "speedup_turns_ci": bootstrap_interval(ratio_of_ratios, per_turn, seed),
    }


def turn_texts(answer: LoggedAnswer) -> list[str]:
    return [turn.text for turn in answer]


def doubled_words_per_1000(texts: Sequence[str]) -> float | None:
    """Return how many of 1,000 words repeat the alphabetic word before them.

    `He took the the dog`   ->   1 of 5: 200
    """
    words = [text.split() for text in texts]
    again = sum(a == b and a.isalpha() for text_words in words for a, b in pairwise(text_words))
    return ratio(1000 * again, sum(map(len, words)))
