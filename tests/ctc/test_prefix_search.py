"""Prefix search and the next-label distribution against a hand calculation and against every alignment."""

import itertools

import pytest
import torch
from chi_square import exact_next_label_distribution
from truths import slow_next_label_distribution, slow_prefix_probability, slow_prefix_search, texts_of

from ctcdraft.ctc.prefix_search import drop_improbable, fused_prefix_search, prefix_search, pruned_mass

EXAMPLE_TC = torch.tensor([[1 / 2, 1 / 4, 1 / 4]] * 2, dtype=torch.float64).log()  # a, b, blank


def random_frames(seed, frames, classes, zeros=0.0, sharp=2.0):
    rng = torch.Generator().manual_seed(seed)
    logits_TC = sharp * torch.randn(frames, classes, dtype=torch.float64, generator=rng)
    dead_TC = torch.rand(frames, classes, generator=rng) < zeros
    dead_TC[:, 0] = False
    return logits_TC.masked_fill(dead_TC, -torch.inf).log_softmax(-1)


def assert_same(prefixes, truth):
    assert texts_of(prefixes) == [text for text, _ in truth]
    assert prefixes.masses_N.tolist() == pytest.approx([mass for _, mass in truth], abs=1e-12)


def test_search_by_hand():
    prefixes = prefix_search(EXAMPLE_TC, blank=2, nodes=3, tokens_per_frame=2)
    assert texts_of(prefixes) == [(0,), (1,), (0, 1)]
    assert prefixes.masses_N.tolist() == pytest.approx([5 / 8, 5 / 16, 1 / 8])


def test_a_repeat_needs_a_blank_between():
    """5 0 5 is the only alignment of 5 5 in three frames."""
    sure_TC = torch.tensor([[0.0, 1.0], [0.25, 0.75], [0.0, 1.0]], dtype=torch.float64).log()
    prefixes = prefix_search(sure_TC, blank=0, nodes=8, tokens_per_frame=1)
    assert texts_of(prefixes) == [(1,), (1, 1)]
    assert prefixes.masses_N.tolist() == pytest.approx([1, 1 / 4])


@pytest.mark.parametrize("nodes", [1, 4, 13, 400])
@pytest.mark.parametrize("seed", range(16))
def test_every_alignment(seed, nodes):
    """All tokens: the same nodes in the same order, wherever the blank sits and whatever is impossible."""
    frames, classes, blank = 1 + seed % 5, 2 + seed % 3, seed % 2
    log_probs_TC = random_frames(seed, frames, classes, zeros=(seed % 4) / 5)
    prefixes = prefix_search(log_probs_TC, blank, nodes, tokens_per_frame=classes + 3)
    assert_same(prefixes, slow_prefix_search(log_probs_TC.exp().tolist(), blank, nodes))


@pytest.mark.parametrize("seed", range(8))
def test_ties_are_broken_the_same_way(seed):
    """Eighths and uniform frames: many prefixes are exactly or all but exactly as likely as each other."""
    rng = torch.Generator().manual_seed(seed)
    uniform_TC = torch.full((4, 4), 1 / 4, dtype=torch.float64)
    eighths_TC = torch.stack(
        [torch.tensor([4, 2, 1, 1])[torch.randperm(4, generator=rng)] / 8 for _ in range(4)]
    ).double()
    thirds_TC = torch.tensor([[1 / 3, 1 / 3, 0, 1 / 3]] * 4, dtype=torch.float64)
    for probs_TC, nodes in itertools.product((uniform_TC, eighths_TC, thirds_TC), (2, 5, 11)):
        log_probs_TC = probs_TC.log()
        prefixes = prefix_search(log_probs_TC, seed % 4, nodes, tokens_per_frame=3)
        truth = slow_prefix_search(log_probs_TC.exp().tolist(), seed % 4, nodes)
        assert_same(prefixes, truth)


