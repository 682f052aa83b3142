"""The search of frames that listen, for few nodes, against its vectorised twin and every alignment: the same nodes in
the same order, whether few or many texts are asked together."""

from __future__ import annotations

import pytest
import torch
from test_best_first import texts_of
from test_listening import WORDS, Forbids, begin, frames, law_of
from truths import slow_collapse
from truths_heads import beginnings, slow_best, slow_conditioned_texts

from ctcdraft.ctc import best_first_conditioned as few
from ctcdraft.ctc.best_first_conditioned import best_first_conditioned_search
from ctcdraft.ctc.conditioned_search import conditioned_prefix_search
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY
from ctcdraft.drafters.conditioning import ConditionedFrames, UnconditionedFrames
from ctcdraft.drafters.trees.ctc import MAX_BEST_FIRST_NODES, PrefixSearch
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection

LAWS = {
    CTC_TOPOLOGY: slow_collapse,
    TRANSDUCER_TOPOLOGY: lambda classes, blank: [one for one in classes if one != blank],
}


def said(found):
    return found.tokens_N.tolist(), found.parents_N.tolist()


def test_by_pencil():
    """Behind "a" neither word may follow: a 5/8, b 5/16, b a 1/8."""
    frames_TC = torch.tensor([[1 / 2, 1 / 4, 1 / 4]] * 2, dtype=torch.float64).log()
    assert best_first_conditioned_search(frames_TC, Forbids([-1]), 9) == ([0, 1, 0], [-1, -1, 1])
    assert best_first_conditioned_search(frames_TC, Forbids([-1]), 0) == ([], [])
    assert best_first_conditioned_search(frames_TC, Forbids([-1]), 9, depth=0) == ([], [])
    assert best_first_conditioned_search(frames_TC, Forbids([-1]), 9, stop_words=(1,)) == ([0, 1], [-1, -1])


@pytest.mark.parametrize("topology", LAWS, ids=["merging", "anew"])
@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_every_alignment(seed, at_once, topology, monkeypatch):
    monkeypatch.setattr(few, "EXPANSION_BATCH", at_once)
    log_probs_TC = frames(seed, 1 + seed % 5)
    listening = begin((MarkovCorrection, GRUCorrection)[seed % 2], log_probs_TC)
    read = LAWS[topology]
    texts = slow_conditioned_texts(law_of(listening), len(log_probs_TC), WORDS + 1, WORDS, lambda *x: tuple(read(*x)))
    for nodes, stops, depth in [(1, (), 99), (9, (), 99), (300, (), 99), (30, (0,), 99), (30, (), 2)]:
        truth = slow_best(beginnings(texts), nodes, stops, depth)
        found = best_first_conditioned_search(log_probs_TC, listening, nodes, stops, depth, topology)
        assert texts_of(*found) == [text for text, _ in truth]


@pytest.mark.parametrize("nodes", [1, 4, 15, 63])
@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@torch.no_grad()
def test_what_its_vectorised_twin_finds(kind, nodes):
    """Many words, and frames in doubt, so that candidates are cut by bounds and texts are asked in several rounds."""
    for seed in range(4):
        log_probs_TC = frames(seed, 6, words=200)
        listening = begin(kind, log_probs_TC)
        for topology in LAWS:
            twin = conditioned_prefix_search(log_probs_TC, listening, nodes, (3,), 5, topology)
            assert said(twin) == best_first_conditioned_search(log_probs_TC, listening, nodes, (3,), 5, topology)


@pytest.mark.parametrize("topology", LAWS, ids=["merging", "anew"])
def test_ties_are_broken_as_its_twin_breaks_them(topology):
    uniform_TC = torch.full((4, 5), 1 / 5, dtype=torch.float64).log()
    impossible_TC = torch.tensor([[1 / 2, 0, 0, 1 / 2]] * 3, dtype=torch.float64).log()
    for frames_TC in (uniform_TC, impossible_TC):
        for nodes in (1, 3, 6, 40):
            twin = conditioned_prefix_search(frames_TC, UnconditionedFrames.empty(frames_TC), nodes, topology=topology)
            deaf = best_first_conditioned_search(
                frames_TC, UnconditionedFrames.empty(frames_TC), nodes, topology=topology
            )
            assert said(twin) == deaf


