"""The compiled search of per-frame trees: every text enumerated, and the tree that tensor operations build."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from truths_heads import slow_products
from truths_trees import texts

from ctcdraft.ctc.best_first import MAX_BEST_FIRST_NODES
from ctcdraft.drafters.trees import per_frame
from ctcdraft.drafters.trees.dynamic import build_dynamic_tree
from ctcdraft.drafters.trees.per_frame import PerFrameStepFunction, PerFrameTree, compiled_per_frame_search
from ctcdraft.drafters.trees.request import ConditionedFrames, TreeRequest
from ctcdraft.nn.frame_correction import FrameGRUCorrection
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.nn.weight_layout import to_column_major_

WIDTH, RANK = 6, 5
ROOT = torch.tensor(1)
CORRECTIONS = {
    "none": None,
    "markov": MarkovCorrection,
    "own_markov": partial(MarkovCorrection, own_embedding=True),
    "gru": GRUCorrection,
    "frame_gru": partial(FrameGRUCorrection, memory=4, uncorrected=1),
}


def given_frames(kind: str, seed: int, count: int, vocabulary: int) -> tuple[torch.Tensor, ConditionedFrames | None]:
    torch.manual_seed(seed)
    log_probs_TC = (2 * torch.randn(count, vocabulary + 1)).log_softmax(-1)
    if (make := CORRECTIONS[kind]) is None:
        return log_probs_TC, None
    correction = make(nn.Embedding(vocabulary, WIDTH).requires_grad_(False), RANK, 1e-6)
    for weight in correction.parameters():
        nn.init.normal_(weight)
    to_column_major_(correction.eval())
    memory_1R = correction.start(torch.randn(1, WIDTH), ROOT[None], torch.randn(1, count, WIDTH))
    return log_probs_TC, ConditionedFrames.empty(log_probs_TC, correction, memory_1R)


def next_token_probs(log_probs_TC, conditioned):
    """The definition: the frame's logits and the correction of all tokens before, one softmax over the tokens."""

    def probs(frame, text):
        logits_V = log_probs_TC[frame, :-1]
        if conditioned is not None:
            memory_1R = conditioned.memory_KR
            for token in text:
                memory_1R = conditioned.correction.step(memory_1R, torch.tensor([token]))
            logits_V = logits_V + conditioned.correction(memory_1R)[0]
        return logits_V.double().softmax(-1).tolist()

    return probs


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_every_text(kind, seed):
    log_probs_TC, conditioned = given_frames(kind, seed, 3, 4)
    masses = slow_products(next_token_probs(log_probs_TC, conditioned), 3, 4)
    best = sorted(masses, key=lambda text: -masses[text])
    limits = [(2, 3, (), 0.0), (9, 3, (), 0.0), (60, 3, (), 0.0), (30, 2, (0,), 0.0), (30, 3, (), 0.02)]
    for nodes, depth, stops, least in limits:
        request = TreeRequest(ROOT, depth, nodes, stops, min_path_prob=least)
        found = [
            text for text in best
            if len(text) <= depth and masses[text] >= least and not {*text[:-1]} & {*stops}
        ][: nodes - 1]  # fmt: skip
        assert compiled_per_frame_search(log_probs_TC, conditioned, request) is not None
        tree = PerFrameTree(None)(log_probs_TC, request, conditioned)
        assert texts(tree) == found  # no two probabilities are equal
        assert tree.path_probs_N.tolist() == pytest.approx([1.0, *(masses[text] for text in found)], rel=1e-5)
        assert tree.height == max(map(len, found))


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_what_tensor_operations_find(kind, seed):
    log_probs_TC, conditioned = given_frames(kind, seed, 1 + 2 * seed, (3, 60, 500)[seed % 3])
    for nodes, depth, stops in [(1, 9, ()), (16, 99, ()), (MAX_BEST_FIRST_NODES, 4, (1, 2)), (9, 0, ())]:
        request = TreeRequest(ROOT, min(depth, len(log_probs_TC)), nodes, stops)
        step_function = PerFrameStepFunction(log_probs_TC, conditioned)
        by_levels = build_dynamic_tree(step_function, request, nodes, nodes)
        tokens, parents, masses = compiled_per_frame_search(log_probs_TC, conditioned, request)
        assert tokens == by_levels.tokens_N[1:].tolist()
        assert [parent + 1 for parent in parents] == by_levels.parents_N[1:].tolist()
        assert masses == pytest.approx(by_levels.path_probs_N[1:].tolist() if masses else [], rel=1e-4)


