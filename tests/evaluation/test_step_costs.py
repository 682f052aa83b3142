"""Times of a decoding step by tree size: what is timed, and how repeats are combined."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_evaluations import make_setup
from tiny_models import random_base

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.controls import RandomDrafter
from ctcdraft.evaluation.profiling import PhaseTimes
from ctcdraft.evaluation.replay import step_costs
from ctcdraft.evaluation.replay.step_costs import isotonic
from ctcdraft.progress import Progress


def test_step_costs_are_the_median_times_in_steps_of_autoregression(monkeypatch):
    """Scripted times: drafting takes nodes / 100, the rest 1 + nodes / 10. Of the four repeats of three arms the first
    one is slow, the third one very slow and the last one too fast."""
    setup, calls = make_setup(random_base()), []

    def profiled(base, drafter, prompt_L, settings, seed, stops):
        calls.append((type(drafter).__name__, settings.nodes))
        slow = {0: 0.9, 2: 5.0, 3: -0.005}.get((len(calls) - 1) // 3 % 4, 0.0)
        # Random trees give the probability at which searches stop, and no times.
        random = isinstance(drafter, RandomDrafter)
        draft = 0.0 if settings.nodes == 1 else (99.0 if random else settings.nodes / 100)
        rest = 1.0 if settings.nodes == 1 else (77.0 if random else 1 + settings.nodes / 10)
        seconds = {"draft": 10 * (draft + slow), "tree": 0.0, "read": 10 * (rest + slow), "verify": 0.0, "keep": 0.0}
        return PhaseTimes({**seconds, "other": 0.0}, 10, 1, 0)

    monkeypatch.setattr(step_costs, "profile_answer", profiled)
    progress = Progress(2 * 4 * 3, "answers")
    timed = step_costs.TimedSteps(setup, [torch.tensor([0, 7, 9])], 8, 3, progress)
    costs = step_costs.measure_step_costs(timed, (4, 8), ["prompt_lookup"])["prompt_lookup"]
    assert progress.done == progress.total == len(calls)
    assert costs.nodes == (1, 4, 8)
    assert costs.draft == pytest.approx((0.0, 0.04, 0.08))
    assert costs.rest == pytest.approx((1.0, 1.4, 1.8))
    assert calls[:3] == [("Autoregressive", 1), ("RandomDrafter", 4), ("RandomDrafter", 8)]
    assert {name for name, _ in calls[-2:]} == {"FilledTrees"}


def test_timed_texts_end_before_the_length_limit_makes_trees_shallower():
    setup, depths = make_setup(random_base()), []

    class Deep:
        def draft(self, context, memory, rng):
            depths.append(context.depth)
            return TokenTree.chain(context.root, torch.full((min(4, context.depth),), 9)), None

    timed = step_costs.TimedSteps(setup, [torch.tensor([0, 7, 9])], 7, 2, Progress(6, "answers"))
    assert timed.profile(Deep(), timed.texts[0], 6).passes == 7
    assert depths == [5] * 8  # the first one is not timed
    assert timed.profile(setup.contestants["autoregressive"], timed.texts[0], 1).passes == 7


def test_no_step_takes_less_than_one_of_autoregression():
    assert step_costs.rest_times([0.9, 0.97, 1.3, 1.2]) == (1.0, 1.0, 1.25, 1.25)


def test_filled_trees_have_an_exact_size_and_the_drafted_nodes():
    tokens_L = torch.tensor([0, 7, 9, 7])
    context = Context(tokens_L, torch.zeros(3, 32), remaining_tokens=9, nodes=6)
    chain = SimpleNamespace(draft=lambda context, memory, rng: (TokenTree.from_lists(context.root, [1, 0], [-1, 0]), 3))
    tree, memory = step_costs.FilledTrees(chain).draft(context, None, torch.Generator())
    assert (tree.tokens_N.tolist(), memory) == ([7, 1, 0, 0, 0, 0], 3)
    assert tree.parents_N.tolist() == [-1, 0, 1, 0, 0, 0]
    for unfilled in (replace(context, nodes=3), replace(context, remaining_tokens=1)):
        assert len(step_costs.FilledTrees(chain).draft(unfilled, None, torch.Generator())[0]) == 3


def test_costs_never_fall():
    assert isotonic([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert isotonic([]) == []
