"""Batched chains against the prefix searches, whose best children they follow."""

from functools import partial

import pytest
import torch
from tiny_models import random_base

from ctcdraft.ctc.conditioned_search import conditioned_prefix_search
from ctcdraft.ctc.prefix_search import prefix_search
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY
from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.acceptance import AcceptanceModel
from ctcdraft.drafters.parallel import ParallelDrafter
from ctcdraft.drafters.trees.per_frame import PerFrameTree
from ctcdraft.drafters.trees.request import ConditionedFrames, UnconditionedFrames
from ctcdraft.nn.bodies import ResidualBody
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.nn.weight_layout import to_column_major_
from ctcdraft.serving import chains as serving_chains
from ctcdraft.serving.batch_drafter import BatchDrafter, DraftBatch
from ctcdraft.serving.chains import CHAIN_SEARCHES, frame_chains
from ctcdraft.serving.served_head import ServedHead

REQUESTS, FRAMES, DEPTH, STOP = 12, 5, 4, 3
STOPS_S = torch.tensor([STOP])


def best_path(prefixes):
    """Return tokens and masses along the most probable child of the most probable child, and so on."""
    tokens, masses, at = [], [], -1
    parents = prefixes.parents_N.tolist()
    while at in parents:
        at = parents.index(at)  # nodes are in order of their masses
        tokens.append(int(prefixes.tokens_N[at]))
        masses.append(float(prefixes.masses_N[at]))
    return tokens, masses


def frames(vocabulary, seed=0):
    logits_QTC = 2 * torch.randn(REQUESTS, FRAMES, vocabulary + 1, generator=torch.Generator().manual_seed(seed))
    logits_QTC[:, 1:, :6] += logits_QTC[:, :1, :6]  # frames that repeat each other's tokens, the stop among them
    return logits_QTC


def assert_same(chains, number, path):
    tokens, masses = path
    assert tokens == chains[0][number, : len(tokens)].tolist()
    assert chains[1][number, : len(tokens)].tolist() == pytest.approx(masses, rel=1e-4)
    assert chains[1][number, len(tokens) :].tolist() == [0.0] * (DEPTH - len(tokens))


@torch.inference_mode()
def test_chains_of_ctc_frames_are_the_best_path_of_the_prefix_search():
    logits_QTC = frames(6)
    chains = CHAIN_SEARCHES["alignments"](logits_QTC, DEPTH, STOPS_S, None, None)
    stopped = 0
    for number, log_probs_TC in enumerate(logits_QTC.log_softmax(-1)):
        path = best_path(prefix_search(log_probs_TC, 6, 4000, 6, [STOP], DEPTH))
        assert_same(chains, number, path)
        stopped += len(path[0]) < DEPTH
    assert 0 < stopped < REQUESTS
    repeats = chains[0][:, 1:] == chains[0][:, :-1]
    assert repeats.any()


@pytest.mark.parametrize("topology", [CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY])
@pytest.mark.parametrize("correction", [GRUCorrection, MarkovCorrection, None])
@pytest.mark.parametrize("compiled", [True, False])
@torch.no_grad()
def test_chains_of_conditioned_frames_are_the_best_path_of_their_search(topology, correction, compiled, monkeypatch):
    monkeypatch.setattr(serving_chains, "MAX_COMPILED", REQUESTS if compiled else 0)
    base, memory_QR = random_base(), None
    torch.manual_seed(1)
    if correction is not None:
        correction = correction(base.embedding, rank=8, epsilon=1e-6).eval()
        torch.nn.init.normal_(correction.out.weight, std=2.0)
        to_column_major_(correction)
        roots_Q = torch.arange(REQUESTS)
        memory_QR = correction.start(torch.randn(REQUESTS, base.width), roots_Q)
    logits_QTC = frames(base.vocabulary, seed=1)
    logits_QTC[:4, 1, STOP] += 12
    name = "alignments" if topology is CTC_TOPOLOGY else "transductions"
    chains = CHAIN_SEARCHES[name](logits_QTC, DEPTH, STOPS_S, correction, memory_QR)
    assert (chains[1].dtype == torch.float64) == (compiled and correction is not None)  # of the compiled loops
    assert (chains[0] == STOP).any()
    for number, log_probs_TC in enumerate(logits_QTC.log_softmax(-1)):
        if correction is None:
            states = UnconditionedFrames.empty(log_probs_TC)
        else:
            states = ConditionedFrames.empty(log_probs_TC, correction, memory_QR[number : number + 1])
        # Of so many nodes that the path is complete: none of them is cut.
        found = conditioned_prefix_search(log_probs_TC, states, 3000, [STOP], DEPTH, topology)
        tokens, masses = best_path(found)
        assert tokens == chains[0][number, : len(tokens)].tolist()
        assert chains[1][number, : len(tokens)].tolist() == pytest.approx(masses, rel=1e-3)
        if STOP in tokens:
            assert chains[1][number, len(tokens) :].count_nonzero() == 0


def test_chains_of_frames_that_are_tokens_leave_out_the_blank():
    logits_QTC = torch.tensor([[[2.0, 1.0, 0.0, -9.0, 5.0], [0.0, 0.0, 3.0, -9.0, 9.0]]])
    tokens_QK, probs_QK = CHAIN_SEARCHES["tokens"](logits_QTC, 3, STOPS_S, None, None)
    assert tokens_QK.tolist() == [[0, 2]]
    first = logits_QTC[0, 0, :4].softmax(-1)[0]
    assert probs_QK[0].tolist() == pytest.approx([float(first), float(first * logits_QTC[0, 1, :4].softmax(-1)[2])])


def test_nothing_is_drafted_below_a_stop_token():
    logits_QTC = torch.full((1, 3, 6), -9.0)
    logits_QTC[0, 0, STOP] = logits_QTC[0, 1, 1] = logits_QTC[0, 2, 2] = 9.0
    for search in CHAIN_SEARCHES.values():
        tokens_QK, probs_QK = search(logits_QTC, 3, STOPS_S, None, None)
        assert tokens_QK[0, 0] == STOP
        assert probs_QK[0, 0] > 0.9
        assert probs_QK[0, 1:].tolist() == [0.0, 0.0]


@torch.inference_mode()
def test_a_head_with_lm_heads_of_its_own_is_served():
    """Medusa's chains for two requests at once are those of its own drafts."""
    base = random_base()
    torch.manual_seed(0)
    body = partial(ResidualBody, blocks=1)
    drafter = ParallelDrafter(base, 3, body, PerFrameTree(1), own_heads=True).for_inference(base)
    for weight in drafter.trainable_parameters():
        weight += 0.3 * torch.randn_like(weight)
    served = BatchDrafter(ServedHead(drafter, frame_chains, AcceptanceModel(), [0], 256))
    states_LD, roots_Q, places_L = torch.randn(2, base.width), torch.tensor([7, 9]), torch.arange(2)
    served.record([states_LD], places_L, places_L)
    tokens_QK, _ = served.draft(DraftBatch(places_L, places_L, roots_Q, torch.zeros(2, 1).long(), [2, 2], places_L), 3)
    for state_D, root, tokens_K in zip(states_LD, roots_Q, tokens_QK, strict=True):
        context = Context(torch.stack([root, root]), state_D[None], 30, 4)
        tree, _ = drafter.draft(context, None, torch.Generator())
        assert tree.tokens_N[1:].tolist() == tokens_K.tolist()
