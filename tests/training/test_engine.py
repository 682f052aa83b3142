"""One optimiser step of several batches follows the gradient of their mean."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ctcdraft.distributed import Distributed
from ctcdraft.training.engine import MuonEngine, OptimizerSettings, TorchEngine


def engine(kind):
    torch.manual_seed(0)
    module = nn.Linear(32, 32).double()
    settings = OptimizerSettings(
        steps=10, learning_rate=1e-3, warmup_steps=1, min_lr_ratio=0.1, betas=(0.9, 0.95), weight_decay=0.0,
        max_grad_norm=1e9, clip_value=None, autocast=False,
    )  # fmt: skip
    return module, kind(module, list(module.parameters()), settings, Distributed())


def stepped(kind, inputs, batches):
    """Return gradient norm and gradients of a step on the mean square of the outputs, split into so many batches."""
    module, one = engine(kind)
    gradients = []
    one.clip = lambda norm: gradients.extend(p.grad.clone() for p in one.parameters)
    norm = one.step([lambda part=part: module(part).square().mean() for part in inputs.chunk(batches)])
    return norm, gradients


@pytest.mark.parametrize("batches", [2, 3, 6])
@pytest.mark.parametrize("kind", [TorchEngine, MuonEngine])
def test_accumulated_batches_have_the_gradient_of_one_batch_of_all(kind, batches):
    inputs = torch.randn(12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    norm, whole = stepped(kind, inputs, 1)
    norm_of_parts, parts = stepped(kind, inputs, batches)
    assert norm_of_parts == pytest.approx(norm, rel=1e-12)
    assert len(whole) == len(parts) == 2
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
