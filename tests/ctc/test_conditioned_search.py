"""Prefix search over label-conditioned frames against every alignment, and against the likelihoods of training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from truths import beginnings, slow_best, slow_collapse, slow_tree_from_paths, texts_of
from truths_heads import slow_conditioned_texts, slow_products
from truths_trees import texts

from ctcdraft.ctc.conditioned_search import conditioned_prefix_search
from ctcdraft.ctc.forward import likelihoods
from ctcdraft.ctc.prefix_search import prefix_search
from ctcdraft.drafters.trees.ctc import Collapse, PrefixSearch, rank_sequences
from ctcdraft.drafters.trees.per_frame import PerFrameTree, StaticPerFrameTree
from ctcdraft.drafters.trees.request import ConditionedFrames, TreeRequest
from ctcdraft.nn.heads import BlankHead, Emissions
from ctcdraft.nn.logit_correction import GRUCorrection, LogitCorrection, MarkovCorrection

VOCABULARY, WIDTH, RANK = 3, 6, 4
ROOT = torch.tensor(1)


def correction(kind: type[LogitCorrection], strength: float = 1.0, vocabulary: int = VOCABULARY) -> LogitCorrection:
    torch.manual_seed(3)
    logit_correction = kind(nn.Embedding(vocabulary, WIDTH).requires_grad_(False), RANK, 1e-6).double()
    logit_correction.out.weight.data.normal_(std=strength)
    return logit_correction


def frames(seed: int, count: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, vocabulary + 1, generator=rng, dtype=torch.float64)).log_softmax(-1)


def begin(kind: type[LogitCorrection], log_probs_TC: torch.Tensor, strength: float = 1.0) -> ConditionedFrames:
    logit_correction = correction(kind, strength, log_probs_TC.shape[1] - 1)
    anchor_1D = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None]
    return ConditionedFrames.empty(log_probs_TC, logit_correction, logit_correction.start(anchor_1D, ROOT[None]))


def frame_distribution_of(conditioned: ConditionedFrames):
    """The definition of a conditioned frame: logits plus correction, one softmax over all classes."""

    def distribution(frame, text):
        memory_1R = conditioned.memory_KR
        for token in text:
            memory_1R = conditioned.correction.step(memory_1R, torch.tensor([token]))
        added_V = conditioned.correction(memory_1R)[0]
        return (conditioned.log_probs_TC[frame] + torch.cat([added_V, torch.zeros(1)])).softmax(-1).tolist()

    return distribution


class Forbids:
    """States where after "a" (token 0) only the blank is possible."""

    def __init__(self, last: list[int]) -> None:
        self.last = last

    def extend(self, tokens_K, rows_K):
        return Forbids(tokens_K.tolist())

    def factors(self):
        factor_KW = torch.tensor([[float(last != 0)] * 2 for last in self.last], dtype=torch.float64)
        scale_KT = torch.tensor([[4.0 if last == 0 else 1.0] * 2 for last in self.last], dtype=torch.float64)
        return factor_KW, scale_KT


def test_search_by_hand():
    frames_TC = torch.tensor([[1 / 2, 1 / 4, 1 / 4]] * 2, dtype=torch.float64).log()  # a, b, blank
    prefixes = conditioned_prefix_search(frames_TC, Forbids([-1]), nodes=9)
    assert texts_of(prefixes) == [(0,), (1,), (1, 0)]
    assert prefixes.masses_N.tolist() == pytest.approx([5 / 8, 5 / 16, 1 / 8])


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_prefix_search_sums_every_alignment(kind, seed):
    log_probs_TC = frames(seed, 1 + seed % 5)
    conditioned = begin(kind, log_probs_TC)
    masses = slow_conditioned_texts(
        frame_distribution_of(conditioned), len(log_probs_TC), VOCABULARY + 1, blank=VOCABULARY
    )
    assert sum(masses.values()) == pytest.approx(1)
    for nodes, stops, depth in [(1, (), 99), (9, (), 99), (300, (), 99), (30, (0,), 99), (30, (), 2)]:
        prefixes = conditioned_prefix_search(log_probs_TC, conditioned, nodes, stops, depth)
        truth = slow_best(beginnings(masses), nodes, stops, depth)
        assert texts_of(prefixes) == [text for text, _ in truth]
        assert prefixes.masses_N.tolist() == pytest.approx([mass for _, mass in truth], abs=1e-10)


@torch.no_grad()
def test_a_token_improbable_in_every_frame_alone_is_found():
    """Token 40 of 50 is in no frame's best sixteen, but the only probable one after the most probable token."""
    log_probs_TC = torch.linspace(0, -20, 51, dtype=torch.float64).repeat(3, 1).log_softmax(-1)
    conditioned = begin(MarkovCorrection, log_probs_TC, strength=0.0)
    conditioned.correction.out.weight[40] = (
        30 * conditioned.correction.step(conditioned.memory_KR, torch.tensor([0]))[0]
    )
    assert (0, 40) in texts_of(conditioned_prefix_search(log_probs_TC, conditioned, nodes=6))


