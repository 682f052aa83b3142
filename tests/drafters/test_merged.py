"""Two drafters in one tree: the best nodes of both, each part drafts what it drafts alone; prompt lookup's scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sequential_parts import make_sequential_drafter
from simple_drafters import random_drafter
from test_adaptive import random_tree
from test_training_equals_decoding import HOW, PROMPT, block_drafter
from tiny_models import random_base
from truths_trees import slow_merge, texts

from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.merged import Merged, merge_trees
from ctcdraft.drafters.prompt_lookup import PromptLookup, find_continuation
from ctcdraft.drafters.trees.sampled import SampledChains, SampledLabels, SampledTokens
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import StockGenerate

LOOP = torch.tensor([0, 7, 9, 30, 31, 32, 33, 7, 9])
ACCEPTANCE = [0.4, 0.7, 0.8]


@pytest.fixture
def base():
    return random_base()


def lookup(base):
    return PromptLookup(base, 2, 3, ACCEPTANCE)


def small_vocabulary(seed: int) -> TokenTree:
    """Return a tree of few different tokens, no two siblings alike, so that trees share nodes."""
    tree = random_tree(seed, 14)
    edges = list(zip(tree.parents_N.tolist(), (tree.tokens_N % 4).tolist(), strict=True))
    keep = [0]
    for node, edge in enumerate(edges[1:], 1):
        if edge not in edges[1:node] and edge[0] in keep:
            keep.append(node)
    parents = [-1, *(keep.index(edges[node][0]) for node in keep[1:])]
    tokens = torch.tensor([9, *(edges[node][1] for node in keep[1:])])
    return TokenTree(tokens, torch.tensor(parents), 14, path_probs_N=tree.path_probs_N[keep])


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 40])
def test_a_merged_tree_holds_the_best_nodes_of_both(nodes):
    shared = 0
    for seed in range(20):
        first, second = small_vocabulary(seed), small_vocabulary(seed + 100)
        tree, truth = merge_trees(first, second, nodes), slow_merge(first, second, nodes - 1)
        shared += bool(set(texts(first)) & set(texts(second)))
        assert texts(tree) == list(truth)
        assert tree.path_probs_N.tolist() == pytest.approx([1.0, *truth.values()])
        assert int(tree.tokens_N[0]) == 9
    assert shared > 10


def test_a_merged_tree_by_hand():
    first = TokenTree.from_lists(torch.tensor(5), [7, 8], [-1, 0], [0.5, 0.2])
    second = TokenTree.from_lists(torch.tensor(5), [7, 6], [-1, 0], [0.6, 0.1])
    tree = merge_trees(first, second, 9)
    assert (tree.tokens_N.tolist(), tree.parents_N.tolist()) == ([5, 7, 8, 6], [-1, 0, 1, 1])
    assert tree.path_probs_N.tolist() == pytest.approx([1.0, 0.8, 0.2, 0.1])
    assert merge_trees(first, TokenTree.only_root(torch.tensor(5)), 9) is first
    unknown = merge_trees(TokenTree.chain(torch.tensor(5), torch.tensor([1, 2])), second, 4)
    assert unknown.tokens_N.tolist() == [5, 7, 1, 2]  # without probabilities: a half at each depth


def test_a_run_of_tokens_decides_how_probable_a_lookup_is():
    context = Context(LOOP, torch.zeros(0, 32), 30, 12)
    tree, _ = PromptLookup(None, 2, 5, ACCEPTANCE).draft(context, None, torch.Generator())
    assert tree.tokens_N.tolist() == [9, 30, 31, 32, 33, 7]  # after a run of two
    assert tree.path_probs_N.tolist() == pytest.approx([1, 0.7, 0.7 * 0.8, 0.7 * 0.8**2, 0.7 * 0.8**3, 0.7 * 0.8**4])
    tree, _ = PromptLookup(None, 1, 5, ACCEPTANCE).draft(context, None, torch.Generator())
    assert tree.path_probs_N.tolist()[:3] == pytest.approx([1, 0.4, 0.4 * 0.7])
    probable, _ = PromptLookup(None, 1, 5, ACCEPTANCE).draft(
        replace(context, min_path_prob=0.25), None, torch.Generator()
    )
    assert probable.tokens_N.tolist() == [9, 30, 31]
    plain, _ = PromptLookup(None, 2, 5).draft(context, None, torch.Generator())
    assert plain.tokens_N.tolist() == [9, 30, 31, 32, 33, 7]
    assert plain.path_probs_N is None
    with pytest.raises(InputError, match=r"prompt_lookup\.acceptance must be a number >= 0 and <= 1, got 2"):
        PromptLookup(None, 2, 5, [2])


def test_the_longest_run_is_found():
    rng = torch.Generator().manual_seed(0)
    for _ in range(200):
        tokens = torch.randint(3, (int(torch.randint(1, 30, (), generator=rng)),), generator=rng)
        for ngram in (1, 3, 8):
            found = torch.empty(0, dtype=torch.int64), 0
            for size in range(1, min(ngram, len(tokens) - 1) + 1):
                for start in range(len(tokens) - size):
                    if torch.equal(tokens[start : start + size], tokens[-size:]):
                        found = tokens[start + size :], size
            continuation, run = find_continuation(tokens, ngram)
            assert (continuation.tolist(), run) == (found[0].tolist(), found[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_merged_drafters_are_lossless(base, temperature, tmp_path):
    how, head = replace(HOW, temperature=temperature, max_new_tokens=30), block_drafter(base)
    model = make_sequential_drafter("draft_model", base, tmp_path)
    pairs = [(head, lookup(base)), (lookup(base), model), (random_drafter(base.vocabulary, 12), head)]
    for first, second in [*pairs, (Merged(base, *pairs[0]), make_sequential_drafter("eagle", base, tmp_path))]:
        drafter = Merged(base, first, second)
        for prompt in (PROMPT, LOOP):
            truth = generate(base, Autoregressive(base), prompt, how, base.stop_token_ids, 1).tokens
            assert generate(base, drafter, prompt, how, base.stop_token_ids, 1).tokens == truth


@torch.inference_mode()
def test_each_part_drafts_what_it_drafts_alone(base):
    """The head gets every hidden state exactly once, whatever prompt lookup finds."""
    head = block_drafter(base)
    merged = Merged(base, head, lookup(base))
    tokens = torch.tensor([0, 7, 9, 30, 7, 9, 30, 50, 51, 52])
    states, rng = base.hidden_states(tokens[None], torch.ones(1, 10, dtype=torch.int64))[0], torch.Generator()
    memory = alone = None
    for end, read in ((6, 0), (7, 5), (8, 6), (10, 7)):
        context = Context(tokens[:end], states[read : end - 1], 20, 12)
        tree, memory = merged.draft(context, memory, rng)
        truth, alone = head.draft(context, alone, rng)
        copied, _ = lookup(base).draft(context, None, rng)
        best = slow_merge(truth, copied, 11) if len(copied) > 1 else dict.fromkeys(texts(truth))
        assert set(texts(tree)) == set(best)


@pytest.mark.parametrize("role", [0, 1])
def test_a_part_that_samples_or_cannot_draft_is_refused(base, role, tmp_path):
    model = make_sequential_drafter("draft_model", base, tmp_path)
    for part, how, trees in (
        (block_drafter(base), "frame_tree", (SampledLabels(2), SampledTokens(2))),
        (model, "step_tree", (SampledChains(1),)),
    ):
        for sampled_tree in trees:
            setattr(part, how, sampled_tree)
            parts = [lookup(base), part] if role else [part, lookup(base)]
            with pytest.raises(InputError, match=f"the {['first', 'second'][role]} part of a merged drafter samples"):
                Merged(base, *parts)
    with pytest.raises(InputError, match="StockGenerate has a decoding loop of its own"):
        Merged(base, lookup(base), StockGenerate(base, {}, None, None))
