"""Fused log-sum-exp scores against full logits: values, gradients and saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.forward import log_likelihood
from ctcdraft.nn import linear_logsumexp
from ctcdraft.nn.linear_logsumexp import (
    blank_logits,
    fused_linear_logsumexp,
    label_and_blank_log_probs,
    token_logits,
)

WINDOWS, FRAMES, WIDTH, VOCABULARY, LABELS = 5, 4, 3, 11, 2


def parts(dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    labels_XS = torch.randint(0, VOCABULARY, (WINDOWS, LABELS), generator=rng)
    states, lm_head, bias_V = (
        normal(WINDOWS, FRAMES, WIDTH),
        normal(VOCABULARY, WIDTH),
        normal(VOCABULARY) if bias else None,
    )
    return (
        states.requires_grad_(),
        lm_head,
        bias_V,
        normal(WIDTH).requires_grad_(),
        normal().requires_grad_(),
        labels_XS,
    )


def full(states, lm_head, bias, blank_D, blank_bias, labels) -> tuple[Tensor, Tensor]:
    """The reference: all classes, one softmax."""
    logits = torch.nn.functional.linear(states, torch.cat([lm_head, blank_D[None]]))
    logits = logits + torch.cat(
        [torch.zeros(VOCABULARY, dtype=states.dtype) if bias is None else bias, blank_bias.view(1)]
    )
    log_probs = logits.log_softmax(dim=-1)
    return log_probs.gather(-1, labels[:, None].expand(-1, FRAMES, -1)), log_probs[..., -1]


@pytest.mark.parametrize("block", [linear_logsumexp.BLOCKS["cpu"], (7, 4), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_scores_and_gradients_are_those_of_full_logits(bias, block, monkeypatch):
    monkeypatch.setitem(linear_logsumexp.BLOCKS, "cpu", block)  # (1, 1): a block is one token in one frame
    given = parts(torch.float64, bias)
    learned = [given[0], given[3], given[4]]
    ours, theirs = label_and_blank_log_probs(*given), full(*given)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    weights = [torch.randn(score.shape, dtype=score.dtype) for score in ours]  # any loss of the scores
    gradients = [
        torch.autograd.grad(sum((w * score).sum() for w, score in zip(weights, scores, strict=True)), learned)
        for scores in (ours, theirs)
    ]
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_gradcheck(monkeypatch):
    monkeypatch.setitem(linear_logsumexp.BLOCKS, "cpu", (7, 4))
    given = parts(torch.float64, True)
    assert torch.autograd.gradcheck(label_and_blank_log_probs, given)


@pytest.mark.parametrize("block", [(512, 1024), (1, 1)])
def test_large_logits_neither_overflow_nor_vanish(block, monkeypatch):
    """Of 11 logits from -1000 to 1000 the largest is the result, wherever in the vocabulary it is."""
    monkeypatch.setitem(linear_logsumexp.BLOCKS, "cpu", block)
    for lm_head_VD in (
        torch.linspace(-1000, 1000, VOCABULARY)[:, None],
        torch.linspace(1000, -1000, VOCABULARY)[:, None],
    ):
        state = torch.ones(1, 1, requires_grad=True)
        value = fused_linear_logsumexp(state, lm_head_VD, None)
        value.backward()
        assert value.item() == state.grad.item() == 1000


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_the_loss_and_its_gradient_are_those_of_full_emissions(dtype, bound):
    """From hidden states to gradients, against log_softmax and torch's CTC loss; a third of the windows infeasible."""
    rng = torch.Generator().manual_seed(0)
    states_XTD = torch.randn(60, 5, 16, generator=rng, dtype=dtype).requires_grad_()
    rows_CD = torch.randn(201, 16, generator=rng, dtype=dtype)
    blank_D = rows_CD[-1].clone().requires_grad_()
    labels_XS = torch.randint(200, (60, 4), generator=rng)
    labels_XS[::3] = labels_XS[::3, :1].clone()  # four times the same token needs seven frames
    lengths_X = torch.full((60,), 4)

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, (states_XTD, blank_D), retain_graph=True))

    scores = label_and_blank_log_probs(states_XTD, rows_CD[:-1], None, blank_D, states_XTD.new_zeros(()), labels_XS)
    value_X = log_likelihood(*scores, labels_XS, lengths_X)
    ours = -value_X.where(value_X.isfinite(), 0).sum()
    log_probs = (states_XTD @ torch.cat([rows_CD[:-1], blank_D[None]]).T).log_softmax(-1).transpose(0, 1)
    frames_X = torch.full((60,), 5)
    native = F.ctc_loss(log_probs, labels_XS, frames_X, lengths_X, 200, "sum", zero_infinity=True)
    assert value_X.isinf().sum() == 20
    assert abs(ours - native) <= bound * native
    for a, b in zip(gradients(ours), gradients(native), strict=True):
        assert (a - b).norm() <= bound * b.norm()
    assert gradients(ours)[0][::3].count_nonzero() == 0


