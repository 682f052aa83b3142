"""The compiled search over label-conditioned frames against every alignment and against the search by levels."""

from __future__ import annotations

import pytest
import torch
from test_best_first import texts_of
from test_conditioned_search import VOCABULARY, begin, frame_distribution_of, frames
from truths import beginnings, slow_best, slow_collapse
from truths_heads import slow_conditioned_texts

from ctcdraft.ctc import best_first
from ctcdraft.ctc.best_first import compiled_conditioned_search
from ctcdraft.ctc.conditioned_search import conditioned_prefix_search
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY
from ctcdraft.drafters.trees.ctc import MAX_BEST_FIRST_NODES, PrefixSearch
from ctcdraft.drafters.trees.request import ConditionedFrames, TreeRequest
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.nn.weight_layout import to_column_major_

READINGS = {
    CTC_TOPOLOGY: slow_collapse,
    TRANSDUCER_TOPOLOGY: lambda classes, blank: [one for one in classes if one != blank],
}


def float32_states(kind, log_probs_TC: torch.Tensor, strength: float = 1.0) -> ConditionedFrames:
    """Return states of the kind that the machine code reads."""
    first_states = begin(kind, log_probs_TC.double(), strength)
    correction = first_states.correction.float().eval()
    to_column_major_(correction)
    states = ConditionedFrames.empty(log_probs_TC.float(), correction, first_states.memory_KR.float())
    assert states.arrays() is not None
    return states


def assert_same(found, by_levels):
    assert found[:2] == (by_levels.tokens_N.tolist(), by_levels.parents_N.tolist())
    assert found[2] == pytest.approx(by_levels.masses_N.tolist(), rel=2e-5)


@pytest.mark.parametrize("topology", READINGS, ids=["ctc", "transducer"])
@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_every_alignment(seed, topology):
    states = float32_states((MarkovCorrection, GRUCorrection)[seed % 2], frames(seed, 1 + seed % 5))
    log_probs_TC, read = states.log_probs_TC, READINGS[topology]
    texts = slow_conditioned_texts(
        frame_distribution_of(states), len(log_probs_TC), VOCABULARY + 1, VOCABULARY, lambda *x: tuple(read(*x))
    )
    for nodes, stops, depth in [(1, (), 99), (9, (), 99), (300, (), 99), (30, (0,), 99), (30, (), 2)]:
        truth = slow_best(beginnings(texts), nodes, stops, depth)
        found = compiled_conditioned_search(log_probs_TC, states, nodes, stops, depth, topology)
        assert texts_of(*found) == [text for text, _ in truth]
        assert found[2] == pytest.approx([mass for _, mass in truth], rel=2e-5)
        probable = compiled_conditioned_search(log_probs_TC, states, nodes, stops, depth, topology, 0.02)
        assert texts_of(*probable) == [text for text, mass in truth if mass >= 0.02]


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_what_the_search_by_levels_finds(kind, seed):
    """Up to 300 tokens, and frames in doubt, so that bounds cut candidates."""
    states = float32_states(kind, frames(seed, 1 + seed % 7, vocabulary=(3, 60, 300)[seed % 3]))
    for topology in READINGS:
        for limits in [
            (0, (), None, 0.0),
            (15, (), None, 0.0),
            (63, (1, 2), 3, 0.0),
            (9, (2,), 9, 0.01),
            (9, (), 0, 0),
        ]:
            nodes, stops, depth, min_mass = limits
            arguments = states.log_probs_TC, states, nodes, stops, depth, topology, min_mass
            assert_same(compiled_conditioned_search(*arguments), conditioned_prefix_search(*arguments))


@pytest.mark.parametrize("topology", READINGS, ids=["ctc", "transducer"])
@torch.no_grad()
def test_of_texts_that_tie_the_most_probable_are_found(topology):
    """Frames of quarters, many of them zero: whichever of tying prefixes is selected, the masses are the largest ones,
    and every prefix that ties with none of the last ones is selected."""
    rng = torch.Generator().manual_seed(0)
    read = READINGS[topology]
    for _ in range(60):
        cuts_TC = torch.multinomial(torch.ones(3, 4), 4, replacement=True, generator=rng)
        frames_TC = torch.stack([(cuts_TC == token).sum(1) / 4 for token in range(4)], dim=1)
        states = float32_states(MarkovCorrection, frames_TC.log(), strength=0.0)  # all factors are 1
        frame_probs = frames_TC.tolist()
        texts = slow_conditioned_texts(
            lambda t, text, frame_probs=frame_probs: frame_probs[t], 3, 4, 3, lambda *x: tuple(read(*x))
        )
        masses = {text: mass for text, mass in beginnings(texts).items() if mass > 0}
        for nodes in (1, 2, 4, 7):
            prefixes = texts_of(*compiled_conditioned_search(states.log_probs_TC, states, nodes, (), 9, topology))
            truth = sorted(masses.values(), reverse=True)[:nodes]
            assert sorted((masses[text] for text in prefixes), reverse=True) == pytest.approx(truth)
            assert {text for text, mass in masses.items() if mass > truth[-1] + 1e-9} <= set(prefixes)


@torch.no_grad()
def test_without_numba_or_arrays_there_is_none(monkeypatch):
    log_probs_TC = frames(0, 4, vocabulary=20)
    in_float64 = begin(GRUCorrection, log_probs_TC)
    assert in_float64.arrays() is None
    assert compiled_conditioned_search(log_probs_TC, in_float64, 9) is None
    monkeypatch.setattr(best_first, "conditioned_kernels", lambda: None)
    states = float32_states(GRUCorrection, log_probs_TC)
    assert compiled_conditioned_search(states.log_probs_TC, states, 9) is None


@pytest.mark.parametrize("absent", ["numba", "nothing", "few nodes"])
@torch.no_grad()
def test_the_tree_is_the_same_whichever_search_finds_it(absent, monkeypatch):
    states = float32_states(GRUCorrection, frames(3, 5, vocabulary=60))
    request = TreeRequest(torch.tensor(1), 5, MAX_BEST_FIRST_NODES, (2,))
    expected = conditioned_prefix_search(states.log_probs_TC, states, MAX_BEST_FIRST_NODES - 1, (2,), 5)
    if absent == "numba":
        monkeypatch.setattr(best_first, "conditioned_kernels", lambda: None)
    if absent == "few nodes":
        monkeypatch.setattr("ctcdraft.drafters.trees.ctc.MAX_BEST_FIRST_NODES", 1)
    tree = PrefixSearch(10)(states.log_probs_TC, request, states)
    assert tree.tokens_N[1:].tolist() == expected.tokens_N.tolist()
    assert (tree.parents_N[1:] - 1).tolist() == expected.parents_N.tolist()
    torch.testing.assert_close(tree.path_probs_N[1:], expected.masses_N, rtol=2e-5, atol=0)
