"""Per-frame trees: the n best products by enumeration, static trees by hand, nothing below a stop token."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_models import random_base
from truths_heads import independent, slow_products
from truths_trees import texts

from ctcdraft.drafters.trees.per_frame import PerFrameTree, StaticPerFrameTree, likely_choices
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.errors import InputError
from ctcdraft.nn.block_config import BlockConfig
from ctcdraft.nn.bodies import FeedForwardBody, ResidualBody

ROOT = torch.tensor(1)


def frames(seed: int, count: int = 3, vocabulary: int = 4) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, vocabulary + 1, generator=rng)).log_softmax(-1)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("nodes", [2, 7, 30, 200])
def test_a_per_frame_tree_holds_exactly_the_best_products(seed, nodes):
    """The blank's probability is shared out to the tokens; every text among the n best is in the tree once."""
    log_probs_TC = frames(seed)
    probs_TV = log_probs_TC[:, :-1].softmax(-1).double().tolist()
    masses = slow_products(independent(probs_TV), 3, 4)
    best = sorted(masses, key=lambda text: -masses[text])[: nodes - 1]
    tree = PerFrameTree(None)(log_probs_TC, TreeRequest(ROOT, 3, nodes))
    assert tree.path_probs_N.tolist() == pytest.approx([1.0, *(masses[text] for text in texts(tree))], rel=1e-5)
    assert sorted(texts(tree)) == sorted(best)


def test_one_child_per_node_is_the_chain_of_best_tokens():
    log_probs_TC = frames(0)
    tree = PerFrameTree(1)(log_probs_TC, TreeRequest(ROOT, 3, 9))
    assert tree.tokens_N.tolist() == [1, *log_probs_TC[:, :-1].argmax(-1).tolist()]
    assert tree.parents_N.tolist() == [-1, 0, 1, 2]


def test_the_sparse_tree_by_hand():
    """Ranks of the two frames: 2 0 1 and 1 2 0; the blank is best everywhere and never in the tree."""
    log_probs_TC = torch.tensor([[0.1, 0.0, 0.3, 9.0], [0.2, 0.5, 0.3, 9.0]])
    sparse = StaticPerFrameTree([[0], [1], [0, 0], [0, 2], [1, 1]])
    tree = sparse(log_probs_TC, TreeRequest(ROOT, 2, 6))
    assert tree.tokens_N.tolist() == [1, 2, 0, 1, 0, 2]
    assert tree.parents_N.tolist() == [-1, 0, 0, 1, 1, 2]
    assert tree.depths_N.tolist() == [0, 1, 1, 2, 2, 2]
    small = sparse(log_probs_TC, TreeRequest(ROOT, 1, 6))
    assert small.tokens_N.tolist() == [1, 2, 0]  # choices that are too deep leave room for others
    assert sparse(log_probs_TC, TreeRequest(ROOT, 2, 3)).tokens_N.tolist() == [1, 2, 0]
    assert sparse(log_probs_TC, TreeRequest(ROOT, 2, 6, (2,))).tokens_N.tolist() == [1, 2, 0, 2]
    assert len(sparse(log_probs_TC, TreeRequest(ROOT, 0, 6))) == 1
    assert len(sparse(log_probs_TC, TreeRequest(torch.tensor(2), 2, 6, (2,)))) == 4  # the root may be a stop token


def test_medusas_buffers_for_a_small_tree():
    """What the published code calls tree indices, positions and mask, for choices 0 / 0 0 / 0 1 / 1, top two ranks."""
    log_probs_TC = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4, 0.0]]).log_softmax(-1)
    tree = StaticPerFrameTree([[0], [1], [0, 0], [0, 1]])(log_probs_TC, TreeRequest(ROOT, 2, 9))
    assert tree.tokens_N.tolist() == [1, 0, 1, 3, 2]
    assert tree.depths_N.tolist() == [0, 1, 1, 2, 2]
    assert tree.ancestors_NN.int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 0, 1]
    ]  # fmt: skip


def test_likely_choices_are_the_greatest_products():
    chosen = likely_choices(12, frames=3, ranks=4, first=0.6, rank_decay=0.35, frame_decay=0.9)
    assert chosen[:5] == [[0], [0, 0], [1], [0, 0, 0], [0, 1]]

    def product(choice):
        probability = 1.0
        for frame, rank in enumerate(choice):
            probability *= 0.6 * 0.35**rank * 0.9**frame
        return probability

    every = [choice for size in (1, 2, 3) for choice in itertools.product(range(4), repeat=size)]
    best = sorted((product(choice) for choice in every), reverse=True)[:12]
    assert [product(choice) for choice in chosen] == pytest.approx(best)
    StaticPerFrameTree(chosen)  # every choice comes after the one it continues


def test_a_choice_without_the_one_it_continues_is_refused():
    with pytest.raises(InputError, match=r"\[0, 0\] before the choice that it continues"):
        StaticPerFrameTree([[1], [0, 0], [0]])
    with pytest.raises(InputError, match=r"ranks >= 0, got \[-1\]"):
        StaticPerFrameTree([[-1]])


@pytest.mark.parametrize("body", ["residual", "feed_forward"])
def test_anchor_bodies_start_as_the_identity_and_every_part_learns(body):
    base = random_base()
    shape = BlockConfig.of(base.lm.config, base.context_length)
    made = ResidualBody(shape, 3, blocks=2) if body == "residual" else FeedForwardBody(shape, 3, inner=16)
    anchor_BAD = torch.randn(2, 4, shape.width)
    states_BATD = made(anchor_BAD=anchor_BAD)
    assert torch.equal(states_BATD, anchor_BAD[:, :, None].expand(-1, -1, 3, -1))
    optimiser = torch.optim.SGD(made.parameters(), lr=0.1)
    for _ in range(2):  # what is multiplied by a zero has a gradient from the second step on
        optimiser.zero_grad()
        (made(anchor_BAD=anchor_BAD) * torch.randn(states_BATD.shape)).sum().backward()
        optimiser.step()
    assert all((parameter.grad != 0).any() for parameter in made.parameters())
    states_BATF = made(anchor_BAD=anchor_BAD)
    assert not torch.allclose(states_BATF[:, :, 0], states_BATF[:, :, 1])  # each frame has weights of its own
