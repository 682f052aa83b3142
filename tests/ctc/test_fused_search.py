"""Fused searches under Triton's interpreter against the searches in PyTorch: the same nodes in the same order."""

from __future__ import annotations

import pytest
import torch
from fused_parts import SEEDS, count_kernels, count_launches, needs_triton, random_integer

from ctcdraft.ctc.prefix_search import drop_improbable, fused_prefix_search, prefix_search

NO_STOPS = torch.tensor([], dtype=torch.int64)


def random_frames(rng: torch.Generator, count: int, classes: int, ties: bool = True) -> torch.Tensor:
    """Return flat or sharp frames; in some of them many are impossible, and with `ties` many tie exactly."""
    scales = (0.0, 1.0, 3.0, 8.0) if ties else (1.0, 2.0, 3.0, 8.0)
    logits_TC = scales[random_integer(rng, 0, 3)] * torch.randn(count, classes, generator=rng)
    if random_integer(rng, 0, 2) == 0 and ties:
        logits_TC = (4 * logits_TC.softmax(-1)).round().clamp(min=2**-40).log()
    if random_integer(rng, 0, 3) == 0:
        impossible_TC = torch.rand(count, classes, generator=rng) < 0.6
        impossible_TC[:, random_integer(rng, 0, classes - 1)] = False
        logits_TC = logits_TC.masked_fill(impossible_TC, -torch.inf)
    return logits_TC.log_softmax(-1)


def assert_same(ranked, nodes, expected):
    assert [len(column_N) for column_N in ranked] == [nodes] * 3
    found = drop_improbable(ranked)
    assert not ranked[2][len(found.masses_N) :].any()
    assert found.tokens_N.tolist() == expected.tokens_N.tolist()
    assert found.parents_N.tolist() == expected.parents_N.tolist()
    torch.testing.assert_close(found.masses_N, expected.masses_N, rtol=1e-12, atol=0)


def check_random_prefix_search(seed: int) -> None:
    """Everything that is possible at most once in ten cases; smaller ones in the rest."""
    rng = torch.Generator().manual_seed(seed)
    largest = (32, 64, 64) if seed % 10 == 0 else (10, 24, 16)
    count, nodes, tokens_per_frame = (random_integer(rng, 1, most) for most in largest)
    classes = random_integer(rng, *((2, 5), (2, 40), (40, 300))[random_integer(rng, 0, 2)])
    log_probs_TC, blank = random_frames(rng, count, classes), random_integer(rng, 0, classes - 1)
    stops_S = torch.randint(0, classes, (random_integer(rng, 0, 4),), generator=rng)
    depth = random_integer(rng, 0, count + 1)
    min_mass = (0.0, 0.0, 0.01)[random_integer(rng, 0, 2)]
    limits = blank, nodes, tokens_per_frame
    ranked = fused_prefix_search.launch(log_probs_TC, *limits, stops_S, depth, min_mass)
    assert_same(ranked, nodes, prefix_search(log_probs_TC, *limits, stops_S.tolist(), depth, min_mass))


@pytest.mark.parametrize("seed", range(40))
def test_frames_without_ties_have_none_among_the_likely_tokens(seed):
    log_probs_TC = random_frames(torch.Generator().manual_seed(seed), 16, (40, 300, 32001)[seed % 3], ties=False)
    ranked_TK = log_probs_TC.topk(34).values
    assert ((ranked_TK[:, 1:] < ranked_TK[:, :-1]) | (ranked_TK[:, 1:] == -torch.inf)).all()


