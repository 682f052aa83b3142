"""The fused searches as compiled kernels on a CUDA device, against the searches in PyTorch on the CPU.

Frames have no ties: of equal candidates topk on CUDA picks others than on a CPU.
"""

from __future__ import annotations

import copy

import pytest
import torch
from fused_parts import random_integer
from test_conditioned_search import ROOT, WIDTH, correction
from test_fused_conditioned import assert_same_but_for_ties
from test_fused_search import random_frames

from ctcdraft.ctc.conditioned_search import conditioned_prefix_search
from ctcdraft.ctc.fused_conditioned import fused_conditioned_search
from ctcdraft.ctc.prefix_search import fused_prefix_search, prefix_search
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY
from ctcdraft.drafters.trees.request import ConditionedFrames
from ctcdraft.fused import has_triton
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles Triton kernels; no CUDA device here"),
]


def ranked_on_cpu(ranked):
    return tuple(column_N.cpu() for column_N in ranked)


@pytest.mark.parametrize("seed", range(40))
def test_prefix_search(seed):
    rng = torch.Generator().manual_seed(seed)
    count, nodes, tokens_per_frame = (random_integer(rng, 1, most) for most in (16, 64, 32))
    classes = random_integer(rng, *((2, 40), (40, 300), (32000, 32001))[seed % 3])
    log_probs_TC, blank = random_frames(rng, count, classes, ties=False), random_integer(rng, 0, classes - 1)
    stops_S = torch.randint(0, classes, (2,), generator=rng)
    assert has_triton()
    limits, depth = (blank, nodes, tokens_per_frame), count
    ranked = ranked_on_cpu(fused_prefix_search(log_probs_TC.cuda(), *limits, stops_S.cuda(), depth, 0.0))
    assert_same_but_for_ties(ranked, nodes, prefix_search(log_probs_TC, *limits, stops_S.tolist(), depth))


@pytest.mark.parametrize("topology", [CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY])
@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_search_over_conditioned_frames(kind, topology, seed):
    rng = torch.Generator().manual_seed(seed)
    count, nodes, vocabulary = (random_integer(rng, 1, most) for most in (6, 40, 300))
    log_probs_TC = random_frames(rng, count, vocabulary + 2, ties=False)
    logit_correction = correction(kind, 1.0, vocabulary + 1).float().eval()
    ranked = {}
    for device in ("cpu", "cuda"):
        corrected = copy.deepcopy(logit_correction).to(device)
        start_1R = corrected.start(torch.linspace(-1, 1, WIDTH, device=device)[None], ROOT[None].to(device))
        states = ConditionedFrames.empty(log_probs_TC.to(device), corrected, start_1R)
        stops_S = torch.tensor([0], device=device)
        if device == "cpu":
            expected = conditioned_prefix_search(log_probs_TC, states, nodes, stops_S.tolist(), count, topology)
        else:
            ranked = ranked_on_cpu(
                fused_conditioned_search(log_probs_TC.cuda(), states, nodes, stops_S, count, topology)
            )
    assert_same_but_for_ties(ranked, nodes, expected)
