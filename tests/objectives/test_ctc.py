"""The CTC objective against torch's own loss over all logits, and its count of infeasible windows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctcdraft.batch import Batch
from ctcdraft.errors import InputError
from ctcdraft.nn import linear_logsumexp
from ctcdraft.nn.heads import BlankHead, Emissions
from ctcdraft.objectives.ctc import CTC


def emissions(frames: int = 5, vocabulary: int = 9, width: int = 6) -> Emissions:
    torch.manual_seed(0)
    head = BlankHead(nn.Linear(width, vocabulary, bias=False).requires_grad_(False), width)
    head.blank_D.data.normal_()
    return Emissions(torch.randn(2, 7, frames, width, requires_grad=True), head)


def batch(labels, lengths) -> Batch:
    unused = torch.zeros(1)
    return Batch(unused, unused, unused, unused, labels, lengths, unused)


def windows(vocabulary: int = 9, most: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, most + 1, (2, 7), generator=rng)
    labels = torch.randint(0, vocabulary, (2, 7, most), generator=rng)
    return labels.masked_fill(torch.arange(most) >= lengths[..., None], -1), lengths


def torch_loss(outputs: Emissions, labels, lengths) -> torch.Tensor:
    """Return the mean over real windows of the loss per label, by F.ctc_loss over all classes."""
    log_probs = outputs.logits().log_softmax(-1).flatten(0, 1).transpose(0, 1)
    frames = torch.full((labels.shape[0] * labels.shape[1],), outputs.states_BATD.shape[2])
    nll = F.ctc_loss(
        log_probs, labels.flatten(0, 1).clamp(min=0), frames, lengths.flatten(), blank=outputs.blank, reduction="none"
    )
    real = lengths.flatten() > 0
    return (nll[real] / lengths.flatten()[real]).mean()


@pytest.mark.parametrize("block", [linear_logsumexp.BLOCKS["cpu"], (2, 3)])
def test_value_and_gradient_equal_torchs_own(block, monkeypatch):
    monkeypatch.setitem(linear_logsumexp.BLOCKS, "cpu", block)  # (2, 3): two frames, three tokens at a time
    outputs = emissions()
    labels, lengths = windows()
    loss = CTC(labels=3)(outputs, batch(labels, lengths))
    assert torch.allclose(loss.value, torch_loss(outputs, labels, lengths), atol=1e-5)
    ours = torch.autograd.grad(loss.value, [outputs.states_BATD, outputs.head.blank_D, outputs.head.blank_bias])
    theirs = torch.autograd.grad(
        torch_loss(outputs, labels, lengths), [outputs.states_BATD, outputs.head.blank_D, outputs.head.blank_bias]
    )
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_infeasible_windows_are_counted_and_have_no_gradient():
    """Three equal labels need five frames; with four the window is left out."""
    outputs = emissions(frames=4)
    labels, lengths = torch.full((2, 7, 3), 4), torch.full((2, 7), 3)
    labels[0] = torch.tensor([1, 2, 3])
    loss = CTC(labels=3)(outputs, batch(labels, lengths))
    assert loss.metrics["infeasible_share"] == pytest.approx(0.5)
    assert torch.isfinite(loss.value)
    (gradient,) = torch.autograd.grad(loss.value, outputs.states_BATD)
    assert (gradient[1] == 0).all()
    assert (gradient[0] != 0).any()


def test_the_blank_rate_is_the_mean_probability_of_the_blank():
    outputs = emissions()
    labels, lengths = windows()
    lengths = lengths.clamp(min=1)
    labels = labels.clamp(min=0)
    expected = outputs.logits().softmax(-1)[..., -1].mean()
    assert torch.allclose(CTC(labels=3)(outputs, batch(labels, lengths)).metrics["blank_rate"], expected, atol=1e-6)


def test_too_few_frames_are_refused():
    with pytest.raises(InputError, match=r"5 frames cannot emit 6 labels.*drafter\.frames.*objective\.labels"):
        CTC(labels=6)(emissions(), batch(*windows(most=6)))


def test_the_blank_is_a_class_of_its_own():
    outputs = emissions()
    logits = outputs.logits()
    assert logits.shape[-1] == 10
    assert outputs.blank == 9
    assert torch.equal(logits[..., :9], outputs.head.words(outputs.states_BATD))
