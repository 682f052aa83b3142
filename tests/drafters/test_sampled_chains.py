"""Chains sampled step by step, and how many there may be."""

from __future__ import annotations

import pytest
import torch
from chi_square import assert_draft_probs
from test_dynamic_trees import TableStepFunction, random_distributions

from ctcdraft.decoding.verification import sampling_order
from ctcdraft.drafters.trees.request import DraftSampling, TreeRequest
from ctcdraft.drafters.trees.sampled import SampledChains, chains_and_depth
from ctcdraft.errors import InputError


@pytest.mark.parametrize("chains", [1, 4])
def test_chains_sampled_from_a_step_function(chains):
    """Each chain continues its own row."""
    distribution = random_distributions(3)
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        tree = SampledChains(chains)(
            TableStepFunction(distribution), TreeRequest(torch.tensor(99), 3, 1 + 3 * chains, (), DraftSampling(rng))
        )
        assert_draft_probs(tree, distribution, 3)
        sampled_NK = sampling_order(tree)
        assert int((sampled_NK != -1).sum()) == 3 * chains


def test_nodes_are_shared_evenly():
    assert chains_and_depth(3, 9, 12) == (3, 3)
    assert chains_and_depth(3, 2, 12) == (3, 2)
    assert chains_and_depth(3, 9, 3) == (2, 1)
    assert chains_and_depth(3, 9, 1) == (1, 0)


def test_zero_chains_are_refused():
    with pytest.raises(InputError, match=r"drafter.tree.chains must be an integer >= 1, got 0"):
        SampledChains(0)
