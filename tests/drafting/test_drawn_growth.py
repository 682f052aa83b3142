"""Chains drawn from laws that are asked level by level, and how many there may be."""

from __future__ import annotations

import pytest
import torch
from laws import assert_rows
from test_grow import TableLaws, random_law

from ctcdraft.decoding.rejection import draws_of
from ctcdraft.drafters.chance import Chance
from ctcdraft.drafters.drawn import Drawn, shared
from ctcdraft.errors import InputError


@pytest.mark.parametrize("chains", [1, 4])
def test_chains_drawn_from_laws_that_are_asked(chains):
    """A growth for drafters that read their own guesses; each chain is handed its own row back."""
    law = random_law(3)
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        tree = Drawn(chains)(TableLaws(law), torch.tensor(99), 3, 1 + 3 * chains, (), Chance(rng))
        assert_rows(tree, law, 3)
        draws_NK = draws_of(tree)
        assert int((draws_NK != -1).sum()) == 3 * chains


def test_nodes_are_shared_by_pencil():
    assert shared(3, 9, 12) == (3, 3)
    assert shared(3, 2, 12) == (3, 2)
    assert shared(3, 9, 3) == (2, 1)
    assert shared(3, 9, 1) == (1, 0)


def test_no_chain_is_refused():
    with pytest.raises(InputError, match=r"drafter.growth.chains=0"):
        Drawn(0)
