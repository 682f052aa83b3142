"""Compositions of two drafters: lossless, and each part drafts what it drafts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sequential_parts import make_sequential_drafter, saved_lm
from simple_drafters import oracle_drafter, random_drafter
from test_training_equals_decoding import HOW, PROMPT, block_drafter
from tiny_models import random_base
from truths_trees import texts

from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.cascade import Cascade, Staged, attach_subtree
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.drafters.trees.sampled import SampledChains, SampledLabels, SampledTokens
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


@pytest.mark.parametrize("role", [0, 1])
def test_a_cascade_with_a_sampled_part_is_refused_at_construction(base, role, tmp_path):
    """Also where trees would never be joined, because the second drafter reads hidden states."""
    head = block_drafter(base)
    model = make_sequential_drafter("draft_model", base, tmp_path)
    for part, how in ((head, "frame_tree"), (model, "step_tree")):
        for sampled_tree in (SampledLabels(2), SampledTokens(2)) if how == "frame_tree" else (SampledChains(1),):
            setattr(part, how, sampled_tree)
            parts = [lookup(base), part] if role else [part, lookup(base)]
            with pytest.raises(InputError, match=f"the {['first', 'second'][role]} part of a cascade samples"):
                Cascade(base, *parts, 2)


def test_a_part_that_cannot_draft_is_refused(base, tmp_path):
    stock = StockGenerate(base, {}, None, None)
    with pytest.raises(InputError, match="StockGenerate has a decoding loop of its own"):
        Cascade(base, lookup(base), stock, 2)
    with pytest.raises(InputError, match="StockGenerate has a decoding loop of its own"):
        Staged(base, make_sequential_drafter("draft_model", base, tmp_path), stock, 4)


class TokensOnly:
    """A drafter of tests/simple_drafters.py that declares that it reads no hidden states."""

    uses_hidden_states = False

    def __init__(self, drafter):
        self.draft = drafter.draft


def pairs(base, folder):
    model = make_sequential_drafter("draft_model", base, folder)
    yield Cascade(base, lookup(base), model, 4)
    yield Cascade(base, model, lookup(base), 4)
    yield Cascade(base, lookup(base), block_drafter(base), 4)
    yield Cascade(base, make_sequential_drafter("eagle", base, folder), model, 4)
    yield Cascade(base, Cascade(base, lookup(base), model, 2), make_sequential_drafter("hydra", base, folder), 4)
    yield Cascade(base, model, Staged(base, own_twin(base, folder), lookup(base), 6), 6)
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
def test_the_second_continues_below_the_deepest_node_of_the_first(base, tmp_path):
    text = torch.arange(20, 60)
    cascade = Cascade(base, oracle_drafter(text, 3), TokensOnly(oracle_drafter(text, 9)), later=4)
    context = Context(text[:10], torch.zeros(9, 32), 30, 12)
    tree, _ = cascade.draft(context, None, torch.Generator())
    # 3 draft tokens of the first; then 12 - 4 + 1 = 9 nodes and hence 8 draft tokens of the second
    assert tree.tokens_N.tolist() == text[9:21].tolist()
    assert int(tree.depths_N.max()) == 11
    near_the_end, _ = cascade.draft(replace(context, remaining_tokens=5), None, torch.Generator())
    assert near_the_end.tokens_N.tolist() == text[9:14].tolist()  # never deeper than remaining_tokens - 1


@torch.inference_mode()
def test_a_second_that_reads_hidden_states_drafts_where_the_first_drafts_nothing(base):
    """It gets every hidden state since its last call exactly once: its tree is the one it builds alone."""
    head = block_drafter(base)
    cascade = Cascade(base, lookup(base), head, 4)
    tokens = torch.tensor([0, 7, 9, 30, 7, 9, 30, 50, 51, 52])
    states = base.hidden_states(tokens[None], torch.ones(1, 10, dtype=torch.int64))[0]
    rng, memory, alone, states_read = torch.Generator(), None, None, 0
    for end, read in ((6, 0), (7, 5), (8, 6), (10, 7)):
        context = Context(tokens[:end], states[read : end - 1], 20, 12)
        tree, memory = cascade.draft(context, memory, rng)
        if len(lookup(base).draft(context, None, rng)[0]) == 1:
            truth, alone = head.draft(replace(context, new_states_KD=states[states_read : end - 1]), alone, rng)
            assert texts(tree) == texts(truth)
            states_read = end - 1
        else:
            assert texts(tree) == texts(lookup(base).draft(replace(context, nodes=8), None, rng)[0])
    assert states_read == 9


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


def test_attaching_a_subtree_by_hand():
    tree = TokenTree(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 0]), 1)
    subtree = TokenTree(torch.tensor([2, 5, 6, 7]), torch.tensor([-1, 0, 0, 1]), 2)
    grown = attach_subtree(tree, torch.tensor(1), subtree)
    assert grown.tokens_N.tolist() == [1, 2, 3, 5, 6, 7]
    assert grown.parents_N.tolist() == [-1, 0, 0, 1, 1, 3]
    assert grown.depths_N.tolist() == [0, 1, 1, 2, 2, 3]
    assert grown.path_probs_N is None  # the parts do not tell
    known = replace(tree, path_probs_N=torch.tensor([1.0, 0.5, 0.25]))
    grown = attach_subtree(known, torch.tensor(1), replace(subtree, path_probs_N=torch.tensor([1.0, 0.5, 0.2, 0.1])))
    assert grown.path_probs_N.tolist() == pytest.approx([1.0, 0.5, 0.25, 0.25, 0.1, 0.05])
    with pytest.raises(InputError, match="no distribution for sampled"):
        attach_subtree(replace(tree, draft_probs_NV=torch.ones(3, 9)), torch.tensor(1), subtree)


def test_impossible_compositions_are_refused(base, tmp_path):
    with pytest.raises(InputError, match=r"later must be an integer >= 1, got 0"):
        Cascade(base, lookup(base), lookup(base), 0)
    with pytest.raises(InputError, match="Hydra reads the base's hidden states"):
        Staged(base, own_twin(base, tmp_path), make_sequential_drafter("hydra", base, tmp_path), 8)
    with pytest.raises(InputError, match="must be a draft_model"):
        Staged(base, lookup(base), lookup(base), 8)
