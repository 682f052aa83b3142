"""Trees of CTC frames: no blank, no unmerged repeat, nothing below a stop token, the most probable paths first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from sequential_parts import make_sequential_drafter
from tiny_models import random_base
from training_parts import block_head
from truths import beginnings, slow_collapse
from truths_heads import independent, slow_conditioned_texts, slow_transduce
from truths_trees import texts

from ctcdraft.decoding.tree import PADDING
from ctcdraft.drafters.trees.ctc import (
    Collapse,
    PrefixSearch,
    TransducerSearch,
    rank_sequences,
)
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.drafters.trees.per_frame import PerFrameStepFunction, likely_choices
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.drafters.trees.sampled import SampledChains
from ctcdraft.errors import InputError
from ctcdraft.nn.bodies import ResidualBody

BLANK, STOP = 6, 4


def frames(seed: int, count: int = 5) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, BLANK + 1, generator=rng)).log_softmax(-1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("frame_tree", [PrefixSearch(6), Collapse(30, 4, 0.4)], ids=lambda tree: type(tree).__name__)
def test_every_tree_is_a_tree_of_tokens(frame_tree, seed):
    tree = frame_tree(frames(seed), TreeRequest(torch.tensor(1), 4, 10, (STOP,)))
    assert 1 < len(tree) <= 10
    assert tree.tokens_N[0] == 1
    assert BLANK not in tree.tokens_N.tolist()
    assert tree.depths_N.max() <= 4
    assert not torch.isin(tree.parents_N[1:], (tree.tokens_N[1:] == STOP).nonzero() + 1).any()  # nothing below a stop
    siblings = list(zip(tree.parents_N.tolist(), tree.tokens_N.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)


@pytest.mark.parametrize("nodes", [5, 30, 200])
@pytest.mark.parametrize(
    ("search", "reading"), [(PrefixSearch(6), slow_collapse), (TransducerSearch(), slow_transduce)]
)
def test_path_probabilities_are_the_masses_of_the_texts(search, reading, nodes):
    """By any search, and those of at least min_path_prob are the beginning of the tree."""
    log_probs_TC = frames(3, 4).double().log_softmax(-1)
    distribution = independent(log_probs_TC.exp().tolist())
    masses = beginnings(slow_conditioned_texts(distribution, 4, BLANK + 1, BLANK, lambda *x: tuple(reading(*x))))
    tree = search(log_probs_TC, TreeRequest(torch.tensor(1), 4, nodes))
    path_probs = [masses[text] for text in texts(tree)]
    assert tree.path_probs_N.tolist() == pytest.approx([1.0, *path_probs])
    probable = search(log_probs_TC, TreeRequest(torch.tensor(1), 4, nodes, min_path_prob=path_probs[2] * (1 - 1e-6)))
    assert probable.tokens_N.tolist() == tree.tokens_N[:4].tolist()
    assert probable.parents_N.tolist() == tree.parents_N[:4].tolist()


def test_stop_tokens_occur_in_these_trees():
    trees = [PrefixSearch(6)(frames(seed), TreeRequest(torch.tensor(1), 4, 10, (STOP,))) for seed in range(20)]
    free = [PrefixSearch(6)(frames(seed), TreeRequest(torch.tensor(1), 4, 10)) for seed in range(20)]
    assert any(STOP in tree.tokens_N[1:].tolist() for tree in trees)
    assert any(tree.parents_N.tolist() != other.parents_N.tolist() for tree, other in zip(trees, free, strict=True))


def test_certain_frames_give_their_text():
    classes = [2, 2, BLANK, 2, 5]  # collapses to 2 2 5: repeats merge unless a blank separates them
    sure = torch.full((5, BLANK + 1), -20.0)
    sure[torch.arange(5), torch.tensor(classes)] = 0.0
    for frame_tree in (PrefixSearch(6), Collapse(10, 3, 0.4)):
        tree = frame_tree(sure.log_softmax(-1), TreeRequest(torch.tensor(1), 5, 4, (STOP,)))
        assert tree.tokens_N.tolist() == [1, 2, 2, 5]
        assert tree.parents_N.tolist() == [-1, 0, 1, 2]


def same(one, other) -> bool:
    return torch.equal(one.tokens_N, other.tokens_N) and torch.equal(one.parents_N, other.parents_N)


def test_padded_trees_are_the_same_trees_filled_up():
    """Of all builders, with fewer possible nodes than asked for, and with nothing below a stop token."""
    for seed, depth, nodes in product(range(10), (2, 5), (7, 40, 90)):
        request = TreeRequest(torch.tensor(1), depth, nodes, (STOP, 3))
        for builder in (PrefixSearch(2), PrefixSearch(4), TransducerSearch(), Collapse(30, 3, 0.4)):
            plain, padded = (builder(frames(seed), one) for one in (request, replace(request, padded=True)))
            real_N = padded.tokens_N != PADDING
            assert (padded.parents_N[~real_N] == 0).all()
            assert paths(plain.tokens_N, plain.parents_N) == paths(padded.tokens_N, padded.parents_N)
            assert int(real_N.sum()) == len(plain)


def paths(tokens_N, parents_N) -> set[tuple[int, ...]]:
    """Return the texts from the root to every node but padding."""
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(tokens_N.tolist(), parents_N.tolist(), strict=True):
        texts.append((*(texts[parent] if parent >= 0 else ()), token))
    return {text for text in texts if PADDING not in text}


@pytest.mark.parametrize("tree", [DynamicTree(1, 1), SampledChains(1)], ids=lambda tree: type(tree).__name__)
def test_a_tree_of_the_other_kind_is_refused(tree, tmp_path):
    base = random_base()
    with pytest.raises(InputError, match=rf"ParallelDrafter computes all frames at once, and {type(tree).__name__}"):
        block_head(base, partial(ResidualBody, blocks=1), tree)
    with pytest.raises(InputError, match=r"Eagle computes step by step, and PrefixSearch .* for example dynamic"):
        make_sequential_drafter("eagle", base, tmp_path, tree=PrefixSearch(4))


def test_without_room_the_tree_is_the_root():
    for frame_tree in (PrefixSearch(6), Collapse(10, 3, 0.4)):
        assert len(frame_tree(frames(0), TreeRequest(torch.tensor(1), 0, 8))) == 1


def test_rank_sequences_begin_with_the_best_of_every_frame():
    assert rank_sequences(2, 3, 4, 0.35, torch.device("cpu")).tolist() == [[0, 0], [1, 0], [0, 1], [2, 0]]
    many = rank_sequences(4, 3, 50, 0.35, torch.device("cpu")).tolist()
    assert len({tuple(row) for row in many}) == 50
    assert [sum(row) for row in many] == sorted(sum(row) for row in many)


@pytest.mark.parametrize("values", [(0, 10, 0.35), (42, 0, 0.35), (42, 10, 0.0), (42, 10, 1.5), (42, 10, "abc")])
def test_impossible_raw_paths_are_refused(values):
    with pytest.raises(InputError, match=r"drafter\.tree\.r"):
        Collapse(*values)


@pytest.mark.parametrize("values", [(0.0, 0.3, 0.9), (1.0, 0.3, 0.9), (0.6, 0.0, 0.9), (0.6, 0.3, 1.1)])
def test_impossible_probabilities_of_choices_are_refused(values):
    with pytest.raises(InputError, match="0 < first < 1"):
        likely_choices(5, 4, 3, *values)


def test_a_frame_has_one_row_per_text():
    """Also where the rows are equal, because there is no logit correction."""
    step_function = PerFrameStepFunction(torch.randn(3, 7).log_softmax(-1), None)
    assert step_function(torch.tensor([1]), torch.tensor([0])).shape == (1, 6)
    assert step_function(torch.tensor([2, 3]), torch.tensor([0, 0])).shape == (2, 6)
