"""A draft model that is decoded speculatively: lossless, and it drafts what it drafts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sequential_parts import make_sequential_drafter, saved_lm
from simple_drafters import oracle_drafter, random_drafter
from test_training_equals_decoding import HOW, PROMPT
from tiny_models import random_base
from truths_trees import texts

from ctcdraft.decoding.loop import Context, generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.staged import Staged
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import StockGenerate

LOOP = torch.tensor([0, 7, 9, 30, 31, 32, 33, 7, 9])


@pytest.fixture
def base():
    return random_base()


def lookup(base):
    return PromptLookup(base, 2, 3)


def own_twin(base, folder, frames=5):
    """The base itself as a draft model: every draft token is accepted."""
    return DraftModel(base, saved_lm(folder / "twin", seed=0), None, frames, DynamicTree(1, None)).eval()


def test_a_part_that_cannot_draft_is_refused(base, tmp_path):
    stock = StockGenerate(base, {}, None, None)
    with pytest.raises(InputError, match="StockGenerate has a decoding loop of its own"):
        Staged(base, make_sequential_drafter("draft_model", base, tmp_path), stock, 4)


class TokensOnly:
    """A drafter of tests/simple_drafters.py that declares that it reads no hidden states."""

    uses_hidden_states = False

    def __init__(self, drafter):
        self.draft = drafter.draft


def pairs(base, folder):
    model = make_sequential_drafter("draft_model", base, folder)
    yield Staged(base, model, lookup(base), 6)
    yield Staged(base, model, Autoregressive(base), 6)
    yield Staged(base, model, make_sequential_drafter("draft_model_gpt2", base, folder), 6)
    yield Staged(base, model, TokensOnly(random_drafter(base.vocabulary, 6)), 6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_compositions_are_lossless(base, temperature, tmp_path):
    how = replace(HOW, temperature=temperature, max_new_tokens=30)
    for number, drafter in enumerate(pairs(base, tmp_path)):
        for prompt in (PROMPT, LOOP):
            truth = generate(base, Autoregressive(base), prompt, how, base.stop_token_ids, 1).tokens
            assert generate(base, drafter, prompt, how, base.stop_token_ids, 1).tokens == truth, number


def test_up_to_the_last_position_of_the_context(tmp_path):
    base = random_base(context=64)
    for drafter in pairs(base, tmp_path):
        truth = generate(base, Autoregressive(base), LOOP, HOW, frozenset(), 0)
        assert (
            generate(base, drafter, LOOP, replace(HOW, max_new_tokens=999), frozenset(), 0).tokens[:50] == truth.tokens
        )


@torch.inference_mode()
@pytest.mark.parametrize("nodes", [4, 12, 40])
def test_a_staged_model_drafts_what_it_drafts_alone(base, nodes, tmp_path):
    """With any first drafter."""
    model = make_sequential_drafter("draft_model", base, tmp_path, frames=6, tree=DynamicTree(1, None))
    model.stops = ()
    text, rng = LOOP, torch.Generator().manual_seed(0)
    alone, chains = None, []
    while len(text) < 60:
        truth, alone = model.draft(Context(text, torch.zeros(0, 32), 60, nodes), alone, rng)
        chains.append((text, truth))
        text = torch.cat([text, truth.tokens_N[1:3], torch.tensor([44])])
    firsts = [lookup(base), Autoregressive(base), TokensOnly(random_drafter(base.vocabulary, 6))]
    for first in firsts:
        staged, memory = Staged(base, model, first, 8), None
        for text, truth in chains:
            tree, memory = staged.draft(Context(text, torch.zeros(0, 32), 60, nodes), memory, rng)
            assert texts(tree) == texts(truth)


@torch.inference_mode()
def test_a_staged_model_needs_fewer_forward_passes(base, tmp_path):
    model = make_sequential_drafter("draft_model", base, tmp_path, frames=6, tree=DynamicTree(1, 1))
    context = Context(LOOP, torch.zeros(0, 32), 60, 12)
    tokens_N = model.draft(context, None, torch.Generator())[0].tokens_N
    tree_sizes = []
    read_tree = model.lm.read_tree
    model.lm.read_tree = lambda tree, cache: tree_sizes.append(len(tree)) or read_tree(tree, cache)
    for first, least in (
        (TokensOnly(oracle_drafter(torch.cat([LOOP, tokens_N[1:]]), 5)), [6]),
        (Autoregressive(base), [1] * 6),
    ):
        tree_sizes.clear()
        Staged(base, model, first, 8).draft(context, None, torch.Generator())
        assert tree_sizes == least


def test_impossible_compositions_are_refused(base, tmp_path):
    with pytest.raises(InputError, match="Hydra reads the base's hidden states"):
        Staged(base, own_twin(base, tmp_path), make_sequential_drafter("hydra", base, tmp_path), 8)
    with pytest.raises(InputError, match="must be a draft_model"):
        Staged(base, lookup(base), lookup(base), 8)
