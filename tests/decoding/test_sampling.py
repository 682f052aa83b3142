"""`warp` against plain floats, and the noise: uniform, independent of batch shape, keyed by seed and position."""

import math

import pytest
import torch
from truths import slow_warp

from ctcdraft.decoding.sampling import GumbelNoise, warp


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.5), (100, 0.01)])
def test_warp_equals_the_slow_twin(temperature, top_k, top_p):
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 9, generator=rng, dtype=torch.float64)
    expected = torch.tensor([slow_warp(row, temperature, top_k, top_p) for row in logits.tolist()])
    assert torch.allclose(warp(logits, temperature, top_k, top_p).exp(), expected.double(), atol=1e-12)


def test_noise_depends_on_seed_position_and_token_only():
    noise = GumbelNoise(7)
    positions = torch.tensor([3, 900, 4])
    together = noise.gumbel(positions, 50)
    alone = torch.cat([noise.gumbel(p[None], 80)[:, :50] for p in positions])
    assert torch.equal(together, alone)
    assert not torch.equal(together, GumbelNoise(8).gumbel(positions, 50))


def test_noise_is_uniform_and_uncorrelated():
    u = GumbelNoise(1).uniform(torch.arange(400), 500)
    assert u.min() > 0
    assert u.max() < 1
    tenths = torch.histc(u.float(), 10, 0, 1) / u.numel()
    assert (tenths - 0.1).abs().max() < 5 * math.sqrt(0.09 / u.numel())
    for left, right in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:]), (u, GumbelNoise(2).uniform(torch.arange(400), 500))):
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(left.numel())


def test_known_bits():
    """The first output of SplitMix64 with state 0 is 0xE220A8397B1DCDAF; scrambling its increment gives it."""
    from ctcdraft.decoding.sampling import SPLITMIX_INCREMENT, splitmix64_finalise

    assert int(splitmix64_finalise(torch.tensor(SPLITMIX_INCREMENT))) == 0xE220A8397B1DCDAF - 2**64