def test_gradients_of_the_states_are_summed_in_the_order_of_recorded_runs():
    """Labels, blank, log-sum-exp: another order changes the last bits, and with them the weights of every run."""
    rng = torch.Generator().manual_seed(0)
    states_XTD, lm_head_VD, blank_D = (torch.randn(size, generator=rng) for size in ((60, 5, 16), (200, 16), (16,)))
    labels_XS, blank_bias = torch.randint(200, (60, 4), generator=rng), torch.zeros(1)
    weights_XTS = torch.randn(60, 5, 4, generator=rng)

    def loss(label_XTS: Tensor, blank_XT: Tensor) -> Tensor:
        return (weights_XTS * label_XTS).sum() + blank_XT.square().sum()

    copies = [states_XTD.clone().requires_grad_() for _ in range(3)]  # one for each way to the loss
    logsumexp_XT = fused_linear_logsumexp(copies[2], lm_head_VD, None)
    blank_XT = blank_logits(copies[1], blank_D, blank_bias)
    label_XTS = token_logits(copies[0], lm_head_VD, None, labels_XS)
    normaliser_XT = torch.logaddexp(logsumexp_XT, blank_XT)
    loss(label_XTS - normaliser_XT[..., None], blank_XT - normaliser_XT).backward()
    of_labels, of_blank, of_logsumexp = (copy.grad for copy in copies)

    states_XTD.requires_grad_()
    loss(*label_and_blank_log_probs(states_XTD, lm_head_VD, None, blank_D, blank_bias, labels_XS)).backward()
    assert torch.equal(states_XTD.grad, of_labels + of_blank + of_logsumexp)
    assert not torch.equal(states_XTD.grad, of_labels + of_logsumexp + of_blank)


def test_a_bfloat16_head_gives_float32_scores_near_the_exact_ones():
    states, lm_head, _, blank_D, blank_bias, labels = parts(torch.float32, False)
    half = label_and_blank_log_probs(states, lm_head.bfloat16(), None, blank_D, blank_bias, labels)
    exact = full(states, lm_head.bfloat16().float(), None, blank_D, blank_bias, labels)
    for a, b in zip(half, exact, strict=True):
        assert a.dtype == torch.float32
        assert torch.allclose(a, b, atol=0.1)
        assert not torch.equal(a, b)


def test_nothing_of_the_size_of_the_vocabulary_is_kept_but_the_frozen_weights():
    given = parts(torch.float32, False)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        label_and_blank_log_probs(*given)
    assert kept
    assert not [tensor.shape for tensor in kept if VOCABULARY in tensor.shape and tensor is not given[1]]


def test_a_trainable_lm_head_is_refused():
    states, lm_head, *residual = parts(torch.float32, False)
    with pytest.raises(ValueError, match="freeze it"):
        label_and_blank_log_probs(states, lm_head.requires_grad_(), *residual)


@pytest.mark.parametrize("autocast", [False, True])
def test_probabilities_do_not_exceed_one_in_half_precision(autocast):
    """Numerator and denominator are rounded alike: else half of these probabilities come out up to 1.13."""
    rng = torch.Generator().manual_seed(5)
    lm_head = torch.randn(300, 256, generator=rng).bfloat16()
    labels = torch.arange(60)[:, None]
    states = (0.13 * lm_head[labels].float()).requires_grad_()  # logits of about 33, the next ones far below
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = lm_head.float() if autocast else lm_head
        label_XTS, _ = label_and_blank_log_probs(states, given, None, torch.zeros(256), torch.zeros(1), labels)
    assert label_XTS.dtype == torch.float32
    assert label_XTS.abs().max() < 1e-5
    (gradient,) = torch.autograd.grad(label_XTS.sum(), states)
    assert gradient.abs().max() < 1e-3  # the label is certain already
