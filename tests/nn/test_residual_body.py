"""Residual bodies of any size: identity at first, gradients from the first step, parameters as the width determines."""

from types import SimpleNamespace

import pytest
import torch

from ctcdraft.errors import InputError
from ctcdraft.nn.bodies import ResidualBody

SHAPE = SimpleNamespace(width=8)


def size(body) -> int:
    return sum(value.numel() for value in body.parameters())


@pytest.mark.parametrize("inner", [None, 3, 20])
def test_a_body_starts_as_the_identity_and_learns(inner):
    torch.manual_seed(0)
    body = ResidualBody(SHAPE, 2, blocks=1, inner=inner)
    state_BAD = torch.randn(1, 5, 8)
    frames_BATD = body(state_BAD)
    assert torch.equal(frames_BATD, state_BAD[:, :, None].expand(-1, -1, 2, -1))
    frames_BATD.square().sum().backward()
    assert all(any(value.grad.abs().sum() > 0 for value in blocks.parameters()) for blocks in body.heads)


def test_the_inner_width_determines_the_parameters():
    sizes = [size(ResidualBody(SHAPE, 2, blocks=1, inner=inner)) for inner in (1, 2, 3)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == 2 * (8 + 1 + 8)
    assert size(ResidualBody(SHAPE, 2, blocks=1)) == 2 * (8 * 8 + 8)  # Medusa's own
    names = set(ResidualBody(SHAPE, 1, blocks=1).state_dict())
    assert names == {"heads.0.0.weight", "heads.0.0.bias"}  # as in checkpoints without an inner width
    with pytest.raises(InputError, match=r"drafter\.body\.inner.*0"):
        ResidualBody(SHAPE, 2, blocks=1, inner=0)
