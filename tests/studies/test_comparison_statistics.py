"""Intervals of differences between heads: over seeds, over questions, and over both."""

import math
import random

import pytest
from comparison_parts import sums

from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import QuestionSums
from studies.comparison.statistics import QUESTIONS, SEEDS, Measured, difference, over_seeds, t_interval


def test_t_intervals_by_hand():
    assert t_interval([[2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0]]) == pytest.approx((1.0, 1 - 2.2666, 1 + 2.2666), abs=1e-3)
    # Two seeds of each: variances 0.02 and 0, 2 degrees of freedom, 4.303 sqrt(0.01) = 0.4303
    assert t_interval([[2.0, 2.2]], [[1.0, 1.0]]) == pytest.approx((1.1, 1.1 - 0.4303, 1.1 + 0.4303))
    # Three and two: squares 2 and 0 over 3 degrees of freedom, 3.182 sqrt(2/3 (1/3 + 1/2))
    assert t_interval([[1.0, 2.0, 3.0]], [[1.0, 1.0]]) == pytest.approx((1.0, 1 - 2.3717, 1 + 2.3717), abs=1e-3)
    with pytest.raises(InputError, match="needs two to seven seeds of each head, got 1 and 3"):
        t_interval([[1.0]], [[1.0, 2.0, 3.0]])
    # An interaction, (3 - 1) - (2 - 1): squares 0.02 over 4 degrees of freedom, 2.776 sqrt(0.005 (4 / 2)) = 0.2776
    found = t_interval([[2.9, 3.1], [1.0, 1.0]], [[1.0, 1.0], [2.0, 2.0]])
    assert found == pytest.approx((1.0, 1 - 0.2776, 1 + 0.2776), abs=1e-4)


def test_claims_take_the_seeds_where_both_heads_have_some():
    named = {"a.s0": sums(2.0), "a.s1": sums(2.2), "b.s0": sums(1.0), "b.s1": sums(1.0), "autoregressive": sums(1.0)}
    at = Measured(("tiny", "replay", "gsm8k", 16), named)
    found = difference(at, ["a.s0", "a.s1"], ["b.s0", "b.s1"])
    assert found["interval"] == SEEDS
    assert (found["tau"], found["tau_low"]) == pytest.approx((1.1, 0.6697))
    found = difference(at, ["a.s0", "a.s1"], ["b.s0", "missing"])
    assert found["interval"] == QUESTIONS
    assert (found["tau"], found["questions"], found["seeds"]) == (1.0, 3, "1+1"), "the first seed of either"
    assert difference(at, ["missing"], ["b.s0"]) is None


def test_claims_with_several_seeds_have_an_interval_over_questions_too():
    """On 40 questions of different difficulty, against questions that are drawn one by one."""
    rng, passes = random.Random(0), [10] * 40
    easy = [rng.uniform(10, 40) for _ in passes]
    named = {f"a.s{seed}": QuestionSums([2 * one + seed for one in easy], passes) for seed in (0, 1)}
    named |= {f"b.s{seed}": QuestionSums([one - seed for one in easy], passes) for seed in (0, 1)}
    named |= {f"c.s{seed}": QuestionSums([10 + seed] * 40, passes) for seed in (0, 1)}
    at, drawn = Measured(("tiny", "replay", "gsm8k", 16), named), []
    for _ in range(4000):
        chosen = rng.choices(easy, k=40)
        drawn.append((sum(chosen) + 40) / 400)  # of a minus b, all seeds pooled
    drawn.sort()
    found = over_seeds(at, [["a.s0", "a.s1"]], [["b.s0", "b.s1"]])
    value, half = found["tau"], found["tau"] - found["tau_low"]
    assert (value, half) == pytest.approx((sum(easy) / 400 + 0.1, 4.303 * 0.1 / 2**0.5))
    assert value - found["wide_low"] == pytest.approx(math.hypot(half, value - drawn[100]), abs=0.02)
    assert found["wide_high"] - value == pytest.approx(math.hypot(half, drawn[-100] - value), abs=0.02)
    assert value - found["wide_low"] > half + 0.05, "the questions are not what is known best"
    # An interaction, a and b less c and c: the uncertainty from questions is that of 3 times their difficulty.
    found = over_seeds(at, [["a.s0", "a.s1"], ["b.s0", "b.s1"]], [["c.s0", "c.s1"]] * 2)
    value, half = found["tau"], found["tau"] - found["tau_low"]
    spread = (drawn[-100] - drawn[100]) / 2
    assert value - found["wide_low"] == pytest.approx(math.hypot(half, 3 * spread), abs=0.1)
