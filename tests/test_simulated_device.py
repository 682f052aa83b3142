"""The simulated accelerator and its graphs: what is counted, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.simulated.capture import capture
from benchmarks.simulated.device import SETUP, UNSUPPORTED, active, count, device
from benchmarks.simulated.rules import DeviceError, without_kernels
from benchmarks.simulated.stream import CaptureError
from ctcdraft.nn.block_operations import silu_gated

pytestmark = pytest.mark.skipif(SETUP is None, reason=UNSUPPORTED)


@pytest.fixture
def x_23():
    with active():
        return torch.arange(6.0).reshape(2, 3).to(device())


def index(x_23, position=0):
    return torch.full((), position, dtype=torch.int64, device=x_23.device)


def attended(x_23, dtype, width):
    """Attention to keys made by a launch, under a mask made by a launch."""
    keys, mask = x_23.new_zeros(1, 1, width, 3), torch.ones(2, width, dtype=dtype, device=x_23.device)
    return torch.nn.functional.scaled_dot_product_attention(x_23[None, None], keys, keys, mask)


COUNTED = {  # operation -> launches, transfers, synchronisations
    "elementwise": (lambda x: x + x, (1, 0, 0)),
    "host scalar": (lambda x: x * torch.tensor(2.0), (1, 0, 0)),
    "view": (lambda x: x.T[:, 0].reshape(-1), (0, 0, 0)),
    "empty": (lambda x: torch.empty(3, device=x.device), (0, 0, 0)),
    "zeros": (lambda x: torch.zeros(3, device=x.device), (1, 0, 0)),
    "cat": (lambda x: torch.cat([x, x]), (1, 0, 0)),
    "linear": (lambda x: torch.nn.functional.linear(x, x), (1, 0, 0)),
    "bias": (lambda x: torch.addmm(x[0], x[:, :2], x), (1, 0, 0)),
    "matrix and product": (lambda x: torch.addmm(x, x[:, :2], x), (2, 0, 0)),
    "product in place": (lambda x: x.addmm_(x[:, :2].clone(), x.clone()), (3, 0, 0)),
    "attention": (lambda x: attended(x, torch.float32, 16), (3, 0, 0)),
    "under truth values": (lambda x: attended(x, torch.bool, 16), (5, 0, 0)),
    "of an odd width": (lambda x: attended(x, torch.float32, 15), (5, 0, 0)),
    "slice fill": (lambda x: x[0].__setitem__(slice(2), 1.0), (1, 0, 0)),
    "masked fill": (lambda x: x.__setitem__(x > 1, 0.0), (2, 0, 0)),
    "device index": (lambda x: x[torch.zeros(2, dtype=torch.int64, device=x.device)], (2, 0, 0)),
    "item": (lambda x: x[0, 0].item(), (0, 1, 1)),
    "bool": (lambda x: bool(x[0, 0]), (0, 1, 1)),
    "tolist": (lambda x: x.tolist(), (0, 1, 1)),
    "cpu": (lambda x: x.cpu(), (0, 1, 1)),
    "numpy": (lambda x: x.numpy(force=True), (0, 1, 1)),
    "nonzero": (lambda x: x.nonzero(), (1, 0, 1)),
    "unique": (lambda x: x.unique(), (1, 0, 1)),
    "masked_select": (lambda x: x.masked_select(x > 1), (2, 0, 1)),
    "boolean index": (lambda x: x[x > 1], (2, 0, 1)),
    "index of a scalar": (lambda x: x[index(x)], (1, 1, 1)),
    "one element": (lambda x: x.__setitem__((0, 0), 1.0), (0, 1, 1)),
    "to device": (lambda x: torch.ones(2).to(x.device), (0, 1, 1)),
    "tensor": (lambda x: torch.tensor([1, 2], device=x.device), (0, 1, 1)),
    "pinned": (lambda x: torch.ones(2, pin_memory=True).to(x.device, non_blocking=True), (0, 1, 0)),
    "asynchronous": (lambda x: torch.empty(2, 3).copy_(x, non_blocking=True), (0, 1, 0)),
    "synchronize": (lambda x: torch.get_device_module(x.device).synchronize(), (0, 0, 1)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts(name, x_23):
    operation, expected = COUNTED[name]
    with torch.inference_mode(), count() as report:
        operation(x_23)
    totals = report.totals()
    assert (totals["launches"], totals["transfers"], totals["synchronisations"]) == expected, str(report)


def test_causes_are_source_lines(x_23):
    with count() as report:
        x_23.sum().item()
    assert re.search(r"synchronisations: 1\n +1 tests/test_simulated_device\.py:\d+ item", str(report))


def test_operands_on_two_devices_are_refused(x_23):
    for mixed in (
        lambda: x_23 + torch.ones(2, 3),
        lambda: torch.cat([x_23, torch.ones(2, 3)]),
        lambda: x_23 @ torch.ones(3, 3),
    ):
        with pytest.raises(DeviceError, match="operands on cpu"):
            mixed()
    with active(), pytest.raises(RuntimeError, match="the generator is on the host"):
        torch.rand(2, device=device(), generator=torch.Generator())


def test_an_asynchronous_copy_arrives_at_the_wait(x_23):
    host_23 = torch.zeros(2, 3)
    with count() as report:
        host_23.copy_(x_23, non_blocking=True)
        event = torch.Event(x_23.device)
        event.record()
        x_23.add_(1)  # after the copy
        assert not event.query()
        assert host_23.sum() == 0
        event.synchronize()
    assert host_23.sum() == 15
    assert report.totals()["synchronisations"] == 1


def test_random_numbers_are_those_of_the_cpu():
    with active():
        on_device = torch.rand(4, device=device(), generator=torch.Generator(device()).manual_seed(3))
    assert torch.equal(on_device.cpu(), torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_tied_weights_stay_tied():
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    both = torch.nn.Sequential(first, second).to(device())
    assert both[0].weight is both[1].weight
    assert both[0].weight.device == device()


REFUSED = {
    "item": lambda x: x[0, 0].item(),
    "boolean index": lambda x: x[x > 1],
    "host scalar": lambda x: x * torch.tensor(2.0),
    "from the host": lambda x: x.copy_(torch.ones(2, 3)),
    "to the host": lambda x: x.cpu(),
    "one element": lambda x: x.__setitem__((0, 0), 1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_refuses(name, x_23):
    with pytest.raises(CaptureError, match=r"tests/test_simulated_device\.py:\d+"), torch.inference_mode(), capture():
        REFUSED[name](x_23)


def test_a_graph_replays_on_the_same_memory(x_23):
    before_23, host_3 = x_23.clone(), torch.zeros(3)
    with torch.inference_mode(), capture() as graph:
        total_3 = (x_23.mul_(2)).sum(dim=0)
        host_3.copy_(total_3, non_blocking=True)
    assert torch.equal(x_23.cpu(), before_23.cpu())  # a capture executes nothing
    assert total_3.isnan().all()
    for factor in (2, 4):
        graph.replay()
        assert total_3.tolist() == [3.0 * factor, 5.0 * factor, 7.0 * factor]
        assert host_3.tolist() == total_3.tolist()


def test_a_number_of_python_is_frozen_in_a_graph(x_23):
    def step(position: int):
        return x_23[0] + position

    with torch.inference_mode(), capture() as graph:
        row_3 = step(1)
    graph.replay()
    assert torch.equal(row_3.cpu(), step(1).cpu())
    graph.replay()
    assert not torch.equal(row_3.cpu(), step(2).cpu())  # the second step of the text is at another position


def test_an_operation_counts_its_kernels_and_can_be_taken_apart(x_23):
    def gated():
        return silu_gated(x_23.view(3, 2))

    with torch.inference_mode():
        with count() as with_kernel:
            expected = gated().cpu()
        with without_kernels(["silu_gated"]), count() as in_torch:
            assert torch.equal(gated().cpu(), expected)
    assert (with_kernel.launches.total(), in_torch.launches.total()) == (silu_gated.launches, 2)
