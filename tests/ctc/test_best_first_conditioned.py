"""Best-first search over label-conditioned frames against its vectorised twin and every alignment: the same nodes in
the same order for every expansion batch size."""

from __future__ import annotations

import pytest
import torch
from test_best_first import texts_of
from test_conditioned_search import VOCABULARY, Forbids, begin, frame_distribution_of, frames
from truths import slow_collapse
from truths_heads import beginnings, slow_best, slow_conditioned_texts

from ctcdraft.ctc import best_first_conditioned as few
from ctcdraft.ctc.best_first_conditioned import best_first_conditioned_search
from ctcdraft.ctc.conditioned_search import conditioned_prefix_search
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY
from ctcdraft.drafters.trees.ctc import MAX_BEST_FIRST_NODES, PrefixSearch
from ctcdraft.drafters.trees.request import ConditionedFrames, TreeRequest, UnconditionedFrames
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.nn.weight_layout import to_column_major_

READINGS = {
    CTC_TOPOLOGY: slow_collapse,
    TRANSDUCER_TOPOLOGY: lambda classes, blank: [one for one in classes if one != blank],
}


def assert_same(prefixes, twin):
    assert prefixes[:2] == (twin.tokens_N.tolist(), twin.parents_N.tolist())
    assert prefixes[2] == pytest.approx(twin.masses_N.tolist())


def test_by_hand():
    """Behind "a" neither token may follow: a 5/8, b 5/16, b a 1/8."""
    frames_TC = torch.tensor([[1 / 2, 1 / 4, 1 / 4]] * 2, dtype=torch.float64).log()
    assert best_first_conditioned_search(frames_TC, Forbids([-1]), 9) == (
        [0, 1, 0],
        [-1, -1, 1],
        [5 / 8, 5 / 16, 1 / 8],
    )
    assert best_first_conditioned_search(frames_TC, Forbids([-1]), 0) == ([], [], [])
    assert best_first_conditioned_search(frames_TC, Forbids([-1]), 9, depth=0) == ([], [], [])
    assert best_first_conditioned_search(frames_TC, Forbids([-1]), 9, stop_token_ids=(1,))[:2] == ([0, 1], [-1, -1])


@pytest.mark.parametrize("topology", READINGS, ids=["ctc", "transducer"])
@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_every_alignment(seed, at_once, topology, monkeypatch):
    monkeypatch.setattr(few, "EXPANSION_BATCH", at_once)
    log_probs_TC = frames(seed, 1 + seed % 5)
    conditioned = begin((MarkovCorrection, GRUCorrection)[seed % 2], log_probs_TC)
    read = READINGS[topology]
    texts = slow_conditioned_texts(
        frame_distribution_of(conditioned), len(log_probs_TC), VOCABULARY + 1, VOCABULARY, lambda *x: tuple(read(*x))
    )
    for nodes, stops, depth in [(1, (), 99), (9, (), 99), (300, (), 99), (30, (0,), 99), (30, (), 2)]:
        truth = slow_best(beginnings(texts), nodes, stops, depth)
        prefixes = best_first_conditioned_search(log_probs_TC, conditioned, nodes, stops, depth, topology)
        assert texts_of(*prefixes) == [text for text, _ in truth]
        assert prefixes[2] == pytest.approx([mass for _, mass in truth])
        probable = best_first_conditioned_search(log_probs_TC, conditioned, nodes, stops, depth, topology, 0.02)
        assert texts_of(*probable) == [text for text, mass in truth if mass >= 0.02]


@pytest.mark.parametrize("nodes", [1, 4, 15, 63])
@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@torch.no_grad()
def test_what_its_vectorised_twin_finds(kind, nodes):
    """Many tokens, and frames in doubt, so that bounds cut candidates and prefixes are expanded in several rounds."""
    for seed in range(4):
        log_probs_TC = frames(seed, 6, vocabulary=200)
        conditioned = begin(kind, log_probs_TC)
        for topology in READINGS:
            for min_mass in (0.0, 0.01):
                limits = log_probs_TC, conditioned, nodes, (3,), 5, topology, min_mass
                assert_same(best_first_conditioned_search(*limits), conditioned_prefix_search(*limits))


@pytest.mark.parametrize("topology", READINGS, ids=["ctc", "transducer"])
def test_ties_are_broken_as_its_twin_breaks_them(topology):
    uniform_TC = torch.full((4, 5), 1 / 5, dtype=torch.float64).log()
    impossible_TC = torch.tensor([[1 / 2, 0, 0, 1 / 2]] * 3, dtype=torch.float64).log()
    for frames_TC in (uniform_TC, impossible_TC):
        for nodes in (1, 3, 6, 40):
            twin = conditioned_prefix_search(frames_TC, UnconditionedFrames.empty(frames_TC), nodes, topology=topology)
            unconditioned = best_first_conditioned_search(
                frames_TC, UnconditionedFrames.empty(frames_TC), nodes, topology=topology
            )
            assert_same(unconditioned, twin)


