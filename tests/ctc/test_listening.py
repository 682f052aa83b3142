"""Prefix search over frames that listen to the text, against every alignment; and the law of training is its law."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from truths import slow_collapse
from truths_heads import beginnings, slow_best, slow_conditioned_texts, slow_products

from ctcdraft.ctc.conditioned_search import conditioned_prefix_search
from ctcdraft.ctc.forward import likelihoods
from ctcdraft.ctc.prefix_search import prefix_search
from ctcdraft.drafters.conditioning import ConditionedFrames
from ctcdraft.drafters.trees.ctc import Collapse, PrefixSearch
from ctcdraft.drafters.trees.dynamic import build_dynamic_tree
from ctcdraft.drafters.trees.per_frame import PerFrameStepFunction, PerFrameTree, StaticPerFrameTree
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.nn.heads import BlankHead, Emissions
from ctcdraft.nn.logit_correction import GRUCorrection, LogitCorrection, MarkovCorrection

WORDS, WIDTH, RANK = 3, 6, 4
ROOT = torch.tensor(1)


def correction(kind: type[LogitCorrection], strength: float = 1.0, words: int = WORDS) -> LogitCorrection:
    torch.manual_seed(3)
    made = kind(nn.Embedding(words, WIDTH).requires_grad_(False), RANK, 1e-6).double()
    made.out.weight.data.normal_(std=strength)
    return made


def frames(seed: int, count: int, words: int = WORDS) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, words + 1, generator=rng, dtype=torch.float64)).log_softmax(-1)


def begin(kind: type[LogitCorrection], log_probs_TC: torch.Tensor, strength: float = 1.0) -> ConditionedFrames:
    made = correction(kind, strength, log_probs_TC.shape[1] - 1)
    anchor_1D = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None]
    return ConditionedFrames.empty(log_probs_TC, made, made.start(anchor_1D, ROOT[None]))


def law_of(listening: ConditionedFrames):
    """The law by the book: scores plus correction, one softmax over all classes."""

    def law(frame, text):
        memory_1R = listening.memory_KR
        for word in text:
            memory_1R = listening.correction.step(memory_1R, torch.tensor([word]))
        added_V = listening.correction(memory_1R)[0]
        return (listening.log_probs_TC[frame] + torch.cat([added_V, torch.zeros(1)])).softmax(-1).tolist()

    return law


def texts_of(found) -> list[tuple[int, ...]]:
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens_N.tolist(), found.parents_N.tolist(), strict=True):
        texts.append(((*texts[parent], token)) if parent >= 0 else (token,))
    return texts


class Forbids:
    """By pencil: behind "a" (word 0) neither word may follow, so the blank is sure."""

    def __init__(self, last: list[int]) -> None:
        self.last = last

    def extend(self, words_K, rows_K):
        return Forbids(words_K.tolist())

    def concat(self, others):
        return Forbids(self.last + others.last)

    def factors(self):
        factor_KW = torch.tensor([[float(last != 0)] * 2 for last in self.last], dtype=torch.float64)
        scale_KT = torch.tensor([[4.0 if last == 0 else 1.0] * 2 for last in self.last], dtype=torch.float64)
        return factor_KW, scale_KT


def test_listening_by_pencil():
    frames_TC = torch.tensor([[1 / 2, 1 / 4, 1 / 4]] * 2, dtype=torch.float64).log()  # a, b, blank
    found = conditioned_prefix_search(frames_TC, Forbids([-1]), nodes=9)
    assert texts_of(found) == [(0,), (1,), (1, 0)]
    assert found.log_probs_N.exp().tolist() == pytest.approx([5 / 8, 5 / 16, 1 / 8])


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_prefix_search_sums_every_alignment(kind, seed):
    log_probs_TC = frames(seed, 1 + seed % 5)
    listening = begin(kind, log_probs_TC)
    texts = slow_conditioned_texts(law_of(listening), len(log_probs_TC), WORDS + 1, blank=WORDS)
    assert sum(texts.values()) == pytest.approx(1)
    for nodes, stops, depth in [(1, (), 99), (9, (), 99), (300, (), 99), (30, (0,), 99), (30, (), 2)]:
        found = conditioned_prefix_search(log_probs_TC, listening, nodes, stops, depth)
        truth = slow_best(beginnings(texts), nodes, stops, depth)
        assert texts_of(found) == [text for text, _ in truth]
        assert found.log_probs_N.exp().tolist() == pytest.approx([mass for _, mass in truth], abs=1e-10)


@torch.no_grad()
def test_a_word_that_no_frame_likes_by_itself_is_found():
    """Word 40 of 50 is among no frame's best sixteen; behind the likeliest word nothing else may follow."""
    log_probs_TC = torch.linspace(0, -20, 51, dtype=torch.float64).repeat(3, 1).log_softmax(-1)
    listening = begin(MarkovCorrection, log_probs_TC, strength=0.0)
    listening.correction.out.weight[40] = 30 * listening.correction.step(listening.memory_KR, torch.tensor([0]))[0]
    assert (0, 40) in texts_of(conditioned_prefix_search(log_probs_TC, listening, nodes=6))


@torch.no_grad()
def test_a_correction_that_says_nothing_changes_nothing():
    log_probs_TC = frames(2, 5)
    plain = prefix_search(log_probs_TC, WORDS, 20, WORDS)
    silent = conditioned_prefix_search(log_probs_TC, begin(MarkovCorrection, log_probs_TC, strength=0.0), 20)
    assert texts_of(plain) == texts_of(silent)
    torch.testing.assert_close(plain.log_probs_N, silent.log_probs_N, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 60])
