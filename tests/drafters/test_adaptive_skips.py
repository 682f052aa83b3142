"""When adaptive trees skip the draft, and how steps are booked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simple_drafters import random_drafter
from test_adaptive import LOOP, context_of, policy
from test_training_equals_decoding import HOW, block_drafter
from tiny_models import random_base

from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.adaptive import AdaptiveDrafter, AdaptiveMemory
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.tree_policy import AdaptivePolicy


def test_drafting_is_skipped_where_nothing_pays_and_tried_again():
    """Random draft tokens: at first the policy believes in them, then it drafts ever less often."""
    base = random_base()
    junk = AdaptiveDrafter(random_drafter(base.vocabulary, 12), policy())
    passes = generate(base, junk, LOOP, replace(HOW, max_new_tokens=160), frozenset(), 0).passes
    drafted = [step.nodes > 1 for step in passes]
    assert any(drafted[:5])
    assert 0 < sum(drafted[20:]) < 0.1 * len(drafted)
    never = AdaptiveDrafter(random_drafter(base.vocabulary, 12), policy(tokens=(1.0, 1.01, 1.01, 1.01, 1.01)))
    assert {step.nodes for step in generate(base, never, LOOP, HOW, frozenset(), 0).passes} == {1}


@pytest.mark.parametrize(("gain", "limit"), [(0.04, 0), (0.06, 1)])
def test_a_gain_within_the_error_of_calibrations_is_not_tried(gain, limit):
    """The expected tokens of a draft of two nodes, whose step takes 1.07 autoregressive steps."""
    assert policy(tokens=(1.0, 1.07 + gain, 1.0, 1.0, 1.0)).limit(0.0) == limit


@pytest.mark.parametrize(("accepted", "limit"), [(0.6, 1), (0.58, 0)])
def test_drafts_go_on_where_they_gain_less_than_usual(accepted, limit):
    """2.06 tokens in a time of 1.625 are usual, a rate of 1.27; with 0.59 times the draft tokens it is 1."""
    costly = policy([1.0, 1.125, 1.5, 2.0, 3.0], draft=0.5, tokens=(1.0, 2.06, 2.06, 2.06, 2.06), rate=1.27)
    assert costly.limit(float(np.log(accepted))) == limit


def test_time_is_worth_the_rate_of_autoregression_where_drafts_lost_more():
    memory = AdaptiveMemory(None, 9, [], 0, 0, 0.0, 0.0, 0.0, tokens=12.0, time=15.0)
    assert memory.rate == 1.0
    assert memory._replace(tokens=30.0).rate == 2.0
    losing = policy(draft=0.5, tokens=(1.0, 1.48, 1.0, 1.0, 1.0))  # in a time of 1.52
    assert losing.limit(0.0) == 0


def test_what_a_step_brought_is_booked_with_its_cost():
    """By hand: 3 tokens after a draft of size index 2 that kept index 1, then 1 token, then one without a draft."""
    drafter = AdaptiveDrafter(PromptLookup(random_base(), 2, 4), policy())
    first = drafter.observe(context_of(10), None)
    assert (first.tokens, first.time, first.recent) == (5 * 1.2, 5.0, 0.0)
    drafted = first._replace(limit=2, size=1, expected=1.5)
    second = drafter.observe(context_of(13), drafted)
    assert second.tokens == pytest.approx(0.97 * 6 + 3)
    assert second.time == pytest.approx(0.97 * 5 + 1.02 + 0.05)  # what was kept was read, what was asked for drafted
    assert (second.accepted_sum, second.expected_sum) == (2, 1.5)
    assert second.recent == pytest.approx(np.log((2 + 3) / (1.5 + 3)))
    third = drafter.observe(context_of(14), second._replace(limit=4, size=4, expected=0.5))
    assert (third.accepted_sum, third.expected_sum) == pytest.approx((0.98 * 2, 0.98 * 1.5 + 0.5))
    assert third.time == pytest.approx(0.97 * second.time + 1.3 + 0.05)
    fourth = drafter.observe(context_of(15), third._replace(limit=0, size=0))
    assert fourth.time == pytest.approx(0.97 * third.time + 1.0)
    assert (fourth.accepted_sum, fourth.expected_sum) == pytest.approx((0.99 * 1.96, 0.99 * 1.97))


def test_several_skipped_steps_are_booked_like_one_after_another():
    drafter = AdaptiveDrafter(PromptLookup(random_base(), 2, 4), policy())
    memory = AdaptiveMemory(None, 20, [], 0, 0, 0.7, accepted_sum=3.0, expected_sum=5.0, tokens=30.0, time=20.0)
    one_by_one = memory
    for length in range(21, 29):
        one_by_one = drafter.observe(context_of(length), one_by_one)
    assert drafter.observe(context_of(28), memory)[3:] == pytest.approx(one_by_one[3:])


def test_the_policy_is_asked_ever_less_often_while_it_skips(monkeypatch):
    """At the steps 0, 1, 3, 7, 15, 23, ... of a text; from one on again after the draft of the fifth time."""
    asked, base = [], random_base()
    monkeypatch.setattr(AdaptivePolicy, "limit", lambda self, recent: 4 if asked[-1] == 15 else 0)
    drafter, prompt = AdaptiveDrafter(block_drafter(base), policy()), len(LOOP) + 1
    observe = drafter.observe
    monkeypatch.setattr(
        drafter,
        "observe",
        lambda context, memory: asked.append(len(context.tokens_L) - prompt) or observe(context, memory),
    )
    passes = generate(base, drafter, LOOP, replace(HOW, max_new_tokens=60), frozenset(), 0).passes
    assert [number for number, step in enumerate(passes) if step.nodes > 1] == [15]
    drafted = 15 + passes[15].committed
    assert asked == [0, 1, 3, 7, 15, *(n for n in (drafted + s for s in (0, 1, 3, *range(7, 59, 8))) if n < 59)]
