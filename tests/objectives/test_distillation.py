"""Distillation from the base's distributions, compared with loops over labels."""

from __future__ import annotations

import math

import pytest
import torch
from test_frame_objectives import WIDTH, WORDS, batch, emissions, real_labels, weighted
from torch import nn

from ctcdraft.batch import Batch
from ctcdraft.nn.draft_vocab import DraftVocabHead
from ctcdraft.nn.heads import TokenEmissions, TokenHead
from ctcdraft.objectives.distillation import Distill, kl, total_variation
from ctcdraft.objectives.teacher import before_labels, label_positions


@pytest.mark.parametrize("distance", ["kl", "tv"])
def test_distillation_compares_with_the_base_at_the_label(distance):
    outputs, windows = emissions(), batch()
    probs_BATV = outputs.logits()[..., :WORDS].softmax(-1).tolist()
    base_BLV = outputs.head.words(windows.states_BLD).softmax(-1).tolist()
    values: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for row, anchor, k, _ in real_labels(windows):
        p = base_BLV[row][int(windows.anchors_BA[row, anchor]) + 1 + k]
        q = probs_BATV[row][anchor][k]
        pairs = list(zip(p, q, strict=True))
        values[k].append(
            sum(a * math.log(a / b) for a, b in pairs) if distance == "kl" else sum(abs(a - b) for a, b in pairs) / 2
        )
    loss = Distill(3, 0.8, kl if distance == "kl" else total_variation)(outputs, windows)
    assert loss.value.item() == pytest.approx(weighted(values, 0.8), abs=1e-5)


def test_kl_by_hand():
    p, q = torch.tensor([1 / 2, 1 / 2]).log(), torch.tensor([1 / 4, 3 / 4]).log()
    assert kl(p, q).item() == pytest.approx(math.log(2 / math.sqrt(3)))
    assert total_variation(p, q).item() == pytest.approx(1 / 4)


def test_the_base_predicts_a_label_from_the_hidden_state_before_it():
    states_BLD = torch.arange(9.0)[None, :, None]
    unused, labels_BAS = torch.zeros(1), torch.tensor([[[5, 6, 7]]])
    places_BL = torch.arange(9)[None]
    windows = Batch(unused, states_BLD, torch.tensor([[2]]), unused, labels_BAS, torch.tensor([[3]]), places_BL)
    # Anchor 2, root 3, labels 4 5 6: predicted from 3 4 5.
    assert before_labels(states_BLD, windows).flatten().tolist() == [3, 4, 5]
    assert label_positions(windows).flatten().tolist() == [3, 4, 5]
    labels_BAS[0, 0, 1:] = -1
    assert label_positions(windows).flatten().tolist() == [3, 3, 3]


@torch.no_grad()
@pytest.mark.parametrize("rows", [WORDS - 1, WORDS + 2])
def test_distillation_compares_the_tokens_that_two_heads_share(rows):
    """A draft model whose lm_head is padded to another size: both distributions are cut, then normalised."""
    torch.manual_seed(1)
    base_head, own_head = (TokenHead(nn.Linear(WIDTH, size, bias=False)) for size in (WORDS, rows))
    one, common = batch(), min(WORDS, rows)
    one.labels_BAS.clamp_(max=common - 1)
    states = torch.randn(2, 5, 4, WIDTH)
    loss = Distill(3, 1.0, kl)(TokenEmissions(states, base_head, own=own_head), one)
    before = before_labels(one.states_BLD, one)
    wanted = kl(
        base_head(before)[..., :common].log_softmax(-1), own_head(states[:, :, :3])[..., :common].log_softmax(-1)
    )
    real = one.labels_BAS >= 0
    assert float(loss.value) == pytest.approx(float(wanted[real].mean()), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("distance", [kl, total_variation])
def test_distillation_within_a_draft_vocabulary_of_the_frames_alone(distance):
    """Labels for which the base's most probable token is outside are left out, and their share is counted."""
    torch.manual_seed(1)
    lm_head, one = nn.Linear(WIDTH, WORDS, bias=False), batch()
    own_head = TokenHead(DraftVocabHead(lm_head, 2, trained=True))
    own_head.words.set_tokens(torch.tensor([0, 2]))
    states = torch.randn(2, 5, 4, WIDTH)
    loss = Distill(3, 1.0, distance)(TokenEmissions(states, TokenHead(lm_head), own=own_head), one)
    values, real = [], 0
    for row, anchor, k, _ in real_labels(one):
        p = lm_head(one.states_BLD[row, int(one.anchors_BA[row, anchor]) + 1 + k])
        real += 1
        if p.argmax() != 1:
            q = lm_head(states[row, anchor, k])[[0, 2]].log_softmax(-1)
            values.append(float(distance(p[[0, 2]].log_softmax(-1), q)))
    assert 0 < len(values) < real
    assert float(loss.value) == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert float(loss.metrics["infeasible_share"]) == pytest.approx(1 - len(values) / real)