@pytest.mark.parametrize("topology", READINGS, ids=["ctc", "transducer"])
@pytest.mark.parametrize("at_once", [1, 8])
def test_of_texts_that_tie_the_most_probable_are_found(at_once, topology, monkeypatch):
    """Frames of quarters, many of them zero: whichever of tying prefixes is selected, the masses are the largest ones,
    and every prefix that ties with none of the last ones is selected."""
    monkeypatch.setattr(few, "EXPANSION_BATCH", at_once)
    rng = torch.Generator().manual_seed(0)
    read = READINGS[topology]
    for _ in range(60):
        cuts_TC = torch.multinomial(torch.ones(3, 4), 4, replacement=True, generator=rng)
        frames_TC = torch.stack([(cuts_TC == token).sum(1) / 4 for token in range(4)], dim=1).double()
        frame_probs = frames_TC.tolist()
        texts = slow_conditioned_texts(
            lambda t, text, frame_probs=frame_probs: frame_probs[t], 3, 4, 3, lambda *x: tuple(read(*x))
        )
        masses = {text: mass for text, mass in beginnings(texts).items() if mass > 0}
        for nodes in (1, 2, 4, 7):
            prefixes = texts_of(
                *best_first_conditioned_search(
                    frames_TC.log(), UnconditionedFrames.empty(frames_TC), nodes, (), 9, topology
                )
            )
            truth = sorted(masses.values(), reverse=True)[:nodes]
            assert sorted((masses[text] for text in prefixes), reverse=True) == pytest.approx(truth)
            assert {text for text, mass in masses.items() if mass > truth[-1] + 1e-9} <= set(prefixes)


@torch.no_grad()
def test_float32_frames_give_the_nodes_of_the_twin():
    for seed in range(6):
        log_probs_TC = frames(seed, 6, vocabulary=300).float()
        first_states = begin(GRUCorrection, log_probs_TC.double())
        conditioned = ConditionedFrames.empty(
            log_probs_TC, first_states.correction.float(), first_states.memory_KR.float()
        )
        twin = conditioned_prefix_search(log_probs_TC, conditioned, 15)
        assert_same(best_first_conditioned_search(log_probs_TC, conditioned, 15), twin)


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_machine_code_finds_what_python_finds(kind, seed):
    log_probs_TC = frames(seed, 1 + seed % 7, vocabulary=(3, 60, 300)[seed % 3]).float()
    first_states = begin(kind, log_probs_TC.double())
    logit_correction = first_states.correction.float().eval()
    to_column_major_(logit_correction)
    conditioned = ConditionedFrames.empty(log_probs_TC, logit_correction, first_states.memory_KR.float())
    assert conditioned.arrays() is not None
    for topology in READINGS:
        limits = [(0, (), None, 0.0), (15, (), None, 0.0), (63, (3, 8), 3, 0.0), (9, (2,), 9, 0.01)]
        for nodes, stops, depth, min_mass in limits:
            arguments = log_probs_TC, conditioned, nodes, stops, depth, topology, min_mass
            found, truth = few.compiled_conditioned_search(*arguments), best_first_conditioned_search(*arguments)
            assert found[:2] == truth[:2]
            assert found[2] == pytest.approx(truth[2], rel=2e-5)


@torch.no_grad()
def test_without_numba_or_arrays_python_searches(monkeypatch):
    log_probs_TC = frames(0, 4, vocabulary=20)
    conditioned = begin(GRUCorrection, log_probs_TC)  # float64
    assert conditioned.arrays() is None
    truth = best_first_conditioned_search(log_probs_TC, conditioned, 9)
    assert few.compiled_conditioned_search(log_probs_TC, conditioned, 9) == truth
    monkeypatch.setattr(few, "conditioned_kernels", lambda: None)
    assert few.compiled_conditioned_search(log_probs_TC, conditioned, 9) == truth


def test_fewer_prefixes_are_expanded_than_by_levels():
    class Counted(UnconditionedFrames):
        expanded = 0

        def extend(self, tokens_K, rows_K):
            Counted.expanded += len(tokens_K)
            return super().extend(tokens_K, rows_K)

    expanded = {"levels": 0, "few": 0}
    for seed in range(8):
        log_probs_TC = (2 * frames(seed, 6, vocabulary=200)).log_softmax(-1)
        texts, Counted.expanded = Counted.empty(log_probs_TC), 0
        twin = conditioned_prefix_search(log_probs_TC, texts, 15)
        expanded["levels"], Counted.expanded = expanded["levels"] + Counted.expanded, 0
        assert_same(best_first_conditioned_search(log_probs_TC, texts, 15), twin)
        expanded["few"] += Counted.expanded
    assert 0 < expanded["few"] < 0.9 * expanded["levels"]


@torch.no_grad()
def test_trees_of_few_nodes_are_those_of_many(monkeypatch):
    """Both searches build the same tree of MAX_BEST_FIRST_NODES."""
    log_probs_TC = frames(3, 5, vocabulary=60)
    conditioned = begin(GRUCorrection, log_probs_TC)
    trees = []
    for most in (MAX_BEST_FIRST_NODES, 1):
        monkeypatch.setattr("ctcdraft.drafters.trees.ctc.MAX_BEST_FIRST_NODES", most)
        trees.append(
            PrefixSearch(10)(log_probs_TC, TreeRequest(torch.tensor(1), 5, MAX_BEST_FIRST_NODES, (2,)), conditioned)
        )
    assert torch.equal(trees[0].tokens_N, trees[1].tokens_N)
    assert torch.equal(trees[0].parents_N, trees[1].parents_N)
    torch.testing.assert_close(trees[0].path_probs_N, trees[1].path_probs_N)
