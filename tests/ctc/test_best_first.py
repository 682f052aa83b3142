"""Best-first search against the search by levels and every alignment: the same nodes in the same order."""

from __future__ import annotations

import itertools

import pytest
import torch
from truths import slow_prefix_search

from ctcdraft.ctc import best_first
from ctcdraft.ctc.best_first import compiled_search
from ctcdraft.ctc.prefix_search import prefix_search
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.trees.ctc import MAX_BEST_FIRST_NODES, PrefixSearch
from ctcdraft.drafters.trees.request import TreeRequest


def texts_of(tokens, parents, masses):
    assert sorted(masses, reverse=True) == pytest.approx(masses, rel=3e-9)
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert -1 <= parent < len(texts)
        texts.append((*(texts[parent] if parent >= 0 else ()), token))
    return texts


def frames(seed: int, count: int, classes: int, sharp: float = 2.0, zeros: float = 0.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    logits_TC = sharp * torch.randn(count, classes, dtype=torch.float64, generator=rng)
    dead_TC = torch.rand(count, classes, generator=rng) < zeros
    dead_TC[:, 0] = False
    return logits_TC.masked_fill(dead_TC, -torch.inf).log_softmax(-1)


def test_by_hand():
    example_TC = torch.tensor([[1 / 2, 1 / 4, 1 / 4]] * 2, dtype=torch.float64).log()  # a, b, blank
    assert compiled_search(example_TC, 2, 3, 2)[:2] == ([0, 1, 1], [-1, -1, 0])
    assert compiled_search(example_TC, 2, 3, 2)[2] == pytest.approx([5 / 8, 5 / 16, 1 / 8])
    assert compiled_search(example_TC, 2, 0, 2) == compiled_search(example_TC, 2, 3, 2, depth=0) == ([], [], [])
    assert compiled_search(example_TC, 2, 9, 2, stop_token_ids=(0,))[:2] == ([0, 1, 0], [-1, -1, 1])


@pytest.mark.parametrize("nodes", [1, 4, 13, 400])
@pytest.mark.parametrize("seed", range(12))
def test_every_alignment(seed, nodes):
    """All tokens, wherever the blank sits and whatever is impossible; with stop tokens and a depth, too."""
    count, classes, blank = 1 + seed % 5, 2 + seed % 3, seed % 2
    log_probs_TC = frames(seed, count, classes, zeros=(seed % 4) / 5)
    probs_TC = log_probs_TC.exp().tolist()
    for stops, depth in [((), None), ((classes - 1,), None), ((), 2), ((0,), 3)]:
        truth = slow_prefix_search(probs_TC, blank, nodes, stop_token_ids=stops, depth=depth)
        nodes_found = compiled_search(log_probs_TC, blank, nodes, classes + 3, stops, depth)
        assert texts_of(*nodes_found) == [text for text, _ in truth]
        assert nodes_found[2] == pytest.approx([mass for _, mass in truth])
        at_least = min(0.05, nodes_found[2][-1]) + 1e-9
        probable = compiled_search(log_probs_TC, blank, nodes, classes + 3, stops, depth, at_least)
        assert texts_of(*probable) == [text for text, mass in truth if mass >= at_least]


@pytest.mark.parametrize("seed", range(8))
def test_ties_are_broken_as_the_truth_breaks_them(seed):
    rng = torch.Generator().manual_seed(seed)
    uniform_TC = torch.full((4, 4), 1 / 4, dtype=torch.float64)
    eighths_TC = torch.stack(
        [torch.tensor([4, 2, 1, 1])[torch.randperm(4, generator=rng)] / 8 for _ in range(4)]
    ).double()
    thirds_TC = torch.tensor([[1 / 3, 1 / 3, 0, 1 / 3]] * 4, dtype=torch.float64)
    for probs_TC, nodes in itertools.product((uniform_TC, eighths_TC, thirds_TC), (2, 5, 11)):
        truth = slow_prefix_search(probs_TC.tolist(), seed % 4, nodes)
        nodes_found = compiled_search(probs_TC.log(), seed % 4, nodes, 3)
        assert texts_of(*nodes_found) == [text for text, _ in truth]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(40))
def test_what_the_search_by_levels_finds(seed, dtype):
    """Flat and sharp frames, as wide as real ones; with ties, with stop tokens, where no token is possible."""
    log_probs_TC = frames(seed, 1 + seed % 8, (4, 60, 300)[seed % 3], (0.0, 1.0, 3.0, 6.0)[seed % 4], (seed % 3) / 5)
    quarters_TC = (4 * log_probs_TC.exp()).round().div(4).log()
    for frames_TC, nodes, tokens in itertools.product((log_probs_TC, quarters_TC), (1, 15, 63), (1, 4, 16)):
        for limits in (((), None, 0.0), ((3,), 2, 0.01), ((0, 1), 9, 0.05)):
            arguments = frames_TC.to(dtype), seed % 4, nodes, tokens, *limits
            by_levels, (tokens_found, parents, masses) = prefix_search(*arguments), compiled_search(*arguments)
            assert tokens_found == by_levels.tokens_N.tolist()
            assert parents == by_levels.parents_N.tolist()
            assert masses == pytest.approx(by_levels.masses_N.tolist(), rel=1e-12)


def test_without_numba_the_search_by_levels_gives_the_tree(monkeypatch):
    log_probs_TC, request = frames(0, 6, 40), TreeRequest(torch.tensor(7), 5, 10, (2,))
    fast = PrefixSearch(16)(log_probs_TC, request)
    monkeypatch.setattr(best_first, "search_kernels", lambda: None)
    assert compiled_search(log_probs_TC, 39, 9, 16) is None
    slow = PrefixSearch(16)(log_probs_TC, request)
    assert torch.equal(fast.tokens_N, slow.tokens_N)
    assert torch.equal(fast.parents_N, slow.parents_N)


@pytest.mark.parametrize("seed", range(6))
def test_a_drafter_gets_one_tree_from_either(seed):
    log_probs_TC, root = frames(seed, 6, 40), torch.tensor(7)
    few = PrefixSearch(16)(log_probs_TC, TreeRequest(root, 5, MAX_BEST_FIRST_NODES, (2,)))
    many = PrefixSearch(16)(log_probs_TC, TreeRequest(root, 5, MAX_BEST_FIRST_NODES + 1, (2,)))
    assert len(few) == len(many) - 1 == MAX_BEST_FIRST_NODES
    assert torch.equal(few.tokens_N, many.tokens_N[:-1])
    assert torch.equal(few.parents_N, many.parents_N[:-1])
    torch.testing.assert_close(few.path_probs_N, many.path_probs_N[:-1])
    assert few.height == few.depths_N.max() <= many.height


def test_lists_become_a_tree():
    tree = TokenTree.from_lists(torch.tensor(7), [5, 6, 8], [-1, 0, -1])
    assert (tree.tokens_N.tolist(), tree.parents_N.tolist(), tree.height) == ([7, 5, 6, 8], [-1, 0, 1, 0], 2)
    assert len(TokenTree.from_lists(torch.tensor(7), [], [])) == 1


def test_bad_requests_are_refused_in_a_sentence():
    sure_TC = torch.zeros(2, 3).log_softmax(-1)
    with pytest.raises(ValueError, match="blank is class 3, but the frames have classes 0 to 2"):
        compiled_search(sure_TC, 3, 4, 2)
