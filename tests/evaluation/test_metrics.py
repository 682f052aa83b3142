"""Metrics of hand-made records: every expected number was computed by hand."""

import numpy as np
import pytest
import torch
from simple_drafters import oracle_drafter
from small_evaluations import SETTINGS
from tiny_models import random_base

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodeStep, conditional_acceptance_rates
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.evaluation import metrics
from ctcdraft.evaluation.bootstrap import bootstrap_interval, ratio_interval
from ctcdraft.evaluation.metrics import category_metrics, report_row
from ctcdraft.evaluation.records import Answer, Divergence, Record, Turn, from_json, to_json


def answer(passes=(), seconds=(0.0, 1.0), tokens=None, text="", ended=True):
    """passes: (committed, accepted, open, drafted)."""
    steps = tuple(DecodeStep(*counts, drafted + 1, drafted) for *counts, drafted in passes)
    tokens = tuple(range(1 + sum(step.committed for step in steps))) if tokens is None else tokens
    return Answer(tokens, text, steps, ended, *seconds, None)


def plain(tokens, seconds):
    """Autoregression: one token per decoding step, after the prefill's."""
    return answer([(1, 0, False, 0)] * (tokens - 1), seconds)


OURS = [
    [answer([(3, 2, True, 3), (1, 0, True, 2)], (1.0, 1.0))],
    [answer([(2, 1, False, 1), (1, 0, False, 0)], (0.5, 0.5)), answer([(3, 2, True, 2)], (0.5, 0.5), ended=False)],
]
THEIRS = [[plain(5, (1.0, 4.0))], [plain(4, (0.5, 0.5)), plain(4, (0.5, 0.5))]]


def records(ours=OURS, theirs=THEIRS, divergences=((), ())):
    return [
        Record(
            index,
            f"q{index}",
            ("maths", "talk")[index],
            ("4", None)[index],
            tuple(
                Turn(10, 0, {"autoregressive": a, "ctc": b}) for a, b in zip(theirs[index], ours[index], strict=True)
            ),
            {"ctc": tuple(divergences[index])},
        )
        for index in range(2)
    ]


def test_acceptance():
    assert metrics.tau(OURS) == 10 / 5
    assert metrics.tau_mean(OURS) == (4 / 2 + 6 / 3) / 2
    # Last loop indices: 1, then 1 + 0.
    assert metrics.tau_paper(OURS) == (4 / 1 + 6 / 1) / 2
    assert metrics.acceptance_rate(OURS) == (2 + 0 + 1 + 0 + 2) / (3 + 2 + 1 + 0 + 2)


def test_alpha_counts_only_steps_with_a_node_at_that_depth():
    # Depth 1: accepted in 3 steps; rejected in one with a node there, and in one without, which does not count.
    # Depth 2: accepted in 2; the step that accepted 1 had no node below. Depth 3: two reached 2, both open.
    assert metrics.alpha(OURS) == [3 / 4, 2 / 2, 0 / 2]
    assert metrics.alpha([[answer([(1, 0, False, 2)])]]) == [None, None]
    assert metrics.alpha(THEIRS) == []


def test_nothing_is_rejected_after_an_accepted_stop_token():
    """The draft equals the answer up to the stop token and continues with another token, which is never verified."""
    base, prompt = random_base(), torch.tensor([0, 7, 9, 9, 30])
    tokens = generate(base, Autoregressive(base), prompt, SETTINGS, (), 0).tokens
    end = next(index for index in range(3, len(tokens) - 2) if tokens[index] not in tokens[:index])
    wrong = [*tokens[: end + 1], (tokens[end + 1] + 1) % base.vocabulary, *tokens[end + 2 :]]
    drafter = oracle_drafter(torch.cat([prompt, torch.tensor(wrong)]), 7)
    result = generate(base, drafter, prompt, SETTINGS, {tokens[end]}, 0)
    assert result.tokens == tokens[: end + 1]
    assert result.passes[-1].drafted > result.passes[-1].accepted == result.passes[-1].committed
    assert conditional_acceptance_rates(result.passes)[:end] == [1.0] * min(end, 7)


def test_nothing_to_divide_by_is_none():
    silent = [[answer()]]
    assert metrics.tau(silent) is metrics.tau_mean(silent) is metrics.tau_paper(silent) is None
    assert metrics.tau_paper([[answer([(2, 1, True, 1)])]]) is None  # one pass: its last index is 0
    assert metrics.acceptance_rate(THEIRS) is None
    assert metrics.repeated_4gram_share(silent) is None