@pytest.mark.parametrize("seed", range(12))
def test_restricted_tokens(seed):
    """Only texts with a pruned token are lost; the others keep their full probability and their order."""
    log_probs_TC = random_frames(seed, frames=4, classes=6)
    blank, per_frame = seed % 6, 1 + seed % 2
    token_scores_TC = log_probs_TC.clone()
    token_scores_TC[:, blank] = -torch.inf
    tokens = set(token_scores_TC.topk(per_frame).indices.flatten().tolist())
    prefixes = prefix_search(log_probs_TC, blank, 24, per_frame)
    assert_same(prefixes, slow_prefix_search(log_probs_TC.exp().tolist(), blank, 24, allowed_tokens=tokens))

    seen_T = log_probs_TC.exp()[:, [*tokens, blank]].sum(1)
    assert pruned_mass(log_probs_TC, blank, per_frame).item() == pytest.approx(1 - seen_T.prod().item())
    assert pruned_mass(log_probs_TC, blank, 5).item() == pytest.approx(0, abs=1e-12)


def test_pruned_mass_by_hand():
    assert pruned_mass(EXAMPLE_TC[:1], blank=2, tokens_per_frame=1).item() == pytest.approx(1 / 4)


@pytest.mark.parametrize("seed", range(8))
def test_fixed_shapes_find_the_same(seed):
    """Tokens that several frames choose are searched once, and impossible prefixes are no nodes."""
    for classes, tokens, zeros in ((300, 16, 0.0), (6, 4, 0.5), (20, 3, 0.9)):
        log_probs_TC = random_frames(seed, frames=6, classes=classes, zeros=zeros)
        for stop_token_ids, depth, nodes in (((), 6, 64), ((0, 2), 4, 9), ((1,), 1, 200)):
            stops_S = torch.tensor(stop_token_ids, dtype=torch.int64)
            ranked = fused_prefix_search(log_probs_TC, classes - 1, nodes, tokens, stops_S, depth, 0.0)
            truth = prefix_search(log_probs_TC, classes - 1, nodes, tokens, stop_token_ids, depth)
            prefixes = drop_improbable(ranked)
            assert texts_of(prefixes) == texts_of(truth)
            torch.testing.assert_close(prefixes.masses_N, truth.masses_N)


@pytest.mark.parametrize("seed", range(8))
def test_stop_token_ids_and_depth(seed):
    log_probs_TC = random_frames(seed, frames=5, classes=4, sharp=1.0)
    probs_TC = log_probs_TC.exp().tolist()
    for stop_token_ids, depth in [((0,), None), ((0, 2), None), ((), 2), ((1,), 3), ((), 0), ((), 99)]:
        prefixes = prefix_search(log_probs_TC, 3, 40, 3, stop_token_ids=stop_token_ids, depth=depth)
        assert_same(prefixes, slow_prefix_search(probs_TC, 3, 40, stop_token_ids=stop_token_ids, depth=depth))


@pytest.mark.parametrize("seed", range(6))
def test_nodes_are_distinct_closed_and_sorted(seed):
    log_probs_TC = random_frames(seed, frames=8, classes=300).float()
    prefixes = prefix_search(log_probs_TC, 299, 64, 16)
    texts = texts_of(prefixes)
    assert len(texts) == len(set(texts)) == 64
    assert all(text[:-1] in texts for text in texts if len(text) > 1)
    assert 299 not in prefixes.tokens_N
    assert (prefixes.masses_N.log().diff() <= 2e-9).all()


def test_equal_but_for_rounding_is_equal():
    """a: k/60 at once, or a blank and then surely a, 1/2 in all; b: 1/2. The smaller id wins every time."""
    for k in range(1, 30):
        probs_TC = torch.tensor([[k / 60, 1 / 2, 1 / 2 - k / 60], [1, 0, 0]], dtype=torch.float64)
        prefixes = prefix_search(probs_TC.log(), 2, 2, 2)
        assert texts_of(prefixes) == [(0,), (1,)]