@torch.no_grad()
def test_direct_names_the_best_products_of_what_listens(kind, nodes):
    log_probs_TC = frames(5, 3)
    listening = begin(kind, log_probs_TC, strength=2.0)

    def law(frame, text):
        probs = law_of(listening)(frame, text)[:WORDS]
        return [p / sum(probs) for p in probs]

    masses = slow_products(law, 3, WORDS)
    tree = PerFrameTree(None)(log_probs_TC, TreeRequest(ROOT, 3, nodes), listening)
    texts: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens_N[1:].tolist(), tree.parents_N[1:].tolist(), strict=True):
        texts.append((*texts[parent], token))
    assert set(texts[1:]) == set(sorted(masses, key=lambda text: -masses[text])[: nodes - 1])
    wide = build_dynamic_tree(
        PerFrameStepFunction(log_probs_TC, listening), TreeRequest(ROOT, 3, nodes, (0,)), nodes, nodes
    )
    ours = PerFrameTree(None)(log_probs_TC, TreeRequest(ROOT, 3, nodes, (0,)), listening)
    assert torch.equal(ours.tokens_N, wide.tokens_N)
    assert torch.equal(ours.parents_N, wide.parents_N)


@torch.no_grad()
def test_fixed_ranks_listen_to_their_own_path():
    """Rank by rank by hand: the raw classes of the collapsed tree, and the words of the sparse one."""
    log_probs_TC = frames(7, 4)
    listening = begin(GRUCorrection, log_probs_TC, strength=2.0)
    law = law_of(listening)
    from truths import slow_tree_from_paths

    from ctcdraft.drafters.trees.ctc import rank_sequences

    paths = []
    for ranks in rank_sequences(4, 3, 12, 0.4).tolist():
        said: list[int] = []
        for frame, rank in enumerate(ranks):
            probs = law(frame, slow_collapse(said, WORDS))
            said.append(sorted(range(WORDS + 1), key=lambda c: -probs[c])[rank])
        paths.append(slow_collapse(said, WORDS))
    tree = Collapse(12, 3, 0.4)(log_probs_TC, TreeRequest(ROOT, 4, 20), listening)
    tokens, parents = slow_tree_from_paths(1, paths, [len(path) for path in paths], 20)
    assert (tree.tokens_N.tolist(), tree.parents_N.tolist()) == (tokens, parents)

    sparse = StaticPerFrameTree([[0], [1], [0, 0], [1, 1], [0, 0, 1]])
    tree = sparse(log_probs_TC, TreeRequest(ROOT, 4, 9), listening)
    texts: list[tuple[int, ...]] = [()]
    for choice, token, parent in zip(
        sparse.step_tree.choices, tree.tokens_N[1:].tolist(), tree.parents_N[1:].tolist(), strict=True
    ):
        probs = law(len(choice) - 1, texts[parent])[:WORDS]
        assert token == sorted(range(WORDS), key=lambda c: -probs[c])[choice[-1]]
        texts.append((*texts[parent], token))


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@torch.no_grad()
def test_training_scores_the_law_that_decoding_searches(kind):
    """Emissions -> scores -> likelihoods give every prefix the mass that the search over the same frames gives it."""
    torch.manual_seed(0)
    head = BlankHead(nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False), WIDTH).double()
    made = correction(kind)
    anchor_11D = torch.linspace(-1, 1, WIDTH, dtype=torch.float64).view(1, 1, -1)
    emissions = Emissions(
        torch.randn(1, 1, 4, WIDTH, dtype=torch.float64), head, made, made.start(anchor_11D, ROOT.view(1, 1))
    )
    log_probs_TC = emissions.logits()[0, 0].log_softmax(-1)
    found = conditioned_prefix_search(
        log_probs_TC, ConditionedFrames.empty(log_probs_TC, made, emissions.start_BAR[0]), 200
    )
    masses = dict(zip(texts_of(found), found.log_probs_N.exp().tolist(), strict=True))
    assert len(masses) > 50
    for text, mass in masses.items():
        labels_BAS, lengths_BA = torch.tensor(text).view(1, 1, -1), torch.tensor([[len(text)]])
        scores = emissions.scores(labels_BAS)
        prefix = likelihoods(scores.label_BATS, scores.hold_BATS, scores.blank_BATP, labels_BAS, lengths_BA).prefix_XS
        assert prefix[0, 0, -1].exp().item() == pytest.approx(mass, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
@torch.no_grad()
def test_every_tree_is_distinct_and_ends_at_stops(seed):
    log_probs_TC = frames(seed, 5, words=6)
    listening = begin(GRUCorrection, log_probs_TC)
    for paths in (
        PrefixSearch(4),
        Collapse(20, 4, 0.4),
        PerFrameTree(None),
        StaticPerFrameTree([[0], [1], [0, 0], [0, 1]]),
    ):
        tree = paths(log_probs_TC, TreeRequest(ROOT, 4, 9, (2, 4)), listening)
        assert 6 not in tree.tokens_N.tolist()
        below_stop = torch.isin(tree.parents_N[1:], torch.isin(tree.tokens_N[1:], torch.tensor([2, 4])).nonzero() + 1)
        assert not below_stop.any()
        siblings = list(zip(tree.parents_N.tolist(), tree.tokens_N.tolist(), strict=True))
        assert len(set(siblings)) == len(siblings) > 1