def test_speeds():
    result = report_row("ctc", records(), None, {}, seed=0)
    # Ours: 5 tokens in 2 s, 7 + 1 in 2 s; theirs: 5 in 5 s, 8 in 2 s.
    assert result["tokens_per_second"] == 13 / 4
    assert result["speedup"] == pytest.approx((13 / 4) / (13 / 7))
    assert result["speedup_paper"] == pytest.approx(((5 / 2 + 8 / 2) / 2) / ((5 / 5 + 8 / 2) / 2))
    assert result["speedup_decode"] == pytest.approx((10 / 2) / (10 / 5))
    assert report_row("autoregressive", records(), None, {}, seed=0)["speedup"] == 1


def test_a_row_has_null_for_what_was_not_measured():
    result = report_row("ctc", records(), None, {}, seed=0)
    assert (result["prompts"], result["tokens"], result["passes"]) == (2, 10, 5)
    assert result["ended_share"] == 2 / 3
    assert set(result["time"].values()) == {None}
    assert result["c"] is result["predicted_speedup"] is result["roof_share"] is result["peak_memory_bytes"] is None


def test_categories_partition_the_questions():
    parts = category_metrics("ctc", records())
    assert [(part["prompts"], part["tokens"], part["tau"]) for part in parts.values()] == [(1, 4, 2), (1, 6, 2)]
    assert parts["maths"]["speedup"] == 2.5


def test_a_question_is_equal_when_all_its_turns_are():
    flip, bug = Divergence(0, 3, 1e-6, True), Divergence(1, 2, 0.5, False)
    lossless = report_row("ctc", records(divergences=((flip,), (flip, bug))), None, {}, 0)["lossless"]
    assert (lossless["prompts"], lossless["equal"], lossless["rounding"]) == (2, 0, 1)
    assert lossless["first_divergence_margins"] == [1e-6, 1e-6, 0.5]
    half = report_row("ctc", records(divergences=((), (Divergence(0, 3, 0.01, None),))), None, {}, 0)["lossless"]
    assert (half["equal"], half["rounding"]) == (1, None)


def test_repeated_4grams():
    assert metrics.repeated_4gram_share([[answer(tokens=(1, 2, 1, 2, 1, 2))]]) == 1 / 3
    # Counted within an answer, never across: the second answer repeats the first, not itself.
    twice = [answer(tokens=(1, 2, 3, 4)), answer(tokens=(1, 2, 3, 4))]
    assert metrics.repeated_4gram_share([twice]) == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [("is $1,002.50.", 1002.5), ("5-3 = 2", 2), ("so 5-3", 3), ("it is -3", -3), ("= 18,", 18), ("none", None)],
)
def test_the_last_number(text, number):
    assert metrics.last_number(text) == number


def test_accuracy_looks_at_the_last_turn_of_questions_with_a_number():
    right, wrong = answer(text="2 + 2 = 4.0"), answer(text="2 + 2 = 5")
    assert metrics.accuracy([[wrong, right], [wrong], [right]], ["4", "4", None]) == 1 / 2
    assert metrics.accuracy([[right]], ["a sample essay"]) is None


@pytest.mark.parametrize(("questions", "least", "most"), [(5, 0.7, 0.87), (10, 0.8, 0.92), (40, 0.88, 0.99)])
def test_the_coverage_of_the_interval(questions, least, most):
    """Reports say that those of few questions are too narrow."""
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        passes = rng.integers(5, 50, size=questions)
        tokens = passes * rng.gamma(9.0, 2.5 / 9.0, size=questions)
        low, high = ratio_interval(tokens, passes, seed=trial)
        hits += low <= 2.5 <= high
    assert least <= hits / 200 <= most


def test_intervals_are_paired():
    # One side is twice the other on every question, however they vary: the ratio is certain.
    one = [1.0, 5.0, 2.0, 9.0]
    low, high = bootstrap_interval(lambda a, b: a / b, [[2 * x for x in one], one], seed=0)
    assert low == high == 2
    assert ratio_interval([1.0], [2.0], seed=0) is None


def test_the_interval_of_the_speedup_is_one_of_speeds():
    # The same tokens in half the seconds on every question: whichever questions are drawn, twice as fast.
    theirs = [[plain(5, (1.0, 3.0))], [plain(9, (0.5, 0.5))]]
    ours = [[plain(5, (0.5, 1.5))], [plain(9, (0.25, 0.25))]]
    assert report_row("ctc", records(ours, theirs), None, {}, seed=0)["speedup_ci"] == [2, 2]
    # Twice the tokens in the same seconds, the same.
    ours = [[answer(seconds=(1.0, 3.0), tokens=(0,) * 10)], [answer(seconds=(0.5, 0.5), tokens=(0,) * 18)]]
    assert report_row("ctc", records(ours, theirs), None, {}, seed=0)["speedup_ci"] == [2, 2]


def test_records_survive_their_json():
    for record in records(divergences=((Divergence(0, 1, None, None),), ())):
        assert from_json(to_json(record)) == record