@torch.no_grad()
def test_of_texts_that_tie_the_most_probable_are_found():
    """Frames of quarters, many of them zero: the masses are the largest ones, and no text is impossible."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(40):
        cuts_TC = torch.multinomial(torch.ones(3, 4), 4, replacement=True, generator=rng)
        probs_TV = torch.stack([(cuts_TC == token).sum(1) / 4 for token in range(4)], dim=1)
        log_probs_TC = torch.cat([probs_TV.log(), torch.full((3, 1), -torch.inf)], dim=1)
        masses = slow_products(lambda frame, text, probs=probs_TV: probs[frame].tolist(), 3, 4)
        for nodes in (2, 5, 12, 60):
            tree = PerFrameTree(None)(log_probs_TC, TreeRequest(ROOT, 3, nodes))
            truth = sorted((mass for mass in masses.values() if mass > 0), reverse=True)[: nodes - 1]
            assert sorted((masses[text] for text in texts(tree)), reverse=True) == pytest.approx(truth)
            assert len({*texts(tree)}) == len(texts(tree))


def test_a_frame_whose_blank_is_certain_still_gives_tokens():
    """The blank is shared out to the tokens, which are 110 nats below it; and frames may have gradients."""
    logits_TC = torch.tensor([[0.0, 1, 2, 3, 110], [3.0, 2, 1, 0, 110]], requires_grad=True)
    tree = PerFrameTree(None)(logits_TC.log_softmax(-1), TreeRequest(ROOT, 2, 4))
    assert tree.tokens_N.tolist() == [1, 3, 0, 2]


@torch.no_grad()
def test_a_large_gru_is_left_to_tensor_operations(monkeypatch):
    conditioned = given_frames("frame_gru", 0, 3, 4)[1]
    assert conditioned.correction.arrays() is not None
    monkeypatch.setattr("ctcdraft.nn.frame_correction.MAX_WEIGHTS", 3 * 4 * 4 - 1)  # of recurrent weights
    assert conditioned.correction.arrays() is None


@pytest.mark.parametrize("kind", CORRECTIONS)
@torch.no_grad()
def test_otherwise_tensor_operations_build_the_tree(kind, monkeypatch):
    log_probs_TC, conditioned = given_frames(kind, 0, 4, 30)
    request = TreeRequest(ROOT, 4, 9, (2,))
    compiled = PerFrameTree(None)(log_probs_TC, request, conditioned)
    too_many = TreeRequest(ROOT, 4, MAX_BEST_FIRST_NODES + 1)
    assert compiled_per_frame_search(log_probs_TC, conditioned, too_many) is None
    assert compiled_per_frame_search(log_probs_TC.double(), conditioned, request) is None
    assert compiled_per_frame_search(log_probs_TC, conditioned, TreeRequest(ROOT, 4, 9, padded=True)) is None
    if conditioned is not None:
        assert (conditioned.arrays() is None) == (kind == "frame_gru")  # of a search of alignments
        with torch.enable_grad():  # weights that are trained may change without notice
            assert compiled_per_frame_search(log_probs_TC, conditioned, request) is None
    monkeypatch.setattr(per_frame, "load_kernels", lambda module: None)
    assert compiled_per_frame_search(log_probs_TC, conditioned, request) is None
    tree = PerFrameTree(None)(log_probs_TC, request, conditioned)
    assert torch.equal(tree.tokens_N, compiled.tokens_N)
    assert torch.equal(tree.parents_N, compiled.parents_N)
    torch.testing.assert_close(tree.path_probs_N.double(), compiled.path_probs_N, rtol=1e-5, atol=0)
