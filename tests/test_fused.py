"""Fused operations: the device and the machine that their kernels run on."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fused_parts import needs_triton

from ctcdraft import fused


def doubled(factor, x_3):
    return x_3 * factor


@pytest.fixture
def operation(monkeypatch):
    """An operation whose kernels add 1, to tell them from the definition."""
    monkeypatch.setitem(sys.modules, "kernels_of_a_test", SimpleNamespace(doubled=lambda factor, x_3: x_3 * factor + 1))
    fused.runs_triton.cache_clear()
    yield fused.Operation(doubled, "kernels_of_a_test", 1)
    fused.runs_triton.cache_clear()


def test_kernels_are_launched_on_the_device_of_their_tensors(operation, monkeypatch):
    """Triton takes the current device, which need not be that of the tensors."""
    devices = []

    @contextmanager
    def device_of(tensor):
        devices.append(tensor)
        yield
        devices.append("left")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x_3 = torch.ones(3)
    assert operation.launch(2, x_3).tolist() == [3, 3, 3]
    assert devices[0] is x_3
    assert devices[1:] == ["left"]


def test_without_a_compiler_the_definitions_run(operation, monkeypatch):
    def probe(device):
        raise OSError("Failed to find C compiler")

    monkeypatch.setattr(fused, "has_triton", lambda: True)
    monkeypatch.setitem(sys.modules, "ctcdraft.triton_parts", SimpleNamespace(probe=probe))
    with pytest.warns(UserWarning, match=r"no kernels of Triton here \(Failed to find C compiler\)"):
        assert operation.on_cuda(2, torch.ones(3)).tolist() == [2, 2, 2]
    assert operation.on_cuda(2, torch.ones(3)).tolist() == [2, 2, 2]  # asked once
    fused.runs_triton.cache_clear()
    monkeypatch.setitem(sys.modules, "ctcdraft.triton_parts", SimpleNamespace(probe=lambda device: None))
    assert operation.on_cuda(2, torch.ones(3)).tolist() == [3, 3, 3]


@needs_triton
def test_the_probe_runs_a_kernel():
    from ctcdraft.triton_parts import probe

    assert probe(torch.device("cpu")).tolist() == [1.0] * 16
