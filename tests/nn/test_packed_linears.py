"""Linear layers packed into one matrix on an accelerator: the same values and names, fewer launches."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks.simulated.device import SETUP, UNSUPPORTED, active, count, device
from ctcdraft.nn.block_config import BlockConfig
from ctcdraft.nn.logit_correction import GRUCorrection
from ctcdraft.nn.transformer import CausalAttention, GatedMLP

pytestmark = pytest.mark.skipif(SETUP is None, reason=UNSUPPORTED)
SHAPE = BlockConfig(12, 4, 2, 3, 20, 1e-6, 1e4, 32, (1.0,), qk_norm=True, qkv_bias=True)


@pytest.fixture
def x_1ND():
    with active():
        torch.manual_seed(0)
        return torch.randn(1, 5, 12).to(device())


def on_device(module):
    return module.to(device()).requires_grad_(False)


def launches(compute):
    with torch.inference_mode(), count() as report:
        outputs = [part.cpu() for part in compute()]
    return outputs, report.launches.total()


def test_queries_keys_and_values_are_one_product_with_the_same_results(x_1ND):
    attention = on_device(CausalAttention(SHAPE))
    names = list(attention.state_dict())
    expected, apart = launches(lambda: attention.project(x_1ND, 2))
    attention.pack()
    found, together = launches(lambda: attention.project(x_1ND, 2))
    assert apart - together == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert list(attention.state_dict()) == names


def test_gate_and_up_are_one_product_with_the_same_results(x_1ND):
    mlp = on_device(GatedMLP(SHAPE))
    expected, _ = launches(lambda: [F.silu(mlp.gate(x_1ND)) * mlp.up(x_1ND)])
    mlp.pack()
    (found,), together = launches(lambda: [mlp.inner(x_1ND)])
    assert together == 2  # the product, and the operation
    torch.testing.assert_close(found, expected[0])


def test_new_weights_are_used_and_a_moved_layer_is_not_packed(x_1ND):
    mlp, other = on_device(GatedMLP(SHAPE)), on_device(GatedMLP(SHAPE))
    mlp.pack()
    mlp.load_state_dict(other.state_dict())
    other.pack()
    assert torch.equal(launches(lambda: [mlp.inner(x_1ND)])[0][0], launches(lambda: [other.inner(x_1ND)])[0][0])
    assert mlp.packed is not None
    mlp.to(torch.float64)
    assert mlp.packed is None
    assert launches(lambda: [mlp.inner(x_1ND.double())])[0][0].dtype == torch.float64


def test_a_cpu_packs_nothing():
    mlp = GatedMLP(SHAPE)
    mlp.pack()
    assert mlp.packed is None


def test_new_weights_of_a_gru_are_used(x_1ND):
    embedding = torch.nn.Embedding(9, 12)
    gru, other = (on_device(GRUCorrection(embedding, 4, 1e-6)).eval() for _ in range(2))
    read = torch.rand(2, 4).to(device()), torch.tensor([1, 0]).to(device()), torch.tensor([7, 3]).to(device())
    gru.pack()
    assert gru.inputs_VG is not None
    gru.load_state_dict(other.state_dict())
    torch.testing.assert_close(launches(lambda: [gru.extend(*read)])[0], launches(lambda: [other.extend(*read)])[0])
