"""The fused search over label-conditioned frames under Triton's interpreter against the search in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_parts import SEEDS, count_kernels, count_launches, needs_triton, random_integer
from test_conditioned_search import ROOT, WIDTH, correction
from test_fused_search import NO_STOPS, random_frames
from truths import texts_of

from ctcdraft.ctc.conditioned_search import conditioned_prefix_search
from ctcdraft.ctc.fused_conditioned import fused_conditioned_search
from ctcdraft.ctc.prefix_search import drop_improbable
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY
from ctcdraft.drafters.trees.request import ConditionedFrames, UnconditionedFrames
from ctcdraft.fused import Operation
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection

PRECISION = 2e-5  # factors and normalisers are float32


def states_of(log_probs_TC: torch.Tensor, kind=GRUCorrection, strength: float = 1.0) -> ConditionedFrames:
    logit_correction = correction(kind, strength, log_probs_TC.shape[1] - 1).float().eval()
    start_1R = logit_correction.start(torch.linspace(-1, 1, WIDTH)[None], ROOT[None])
    return ConditionedFrames.empty(log_probs_TC, logit_correction, start_1R)


def assert_same_but_for_ties(ranked, nodes, expected, least=0.0):
    """Prefixes that all but tie with the last one, or with the smallest mass allowed, may be others."""
    assert [len(column_N) for column_N in ranked] == [nodes] * 3
    found = drop_improbable(ranked)
    masses = [dict(zip(texts_of(each), each.masses_N.tolist(), strict=True)) for each in (found, expected)]
    if least == 0:
        assert len(masses[0]) == len(masses[1])
    least = max([least, *([min(masses[1].values())] if len(masses[1]) == nodes else [])]) * (1 + 2 * PRECISION)
    sure = [{text: mass for text, mass in each.items() if mass > least} for each in masses]
    assert sure[0] == pytest.approx(sure[1], rel=PRECISION)
    assert found.masses_N.tolist() == pytest.approx(sorted(found.masses_N.tolist(), reverse=True), rel=3e-9)
    assert found.masses_N.tolist()[: len(sure[0])] == pytest.approx(
        [*masses[1].values()][: len(sure[0])], rel=PRECISION
    )


@torch.no_grad()
def check_random_search(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    most = (16, 40) if seed % 25 == 0 else (5, 8)
    count, nodes = (random_integer(rng, 1, each) for each in most)
    vocabulary = random_integer(rng, *((2, 5), (5, 60), (60, 300))[random_integer(rng, 0, 2)])
    log_probs_TC = random_frames(rng, count, vocabulary + 1)
    kind = (MarkovCorrection, GRUCorrection)[random_integer(rng, 0, 1)]
    states = states_of(log_probs_TC, kind, (0.0, 1.0, 3.0)[random_integer(rng, 0, 2)])
    stops_S = torch.randint(0, vocabulary, (random_integer(rng, 0, 3),), generator=rng)
    depth = random_integer(rng, 0, min(count, 6) + 1)
    topology = (CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY)[random_integer(rng, 0, 1)]
    min_mass = (0.0, 0.0, 0.01)[random_integer(rng, 0, 2)]
    tokens_N, parents_N, masses_N = fused_conditioned_search(log_probs_TC, states, nodes, stops_S, depth, topology)
    ranked = tokens_N, parents_N, masses_N.masked_fill(masses_N < min_mass, 0)
    expected = conditioned_prefix_search(log_probs_TC, states, nodes, stops_S.tolist(), depth, topology, min_mass)
    assert_same_but_for_ties(ranked, nodes, expected, min_mass)


def use_kernels(monkeypatch):
    monkeypatch.setattr(Operation, "__call__", Operation.launch)


@needs_triton
@SEEDS
def test_what_the_reference_finds(seeds, monkeypatch):
    use_kernels(monkeypatch)
    for seed in seeds:
        check_random_search(seed)


@needs_triton
@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_texts_with_repeated_tokens(seed, monkeypatch):
    """Two tokens only, so that most of the texts repeat one."""
    use_kernels(monkeypatch)
    rng = torch.Generator().manual_seed(seed)
    log_probs_TC = torch.randn(5, 3, generator=rng).log_softmax(-1)
    states = states_of(log_probs_TC, (MarkovCorrection, GRUCorrection)[seed % 2], 2.0)
    ranked = fused_conditioned_search(log_probs_TC, states, 16, NO_STOPS, 5)
    assert_same_but_for_ties(ranked, 16, conditioned_prefix_search(log_probs_TC, states, 16, (), 5))


@needs_triton
@torch.no_grad()
def test_uncorrected_frames_by_hand(monkeypatch):
    use_kernels(monkeypatch)
    example_TC = torch.tensor([[1 / 2, 1 / 4, 1 / 4]] * 2).log()  # a, b, blank
    states = states_of(example_TC, strength=0.0)
    tokens_N, parents_N, masses_N = fused_conditioned_search(example_TC, states, 3, NO_STOPS, 2)
    assert (tokens_N.tolist(), parents_N.tolist()) == ([0, 1, 1], [-1, -1, 0])
    assert masses_N.tolist() == pytest.approx([5 / 8, 5 / 16, 1 / 8])


@needs_triton
@torch.no_grad()
def test_memory_and_weights_are_read_whatever_their_layout_and_precision(monkeypatch):
    use_kernels(monkeypatch)
    log_probs_TC = random_frames(torch.Generator().manual_seed(1), 4, 90)
    states = states_of(log_probs_TC, MarkovCorrection)
    expected = fused_conditioned_search(log_probs_TC, states, 9, NO_STOPS, 4)
    states.correction.out.weight.data = states.correction.out.weight.T.contiguous().T
    for same, column_N in zip(fused_conditioned_search(log_probs_TC, states, 9, NO_STOPS, 4), expected, strict=True):
        assert torch.equal(same, column_N)


@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_fixed_shapes_find_what_the_search_that_cuts_levels_finds(seed):
    log_probs_TC = random_frames(torch.Generator().manual_seed(seed), 1 + seed, 40)
    states = states_of(log_probs_TC, (MarkovCorrection, GRUCorrection)[seed % 2])
    for topology in (CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY):
        ranked = fused_conditioned_search(log_probs_TC, states, 9, torch.tensor([3]), 5, topology)
        assert_same_but_for_ties(ranked, 9, conditioned_prefix_search(log_probs_TC, states, 9, (3,), 5, topology))
    plain = UnconditionedFrames.empty(log_probs_TC)
    ranked = fused_conditioned_search(log_probs_TC, plain, 9, NO_STOPS, 5, TRANSDUCER_TOPOLOGY)
    expected = conditioned_prefix_search(log_probs_TC, plain, 9, (), 5, TRANSDUCER_TOPOLOGY)
    assert_same_but_for_ties(ranked, 9, expected)


@needs_triton
@torch.no_grad()
def test_six_launches_a_level_but_for_the_correction(monkeypatch):
    """Six levels: two kernels, three and a topk; then the selection. The correction's step is one more."""
    log_probs_TC = random_frames(torch.Generator().manual_seed(0), 6, 300)
    states, arguments = states_of(log_probs_TC), (9, NO_STOPS, 6, CTC_TOPOLOGY)
    monkeypatch.setattr(Operation, "__call__", lambda self, *args: self.definition(*args))
    definitions = count_launches(lambda: fused_conditioned_search(log_probs_TC, states, *arguments))
    use_kernels(monkeypatch)
    after_K1 = replace(states, memory_KR=states.memory_KR.expand(9, -1).contiguous())
    monkeypatch.setattr(ConditionedFrames, "extend", lambda self, tokens_K, rows_K: after_K1)
    assert count_kernels(lambda: fused_conditioned_search(log_probs_TC, states, *arguments)) == 6 * (2 + 4) + 1
    assert definitions > 150
