"""`make gpu PART=kernels` without a device: its command, and the times of a step and of its parts."""

import pytest
import torch

from benchmarks import gpu, gpu_kernels, gpu_latency
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.static_step import StaticDecoder
from ctcdraft.errors import InputError


def test_kernels_need_a_device(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="device=cpu captures no steps"):
        gpu.main(["kernels", "device=cpu", f"out={tmp_path}"])
    commands = []
    monkeypatch.setattr(gpu, "run_logged", lambda *call: commands.append(call))
    gpu.run_kernels(torch.device("cuda"), tmp_path, gpu.monotonic() + 200)
    assert commands[0][0] == ["-m", "benchmarks.gpu_kernels", str(tmp_path), "140"]


class Clock:
    """An event of a device on which every call takes 7 microseconds."""

    now = 0.0

    def __init__(self, enable_timing):
        self.time = None

    def record(self):
        self.time = Clock.now

    def elapsed_time(self, end):
        return end.time - self.time


def test_times_of_a_step_and_its_parts(monkeypatch):
    def passes_time(part):
        Clock.now += 0.007 * (3 if part == "step" else 1)

    def run(decoder, rows, first=None, watch=None):
        for part in ("draft", "read", "commit") if watch else ("step",):
            (watch or (lambda part, replay: replay()))(part, lambda part=part: passes_time(part))

    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(gpu_kernels, "kernels_of", lambda call: iter(["kernels"]))
    monkeypatch.setattr(gpu_kernels, "CONTEXT", 16)
    monkeypatch.setattr(gpu_kernels, "ROOM", 100)
    timer = gpu_latency.LatencyTimer(torch.device("cpu"), gpu_latency.SMALL)
    generate = StaticShapes.generate

    def generated(*given, **options):
        generate(*given, **options)
        monkeypatch.setattr(StaticDecoder, "run", run)

    monkeypatch.setattr(StaticShapes, "generate", generated)
    step, kernels = gpu_kernels.steps_of(timer, "ctc", 8)
    assert step == "ctc, 8 nodes, 256 rows: step 21.0 us; draft 7.0, read 7.0, commit 7.0; captured"
    assert kernels == "kernels"
