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


def test_step_costs_are_median_ratios_to_autoregression(monkeypatch):
    """Scripted times: drafting takes nodes / 100 after one text and twice as long after the other, the rest takes
    1 + nodes / 10, on a machine that is slower in every repeat than in the one before. The first of four repeats of
    three arms, which warms up, is wrong, and so is one other run of each size."""
    setup, calls = make_setup(random_base()), []

    def profiled(base, drafter, prompt_L, settings, seed, stops):
        repeat, arm = divmod(len(calls) % 12, 3)
        calls.append((type(drafter).__name__, settings.nodes))
        wrong = 9.0 if (repeat, arm) in {(0, 1), (0, 2), (1, 1), (3, 2)} else 0.0
        slowdown = (1, 2, 3, 5)[repeat]
        # Random trees give the probability at which searches stop, and no times.
        random = isinstance(drafter, RandomDrafter)
        draft = 0.0 if settings.nodes == 1 else (99.0 if random else (len(prompt_L) - 2) * settings.nodes / 100)
        rest = 1.0 if settings.nodes == 1 else (77.0 if random else 1 + settings.nodes / 10)
        seconds = {part: 0.0 for part in ("tree", "verify", "keep", "other")}
        seconds |= {"draft": 10 * slowdown * (draft + wrong), "read": 10 * slowdown * (rest + wrong)}
        return PhaseTimes(seconds, 10, 1, 0)

    monkeypatch.setattr(step_costs, "profile_answer", profiled)
    progress = Progress(2 * 2 * 4 * 3, "answers")
    timed = step_costs.TimedSteps(setup, [torch.tensor([0, 7, 9]), torch.tensor([0, 7, 9, 8])], 8, 3, progress)
    costs = step_costs.measure_step_costs(timed, (4, 8), ["prompt_lookup"])["prompt_lookup"]
    assert progress.done == progress.total == len(calls)
    assert costs.nodes == (1, 4, 8)
    assert costs.draft == pytest.approx((0.0, 0.06, 0.12))
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