def test_rounding_lifts_no_child_above_its_parent():
    """Two frames are a or blank, the third b: "a b" is exactly as likely as "a", by a different sum."""
    for seed in range(50):
        a_T = torch.rand(2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        frames_TC = torch.stack([a_T, torch.zeros(2), 1 - a_T], dim=1)
        frames_TC = torch.cat([frames_TC, torch.tensor([[0, 1, 0]])])
        prefixes = prefix_search(frames_TC.log(), 2, 9, 2)
        assert set(texts_of(prefixes)) == {(0,), (0, 1), (1,)}
        mass_N, parents_N = prefixes.masses_N, prefixes.parents_N
        assert (mass_N <= torch.where(parents_N < 0, 1, mass_N[parents_N])).all()


def test_a_certain_chain_is_closed():
    """A child that is as probable as its parent never pushes it out."""
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        probs_TC = torch.eye(7, dtype=torch.float64)[[0, 3, 4, 5]]
        probs_TC[0, :2] = torch.rand(2, dtype=torch.float64, generator=rng).softmax(0)
        for nodes in range(1, 9):
            prefixes = prefix_search(probs_TC.log(), 6, nodes, 6)
            assert_same(prefixes, slow_prefix_search(probs_TC.tolist(), 6, nodes))


def test_nothing_but_blank():
    blank_TC = torch.tensor([[0.0, 0.0, 1.0]] * 3, dtype=torch.float64).log()
    prefixes = prefix_search(blank_TC, 2, 5, 2)
    assert prefixes.tokens_N.tolist() == prefixes.parents_N.tolist() == prefixes.masses_N.tolist() == []


def test_bad_requests_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="blank is class 3, but the frames have classes 0 to 2"):
        prefix_search(EXAMPLE_TC, 3, 4, 2)
    with pytest.raises(ValueError, match="blank is class -1, but the frames have classes 0 to 2"):
        exact_next_label_distribution(EXAMPLE_TC, -1, [0])
    with pytest.raises(ValueError, match="tokens_per_frame must be >= 1, got 0"):
        prefix_search(EXAMPLE_TC, 2, 4, 0)
    with pytest.raises(ValueError, match="lower nodes or tokens_per_frame"):
        prefix_search(EXAMPLE_TC, 2, 1 << 24, 2)


def test_distribution_by_hand():
    probs_V, stop = exact_next_label_distribution(EXAMPLE_TC, 2, [0])
    assert probs_V.tolist() == pytest.approx([0, 1 / 5])
    assert stop.item() == pytest.approx(4 / 5)


@pytest.mark.parametrize("seed", range(20))
def test_distribution_of_every_prefix(seed):
    """Every possible prefix of up to three tokens: each token's share, the stop, and that they sum to one."""
    frames, classes, blank = 1 + seed % 5, 2 + seed % 3, seed % 2
    log_probs_TC = random_frames(seed, frames, classes, zeros=(seed % 4) / 6)
    probs_TC = log_probs_TC.exp().tolist()
    tokens = [c for c in range(classes) if c != blank]
    for prefix in itertools.chain.from_iterable(itertools.product(tokens, repeat=n) for n in range(4)):
        probs_V, end = exact_next_label_distribution(log_probs_TC, blank, prefix)
        if slow_prefix_probability(probs_TC, prefix, blank) == 0:
            assert probs_V.sum() + end == 0
            continue
        probs, stop = slow_next_label_distribution(probs_TC, blank, prefix)
        assert probs_V.tolist() == pytest.approx([probs[token] for token in tokens], abs=1e-11)
        assert end.item() == pytest.approx(stop, abs=1e-11)
        assert probs_V.sum() + end == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_search_and_distribution_agree(seed):
    """A node is its parent times the distribution, for any length; so its children and its stop sum to it."""
    log_probs_TC = random_frames(seed, frames=10, classes=9)
    prefixes = prefix_search(log_probs_TC, 8, 60, 8)
    texts, mass_N = texts_of(prefixes), prefixes.masses_N
    assert max(map(len, texts)) >= 4
    for node, text in enumerate(texts):
        probs_V, stop = exact_next_label_distribution(log_probs_TC, 8, text[:-1])
        parent = 1.0 if len(text) == 1 else mass_N[prefixes.parents_N[node]]
        assert mass_N[node] == pytest.approx(float(parent * probs_V[text[-1]]), abs=1e-12)
        assert probs_V.sum() + stop == pytest.approx(1, abs=1e-12)


def test_float32_frames_give_an_exact_distribution():
    log_probs_TC = random_frames(0, frames=8, classes=5000).float()
    probs_V, stop = exact_next_label_distribution(log_probs_TC, 4999, [3, 3, 17])
    assert probs_V.shape == (4999,)
    assert probs_V.sum() + stop == pytest.approx(1, abs=1e-12)