@torch.no_grad()
def test_a_zero_correction_changes_nothing():
    log_probs_TC = frames(2, 5)
    plain = prefix_search(log_probs_TC, VOCABULARY, 20, VOCABULARY)
    zero = conditioned_prefix_search(log_probs_TC, begin(MarkovCorrection, log_probs_TC, strength=0.0), 20)
    assert texts_of(plain) == texts_of(zero)
    torch.testing.assert_close(plain.masses_N, zero.masses_N, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 60])
@torch.no_grad()
def test_per_frame_trees_hold_the_best_products(kind, nodes):
    log_probs_TC = frames(5, 3)
    conditioned = begin(kind, log_probs_TC, strength=2.0)

    def distribution(frame, text):
        probs = frame_distribution_of(conditioned)(frame, text)[:VOCABULARY]
        return [p / sum(probs) for p in probs]

    masses = slow_products(distribution, 3, VOCABULARY)
    tree = PerFrameTree(None)(log_probs_TC, TreeRequest(ROOT, 3, nodes), conditioned)
    assert set(texts(tree)) == set(sorted(masses, key=lambda text: -masses[text])[: nodes - 1])


@torch.no_grad()
def test_fixed_ranks_are_conditioned_on_their_own_path():
    """Rank by rank: the raw classes of the collapsed tree, and the tokens of the sparse one."""
    log_probs_TC = frames(7, 4)
    conditioned = begin(GRUCorrection, log_probs_TC, strength=2.0)
    distribution = frame_distribution_of(conditioned)
    paths = []
    for ranks in rank_sequences(4, 3, 12, 0.4, torch.device("cpu")).tolist():
        classes: list[int] = []
        for frame, rank in enumerate(ranks):
            probs = distribution(frame, slow_collapse(classes, VOCABULARY))
            classes.append(sorted(range(VOCABULARY + 1), key=lambda c: -probs[c])[rank])
        paths.append(slow_collapse(classes, VOCABULARY))
    tree = Collapse(12, 3, 0.4)(log_probs_TC, TreeRequest(ROOT, 4, 20), conditioned)
    tokens, parents = slow_tree_from_paths(1, paths, [len(path) for path in paths], 20)
    assert (tree.tokens_N.tolist(), tree.parents_N.tolist()) == (tokens, parents)

    sparse = StaticPerFrameTree([[0], [1], [0, 0], [1, 1], [0, 0, 1]])
    tree = sparse(log_probs_TC, TreeRequest(ROOT, 4, 9), conditioned)
    for choice, text in zip(sparse.step_tree.choices, texts(tree), strict=True):
        probs = distribution(len(choice) - 1, text[:-1])[:VOCABULARY]
        assert text[-1] == sorted(range(VOCABULARY), key=lambda c: -probs[c])[choice[-1]]


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@torch.no_grad()
def test_training_scores_the_distribution_that_decoding_searches(kind):
    """Emissions -> scores -> likelihoods give every prefix the mass that the search over the same frames gives it."""
    torch.manual_seed(0)
    head = BlankHead(nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False), WIDTH).double()
    logit_correction = correction(kind)
    anchor_11D = torch.linspace(-1, 1, WIDTH, dtype=torch.float64).view(1, 1, -1)
    emissions = Emissions(
        torch.randn(1, 1, 4, WIDTH, dtype=torch.float64),
        head,
        logit_correction,
        logit_correction.start(anchor_11D, ROOT.view(1, 1)),
    )
    log_probs_TC = emissions.logits()[0, 0].log_softmax(-1)
    prefixes = conditioned_prefix_search(
        log_probs_TC, ConditionedFrames.empty(log_probs_TC, logit_correction, emissions.start_BAR[0]), 200
    )
    masses = dict(zip(texts_of(prefixes), prefixes.masses_N.tolist(), strict=True))
    assert len(masses) > 50
    for text, mass in masses.items():
        labels_BAS, lengths_BA = torch.tensor(text).view(1, 1, -1), torch.tensor([[len(text)]])
        scores = emissions.scores(labels_BAS)
        prefix = likelihoods(scores.label_BATS, scores.hold_BATS, scores.blank_BATP, labels_BAS, lengths_BA).prefix_XS
        assert prefix[0, 0, -1].exp().item() == pytest.approx(mass, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
@torch.no_grad()
def test_every_tree_is_distinct_and_ends_at_stops(seed):
    log_probs_TC = frames(seed, 5, vocabulary=6)
    conditioned = begin(GRUCorrection, log_probs_TC)
    for paths in (
        PrefixSearch(4),
        Collapse(20, 4, 0.4),
        PerFrameTree(None),
        StaticPerFrameTree([[0], [1], [0, 0], [0, 1]]),
    ):
        tree = paths(log_probs_TC, TreeRequest(ROOT, 4, 9, (2, 4)), conditioned)
        assert 6 not in tree.tokens_N.tolist()
        below_stop = torch.isin(tree.parents_N[1:], torch.isin(tree.tokens_N[1:], torch.tensor([2, 4])).nonzero() + 1)
        assert not below_stop.any()
        siblings = list(zip(tree.parents_N.tolist(), tree.tokens_N.tolist(), strict=True))
        assert len(set(siblings)) == len(siblings) > 1
