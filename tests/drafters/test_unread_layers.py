"""Bodies that read all layers but the last: no logit correction reads that one for them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny_models import random_base

from ctcdraft.batch import Batch
from ctcdraft.drafters.parallel import ParallelDrafter
from ctcdraft.drafters.trees.per_frame import PerFrameTree
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.bodies import AttentionBody
from ctcdraft.nn.frame_correction import FrameGRUCorrection
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.nn.peagle_body import PEagleBody
from ctcdraft.nn.slot_bodies import DFlashBody
from ctcdraft.objectives.cross_entropy import CrossEntropy

FRAMES = 3
BODIES = {
    "dflash": partial(DFlashBody, blocks=2),
    "dspark": partial(DFlashBody, blocks=2, root_predicts=True),
    "peagle": partial(PEagleBody, blocks=2, like_base=True),
    "attention": partial(AttentionBody, root_input=True, causal=False),
}
CORRECTIONS = {
    "none": None,
    "markov": partial(MarkovCorrection, rank=8),
    "own embedding": partial(MarkovCorrection, rank=8, own_embedding=True),
    "gru": partial(GRUCorrection, rank=8),
    "frame gru": partial(FrameGRUCorrection, rank=8, memory=6, uncorrected=1),
}


def loss_after_noise(body: str, correction: str, layer: int | None) -> float:
    """Return the loss of a drafter of random weights, after noise in one layer of the hidden states."""
    base = random_base()
    base = BaseLM(base.lm, base.tokenizer, base.name, aux_layers=["last", 0, 1])
    torch.manual_seed(3)
    drafter = ParallelDrafter(base, FRAMES, BODIES[body], PerFrameTree(None), CORRECTIONS[correction])
    for value in drafter.trainable_parameters():  # away from zero: an untrained correction changes nothing
        value.data += 0.2 * torch.randn_like(value)
    tokens_BL, anchors_BA = torch.arange(20, 32)[None], torch.tensor([[3, 6]])
    states_BLD = base.hidden_states(tokens_BL, torch.ones_like(tokens_BL))
    if layer is not None:
        noise_BLD = torch.randn(1, 12, base.width, generator=torch.Generator().manual_seed(0))
        states_BLD[..., layer * base.width : (layer + 1) * base.width] += noise_BLD
    labels_BAS = torch.stack([tokens_BL[0, anchor + 2 : anchor + 2 + FRAMES] for anchor in (3, 6)])[None]
    lengths_BA = torch.full_like(anchors_BA, FRAMES)
    places_BL = torch.arange(12)[None]
    batch = Batch(tokens_BL, states_BLD, anchors_BA, tokens_BL[:, [4, 7]], labels_BAS, lengths_BA, places_BL)
    return float(CrossEntropy(FRAMES, 1.0)(drafter(batch), batch).value)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("body", BODIES)
@torch.inference_mode()
def test_noise_in_an_unread_layer_does_not_change_the_loss(body, correction):
    plain = loss_after_noise(body, correction, None)
    assert (loss_after_noise(body, correction, 0) == plain) is (body != "attention")
    assert loss_after_noise(body, correction, 1) != plain


@pytest.mark.parametrize("body", ["dflash", "peagle"])
@torch.inference_mode()
def test_a_gru_starts_from_what_the_body_reads_of_the_anchor(body):
    base = random_base()
    base = BaseLM(base.lm, base.tokenizer, base.name, aux_layers=["last", 0, 1])
    torch.manual_seed(3)
    drafter = ParallelDrafter(base, FRAMES, BODIES[body], PerFrameTree(None), CORRECTIONS["gru"])
    anchor_11E = torch.randn(1, 1, (3 + drafter.reads_tokens) * base.width)
    fused_11D = drafter.body.fc(anchor_11E[..., base.width : 3 * base.width])
    expected_11D = drafter.body.text_norm(fused_11D) if body == "dflash" else fused_11D
    assert torch.equal(drafter.start_states(anchor_11E), expected_11D)