@needs_triton
def test_prefix_search_by_hand():
    example_TC = torch.tensor([[1 / 2, 1 / 4, 1 / 4]] * 2).log()  # a, b, blank
    tokens_N, parents_N, masses_N = fused_prefix_search.launch(example_TC, 2, 3, 2, NO_STOPS, 2, 0.0)
    assert (tokens_N.tolist(), parents_N.tolist()) == ([0, 1, 1], [-1, -1, 0])
    assert masses_N.tolist() == pytest.approx([5 / 8, 5 / 16, 1 / 8])
    after_stop = fused_prefix_search.launch(example_TC, 2, 6, 2, torch.tensor([0]), 2, 0.0)
    assert (after_stop[0][:3].tolist(), after_stop[1].tolist()) == ([0, 1, 0], [-1, -1, 1, -1, -1, -1])


@needs_triton
@SEEDS
def test_prefix_search_finds_what_the_reference_finds(seeds):
    for seed in seeds:
        check_random_prefix_search(seed)


@needs_triton
def test_equal_but_for_rounding_is_equal():
    """a: k/60 at once, or a blank and then surely a, 1/2 in all; b: 1/2. The smaller id wins every time."""
    for k in range(1, 30):
        log_probs_TC = torch.tensor([[k / 60, 1 / 2, 1 / 2 - k / 60], [1, 0, 0]], dtype=torch.float64).log()
        tokens_N, parents_N, _ = fused_prefix_search.launch(log_probs_TC, 2, 2, 2, NO_STOPS, 2, 0.0)
        assert (tokens_N.tolist(), parents_N.tolist()) == ([0, 1], [-1, -1])


@needs_triton
def test_rounding_lifts_no_child_above_its_parent():
    """Two frames are a or blank, the third b: "a b" is exactly as likely as "a", by a different sum."""
    for k in range(1, 60):
        first_TC = torch.tensor([[k / 61, 0, 1 - k / 61]] * 2 + [[0, 1, 0]], dtype=torch.float64).log()
        tokens_N, parents_N, masses_N = fused_prefix_search.launch(first_TC, 2, 3, 2, NO_STOPS, 3, 0.0)
        by_text = {(t, p): m for t, p, m in zip(tokens_N.tolist(), parents_N.tolist(), masses_N.tolist(), strict=True)}
        a = tokens_N.tolist().index(0)
        assert by_text[1, a] <= by_text[0, -1]


@pytest.mark.parametrize("tokens_per_frame", [1, 8])
def test_without_triton_the_search_by_levels_gives_as_many_nodes(tokens_per_frame):
    log_probs_TC = random_frames(torch.Generator().manual_seed(0), 2, 9)
    ranked = fused_prefix_search(log_probs_TC, 3, 40, tokens_per_frame, NO_STOPS, 2, 0.01)
    assert_same(ranked, 40, prefix_search(log_probs_TC, 3, 40, tokens_per_frame, (), 2, 0.01))


@needs_triton
def test_two_launches_do_the_prefix_search():
    """A topk and one kernel, in place of the operations of the search by levels."""
    log_probs_TC = random_frames(torch.Generator().manual_seed(0), 6, 300)
    arguments = log_probs_TC, 299, 15, 16, NO_STOPS, 6, 0.0
    assert count_kernels(lambda: fused_prefix_search.launch(*arguments)) == fused_prefix_search.launches
    assert count_launches(lambda: fused_prefix_search.definition(*arguments)) > 90


@needs_triton
def test_what_the_kernel_cannot_rank_is_refused():
    sure_TC = torch.zeros(2, 3).log_softmax(-1)
    with pytest.raises(ValueError, match="blank is class 3, but the frames have classes 0 to 2"):
        fused_prefix_search.launch(sure_TC, 3, 4, 2, NO_STOPS, 2, 0.0)
    with pytest.raises(ValueError, match="tokens_per_frame must be >= 1, got 0"):
        fused_prefix_search.launch(sure_TC, 2, 4, 0, NO_STOPS, 2, 0.0)
    with pytest.raises(ValueError, match="3 classes or 2000000 nodes of 2 levels are more than 16777216"):
        fused_prefix_search.launch(sure_TC, 2, 2_000_000, 2, NO_STOPS, 2, 0.0)
