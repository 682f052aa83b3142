"""Muon on a CPU: torch's updates without bfloat16."""

import pytest
import torch
from torch import nn
from truths_training import slow_orthogonalize

from ctcdraft.training.muon import CPUMuon, orthogonalize

SHAPES = [(32, 32), (32, 80), (80, 32)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_take_the_quintic(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = orthogonalize(matrix, COEFFICIENTS, 5, 1e-7)
    assert torch.allclose(ours, slow_orthogonalize(matrix), atol=1e-9)
    assert torch.allclose(orthogonalize(matrix.float(), COEFFICIENTS, 5, 1e-7).double(), ours, atol=1e-4)


def test_a_gradient_of_zeros_is_no_update():
    assert torch.equal(orthogonalize(torch.zeros(4, 6), COEFFICIENTS, 5, 1e-7), torch.zeros(4, 6))


def trained(kind, shape, steps=6):
    """Return a weight after some steps on random gradients, and the optimiser's state."""
    rng = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(shape, generator=rng))
    unused = nn.Parameter(torch.ones(shape))
    optimizer = kind([weight, unused], lr=0.02, momentum=0.9, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for _ in range(steps):
        weight.grad = torch.randn(shape, generator=rng)
        optimizer.step()
    assert torch.equal(unused, torch.ones(shape))
    return weight.detach(), optimizer.state_dict()


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_those_of_torch_but_for_bfloat16(shape):
    (ours, state), (theirs, their_state) = (trained(kind, shape) for kind in (CPUMuon, torch.optim.Muon))
    start = trained(CPUMuon, shape, steps=0)[0]
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.01 * moved
    assert (ours - start).norm() > 0.5 * moved > 0
    assert torch.equal(state["state"][0]["momentum_buffer"], their_state["state"][0]["momentum_buffer"])
    assert state["param_groups"] == their_state["param_groups"]
