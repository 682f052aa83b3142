"""Pairwise log-sum-exp of frames and prefixes against full tables: values, gradients and saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.nn import linear_logsumexp
from ctcdraft.nn.linear_logsumexp import pairwise_logsumexp, token_logits

WINDOWS, FRAMES, PREFIXES, WIDTH, RANK, VOCABULARY = 5, 4, 3, 3, 2, 11


def parts(dtype: torch.dtype, bias: bool = True) -> list[Tensor | None]:
    """Trained states, memories and table; frozen lm_head and bias."""
    rng = torch.Generator().manual_seed(3)
    shapes = (
        (WINDOWS, FRAMES, WIDTH),
        (WINDOWS, PREFIXES, RANK),
        (VOCABULARY, RANK),
        (VOCABULARY, WIDTH),
        (VOCABULARY,),
    )
    values: list[Tensor | None] = [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*(one.requires_grad_() for one in values[:3]), values[3], values[4] if bias else None]


def full(states, memories, table, lm_head, bias) -> Tensor:
    """The reference: every sum over all tokens."""
    return (F.linear(states, lm_head, bias)[:, :, None] + F.linear(memories, table)[:, None]).logsumexp(-1)


@pytest.mark.parametrize("block", [linear_logsumexp.BLOCKS["cpu"], (14, 4), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_all_sums(bias, block, monkeypatch):
    monkeypatch.setitem(linear_logsumexp.BLOCKS, "cpu", block)
    given = parts(torch.float64, bias)
    ours, theirs = pairwise_logsumexp(*given), full(*given)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    weights = torch.randn(ours.shape, dtype=ours.dtype)  # any loss
    for a, b in zip(*(torch.autograd.grad((weights * one).sum(), given[:3]) for one in (ours, theirs)), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_gradcheck(monkeypatch):
    monkeypatch.setitem(linear_logsumexp.BLOCKS, "cpu", (14, 4))
    assert torch.autograd.gradcheck(pairwise_logsumexp, parts(torch.float64))


@pytest.mark.parametrize("block", [linear_logsumexp.BLOCKS["cpu"], (1, 1)])
def test_tokens_that_disagree_beyond_float32_leave_a_finite_gradient(block, monkeypatch):
    """The frame favours one token by e^200, the prefix the other; the exact value is 200 + log 2."""
    monkeypatch.setitem(linear_logsumexp.BLOCKS, "cpu", block)
    learned = [torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([[0.0], [200.0]])]
    value = pairwise_logsumexp(*(one.requires_grad_() for one in learned), torch.tensor([[200.0], [0.0]]), None)
    value.sum().backward()
    assert value.isfinite().all()
    assert all(one.grad.isfinite().all() for one in learned)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_rounds_logits_and_no_sums(autocast):
    """In bfloat16 a sum of 500 exponentials is off by up to 1 in 256, which no label's own score would be."""
    rng = torch.Generator().manual_seed(4)
    states, memories, table, lm_head = (
        torch.randn(shape, generator=rng) for shape in ((2, 4, 8), (2, 3, 5), (500, 5), (500, 8))
    )
    given = lm_head if autocast else lm_head.bfloat16()
    rounded = F.linear(states.bfloat16(), lm_head.bfloat16()).double()
    table_dtype = torch.bfloat16 if autocast else torch.float32  # without autocast the table is not rounded
    added = F.linear(memories.to(table_dtype), table.to(table_dtype)).double()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        values = pairwise_logsumexp(states, memories, table, given, None)
    assert values.dtype == torch.float32
    assert (values - (rounded[:, :, None] + added[:, None]).logsumexp(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("autocast", [False, True])
def test_probabilities_do_not_exceed_one_in_half_precision(autocast):
    rng = torch.Generator().manual_seed(5)
    lm_head = torch.randn(300, 256, generator=rng).bfloat16()
    labels = torch.arange(60)[:, None]
    states = (0.13 * lm_head[labels].float()).requires_grad_()  # logits of about 33, the next ones far below
    memories, table = torch.ones(60, 1, 2), torch.zeros(300, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = lm_head.float() if autocast else lm_head
        score = token_logits(states, given, None, labels) - pairwise_logsumexp(states, memories, table, given, None)
    assert score.abs().max() < 1e-5
    (gradient,) = torch.autograd.grad(score.sum(), states)
    assert gradient.abs().max() < 1e-3  # the label is certain already


def test_nothing_of_the_size_of_the_vocabulary_is_kept_but_the_weights():
    given = parts(torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        pairwise_logsumexp(*given)
    weights = [one.data_ptr() for one in given[2:]]
    assert kept
    assert not [tensor.shape for tensor in kept if VOCABULARY in tensor.shape and tensor.data_ptr() not in weights]


def test_a_trainable_lm_head_is_refused():
    states, memories, table, lm_head, bias = parts(torch.float32)
    with pytest.raises(ValueError, match="freeze it"):
        pairwise_logsumexp(states, memories, table, lm_head.requires_grad_(), bias)