@pytest.mark.parametrize("topology", LAWS, ids=["merging", "anew"])
@pytest.mark.parametrize("at_once", [1, 8])
def test_of_texts_that_tie_the_most_probable_are_found(at_once, topology, monkeypatch):
    """Frames of quarters, many of them none: whoever is taken of those that tie, the masses are the greatest there are,
    and every text is there whose place no tie decides."""
    monkeypatch.setattr(few, "EXPANSION_BATCH", at_once)
    rng = torch.Generator().manual_seed(0)
    read = LAWS[topology]
    for _ in range(60):
        cuts_TC = torch.multinomial(torch.ones(3, 4), 4, replacement=True, generator=rng)
        frames_TC = torch.stack([(cuts_TC == word).sum(1) / 4 for word in range(4)], dim=1).double()
        law = frames_TC.tolist()
        texts = slow_conditioned_texts(lambda t, said, law=law: law[t], 3, 4, 3, lambda *x: tuple(read(*x)))
        masses = {text: mass for text, mass in beginnings(texts).items() if mass > 0}
        for nodes in (1, 2, 4, 7):
            found = texts_of(
                *best_first_conditioned_search(
                    frames_TC.log(), UnconditionedFrames.empty(frames_TC), nodes, (), 9, topology
                )
            )
            truth = sorted(masses.values(), reverse=True)[:nodes]
            assert sorted((masses[text] for text in found), reverse=True) == pytest.approx(truth)
            assert {text for text, mass in masses.items() if mass > truth[-1] + 1e-9} <= set(found)


@torch.no_grad()
def test_in_the_precision_of_heads_it_finds_what_its_twin_finds():
    for seed in range(6):
        log_probs_TC = frames(seed, 6, words=300).float()
        made = begin(GRUCorrection, log_probs_TC.double())
        heard = ConditionedFrames.empty(log_probs_TC, made.correction.float(), made.memory_KR.float())
        twin = conditioned_prefix_search(log_probs_TC, heard, 15)
        assert said(twin) == best_first_conditioned_search(log_probs_TC, heard, 15)


def test_fewer_texts_are_asked_than_levels_have():
    class Counted(UnconditionedFrames):
        asked = 0

        def extend(self, words_K, rows_K):
            Counted.asked += len(words_K)
            return super().extend(words_K, rows_K)

    asked = {"levels": 0, "few": 0}
    for seed in range(8):
        log_probs_TC = (2 * frames(seed, 6, words=200)).log_softmax(-1)
        texts, Counted.asked = Counted.empty(log_probs_TC), 0
        twin = conditioned_prefix_search(log_probs_TC, texts, 15)
        asked["levels"], Counted.asked = asked["levels"] + Counted.asked, 0
        assert said(twin) == best_first_conditioned_search(log_probs_TC, texts, 15)
        asked["few"] += Counted.asked
    assert 0 < asked["few"] < 0.9 * asked["levels"]


@torch.no_grad()
def test_trees_of_few_nodes_are_those_of_many(monkeypatch):
    """Whichever search a tree of FEW_NODES is left to."""
    log_probs_TC = frames(3, 5, words=60)
    listening = begin(GRUCorrection, log_probs_TC)
    trees = []
    for most in (MAX_BEST_FIRST_NODES, 1):
        monkeypatch.setattr("ctcdraft.drafters.trees.ctc.MAX_BEST_FIRST_NODES", most)
        trees.append(
            PrefixSearch(10)(log_probs_TC, TreeRequest(torch.tensor(1), 5, MAX_BEST_FIRST_NODES, (2,)), listening)
        )
    assert torch.equal(trees[0].tokens_N, trees[1].tokens_N)
    assert torch.equal(trees[0].parents_N, trees[1].parents_N)
