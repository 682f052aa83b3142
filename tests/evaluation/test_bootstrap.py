"""Intervals against draws of questions made here, question by question, and against theory."""

from types import SimpleNamespace

import numpy as np
import pytest

from ctcdraft.evaluation import metrics
from ctcdraft.evaluation.bootstrap import QuestionSums, bootstrap_interval, paired_difference, ratio_interval
from studies.external_logs import metrics as external_logs_metrics

QUESTIONS, SEED = 12, 3
rng = np.random.default_rng(0)
TOKENS = {side: rng.integers(20, 400, QUESTIONS) for side in ("ours", "theirs", "base")}
SECONDS = {side: rng.gamma(4.0, 2.0, QUESTIONS) for side in ("ours", "theirs", "base")}


def drawn():
    """2,000 draws of as many questions as there are, with replacement, each as a list of questions."""
    counts = np.random.default_rng(SEED).multinomial(QUESTIONS, [1 / QUESTIONS] * QUESTIONS, size=2000)
    return [np.repeat(np.arange(QUESTIONS), count) for count in counts]


def middle(statistic):
    """The bounds between which 95 of 100 draws lie."""
    return pytest.approx(np.percentile([statistic(draw) for draw in drawn()], [2.5, 97.5]).tolist(), rel=1e-12)


def speed(side, draw):
    """Tokens a second of the questions drawn."""
    return TOKENS[side][draw].sum() / SECONDS[side][draw].sum()


def answers(side):
    """One answer a question, as our records and the answer files of others hold them."""
    pairs = zip(TOKENS[side].tolist(), SECONDS[side].tolist(), strict=True)
    same = [{"seconds": s, "seconds_decode": s, "tokens": range(n), "counted": n, "committed": n} for n, s in pairs]
    return [[SimpleNamespace(**fields, passes=[])] for fields in same]


def test_an_interval_holds_95_of_100_draws():
    found = ratio_interval(TOKENS["ours"], SECONDS["ours"], SEED)
    assert found == middle(lambda draw: speed("ours", draw))


def test_an_interval_of_a_mean_is_as_wide_as_theory_says():
    """1.96 standard errors to either side; 90 of 100 would be 1.64."""
    values = np.random.default_rng(1).normal(10.0, 2.0, size=900)
    low, high = bootstrap_interval(lambda total: total / 900, [values], seed=0)
    error = values.std() / 30
    assert (high - low) / 2 / error == pytest.approx(1.96, rel=0.05)
    assert (high + low) / 2 == pytest.approx(values.mean(), abs=0.2 * error)


def test_the_interval_of_a_speedup_is_in_units_of_the_bases_own_speed():
    """Each draw divides by autoregression's tokens a second over the same questions."""
    found = metrics.metric_intervals(answers("ours"), answers("base"), SEED)["speedup_ci"]
    assert found == middle(lambda draw: speed("ours", draw) / speed("base", draw))
    assert found[0] < metrics.speedups(answers("ours"), answers("base"))["speedup"] < found[1]


def test_so_is_that_of_a_difference():
    sides = {side: QuestionSums(TOKENS[side], TOKENS[side], TOKENS[side], SECONDS[side]) for side in TOKENS}
    found = paired_difference(sides["ours"], sides["theirs"], sides["base"], SEED)
    every = np.arange(QUESTIONS)

    def gained(draw):
        return (speed("ours", draw) - speed("theirs", draw)) / speed("base", draw)

    assert found["speedup"] == pytest.approx(gained(every))
    assert found["speedup_ci"] == middle(gained)


def test_and_those_of_answer_files():
    found = external_logs_metrics.log_speedups(answers("ours"), answers("base"), SEED)
    assert found["speedup_ci"] == middle(lambda draw: speed("ours", draw) / speed("base", draw))

    def mean_speed(side, draw):
        return (TOKENS[side][draw] / SECONDS[side][draw]).mean()

    by_turn = middle(lambda draw: mean_speed("ours", draw) / mean_speed("base", draw))
    assert found["speedup_turns_ci"] == by_turn  # a question has one turn here, so the paper's is the same
    assert found["speedup_paper_ci"] == by_turn
