"""The plan before the first step: feasible windows, and the time of the remaining steps."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from tiny_models import random_base
from training_parts import block_head, make_trainer, masked_sequences
from truths import slow_window

from ctcdraft.corpus.batches import Batches, TokenSequences, feasible_share
from ctcdraft.distributed import Distributed
from ctcdraft.drafters.trees.ctc import PrefixSearch
from ctcdraft.drafters.trees.per_frame import PerFrameTree
from ctcdraft.errors import InputError
from ctcdraft.nn.bodies import AttentionBody
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.objectives.ctc import CTC
from ctcdraft.planning.training import plan_training


@pytest.fixture(scope="module")
def base():
    return random_base(context=64)


def planned(base, objective, paths, mask):
    """Return the plan for four responses that repeat one token, with as many frames as labels."""
    drafter = block_head(base, partial(AttentionBody, root_input=True, causal=False), paths, frames=3)
    one = make_trainer(None, base, 3, drafter=drafter, objective=objective)
    rows = masked_sequences([torch.full((20,), 7)] * 4, [mask] * 4, [True] * 4)
    batches = Batches(rows, base, 2, 8, objective.labels, 0)
    return plan_training(base, drafter, objective, batches, one.engine, 3, 1, 2)


def test_feasible_windows_depend_on_the_objective(base):
    """CTC needs a blank between equal tokens; cross-entropy, with label k at frame k, needs none."""
    mask = (torch.arange(20) >= 6).int()
    assert "100.00% of them feasible (3 frames, 3 labels)" in planned(
        base, CrossEntropy(3, 0.8), PerFrameTree(None), mask
    )
    plan = planned(base, CTC(3), PrefixSearch(16), mask)
    assert "52 windows" in plan
    assert f"{2 / 13:.2%} of them feasible" in plan  # one label, or two with a blank between them


def test_time_is_that_of_the_share_of_one_process(base, monkeypatch):
    """By a patched clock the base model reads a batch for ten seconds, and the head takes ten more."""
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr("ctcdraft.planning.training.perf_counter", lambda: float(next(seconds)))
    rows = TokenSequences([torch.full((20,), 7)] * 4, [[(6, 20, True)]] * 4)
    drafter = block_head(base, partial(AttentionBody, root_input=True, causal=False), PrefixSearch(16), frames=6)

    def time_of(accumulate, world):
        one = make_trainer(None, base, 36, drafter=drafter, distributed=Distributed(0, world), accumulate=accumulate)
        shared = Batches(rows, base, 4, 8, 3, 0, per_step=accumulate, processes=one.distributed)
        plan = plan_training(base, drafter, CTC(3), shared, one.engine, 36, accumulate, 2)
        assert f"{'2 x ' * (accumulate > 1)}{4 // accumulate} rows x 8 anchors, 36.0 epochs" in plan
        return plan.split("time        about ")[1].split(" (")[0]

    assert time_of(1, 1) == time_of(1, 2) == "0.20 hours"
    assert time_of(2, 1) == time_of(2, 2) == "0.40 hours"


def test_a_corpus_without_a_window_is_refused(base):
    """As where every prompt is longer than trainer.max_length; every gradient would be zero."""
    with pytest.raises(InputError, match=r"none of the 4 rows has a window.*raise trainer\.max_length"):
        planned(base, CTC(3), PrefixSearch(16), torch.zeros(20).int())


def test_windows_are_counted_as_they_are_cut():
    """Compared with a slow implementation, on seventy unsorted responses, some of them cut off."""
    rng = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 12, (70,), generator=rng).tolist()
    tokens = [torch.randint(5, 8, (length,), generator=rng) for length in lengths]
    masks = [(torch.arange(length) >= length // 3).int() for length in lengths]
    ended = [index % 3 != 0 for index in range(70)]
    windows = feasible = 0
    for text, mask, whole in zip(tokens, masks, ended, strict=True):
        mask[0] = 0  # the first token of a text is never a label
        for place in range(len(text) - 1):
            _, labels_found = slow_window(text.tolist(), mask.tolist(), place, 3)
            if labels_found and (whole or len(labels_found) == 3):
                windows += 1
                feasible += len(labels_found) + sum(a == b for a, b in pairwise(labels_found)) <= 3
    assert 0 < feasible < windows
    assert feasible_share(masked_sequences(tokens, masks, ended), labels=3, frames=3) == (windows, feasible / windows)
