"""Bootstrap intervals against resampling question by question, and against theory."""

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


def resamples():
    """Return 2,000 resamples of the questions, with replacement, each as a list of questions."""
    counts = np.random.default_rng(SEED).multinomial(QUESTIONS, [1 / QUESTIONS] * QUESTIONS, size=2000)
    return [np.repeat(np.arange(QUESTIONS), count) for count in counts]


def central_95(statistic):
    """Return the bounds of the central 95 % of resamples."""
    return pytest.approx(np.percentile([statistic(sample) for sample in resamples()], [2.5, 97.5]).tolist(), rel=1e-12)


def speed(side, sample):
    """Return the tokens per second of the resampled questions."""
    return TOKENS[side][sample].sum() / SECONDS[side][sample].sum()


def answers(side):
    """Return one answer per question, with the fields of our records and of external logs."""
    pairs = zip(TOKENS[side].tolist(), SECONDS[side].tolist(), strict=True)
    same = [{"seconds": s, "seconds_decode": s, "tokens": range(n), "token_count": n, "committed": n} for n, s in pairs]
    return [[SimpleNamespace(**fields, passes=[])] for fields in same]


def test_an_interval_is_the_central_95_percent():
    interval = ratio_interval(TOKENS["ours"], SECONDS["ours"], SEED)
    assert interval == central_95(lambda sample: speed("ours", sample))


def test_an_interval_of_a_mean_is_as_wide_as_in_theory():
    """1.96 standard errors to either side; 90 of 100 would be 1.64."""
    values = np.random.default_rng(1).normal(10.0, 2.0, size=900)
    low, high = bootstrap_interval(lambda total: total / 900, [values], seed=0)
    error = values.std() / 30
    assert (high - low) / 2 / error == pytest.approx(1.96, rel=0.05)
    assert (high + low) / 2 == pytest.approx(values.mean(), abs=0.2 * error)


def test_the_interval_of_a_speedup_is_in_units_of_the_bases_own_speed():
    """Each resample divides by autoregression's tokens per second over the same questions."""
    interval = metrics.metric_intervals(answers("ours"), answers("base"), SEED)["speedup_ci"]
    assert interval == central_95(lambda sample: speed("ours", sample) / speed("base", sample))
    assert interval[0] < metrics.speedups(answers("ours"), answers("base"))["speedup"] < interval[1]


def test_the_interval_of_a_difference_is_in_the_same_units():
    sides = {side: QuestionSums(TOKENS[side], TOKENS[side], TOKENS[side], SECONDS[side]) for side in TOKENS}
    interval = paired_difference(sides["ours"], sides["theirs"], sides["base"], SEED)
    all_questions = np.arange(QUESTIONS)

    def gained(sample):
        return (speed("ours", sample) - speed("theirs", sample)) / speed("base", sample)

    assert interval["speedup"] == pytest.approx(gained(all_questions))
    assert interval["speedup_ci"] == central_95(gained)


def test_intervals_of_external_logs():
    interval = external_logs_metrics.log_speedups(answers("ours"), answers("base"), SEED)
    assert interval["speedup_ci"] == central_95(lambda sample: speed("ours", sample) / speed("base", sample))

    def mean_speed(side, sample):
        return (TOKENS[side][sample] / SECONDS[side][sample]).mean()

    by_turn = central_95(lambda sample: mean_speed("ours", sample) / mean_speed("base", sample))
    assert interval["speedup_turns_ci"] == by_turn  # a question has one turn here, so the paper's is the same
    assert interval["speedup_paper_ci"] == by_turn
