"""`make gpu PART=kernels`: seconds of captured steps and the kernels in them, with random weights of the 7 B shape.

A step and its three parts are replayed 20 times each between two events of the device, without waiting between parts;
a profile of three replays names the kernels: of the draft, and for `read` (a tree of any shape) of the whole step.

    python -m benchmarks.gpu_kernels FOLDER SECONDS [NAME:NODES ...]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from hydra.utils import instantiate
from torch.profiler import ProfilerActivity, profile

from benchmarks.drafter_cases import random_drafter
from benchmarks.gpu_latency import FULL, LatencyTimer
from ctcdraft.drafters.controls import FullTree
from ctcdraft.errors import run_cli
from ctcdraft.io import write_text

CASES = ("read:1", "read:16", "read:64", "ctc:64", "ctc_gru:64", "medusa:64", "hydra:64", "eagle_dynamic:64")
CONTEXT = 1024
REPLAYS = 20
KERNELS = 40  # that are listed
ROOM = 700  # tokens of the response, so that no cache grows


def main(arguments: Sequence[str]) -> None:
    folder, seconds, *cases = arguments
    deadline, lines = monotonic() + float(seconds), list[str]()
    timer = LatencyTimer(torch.device("cuda"), FULL)
    for case in cases or CASES:
        name, _, nodes = case.partition(":")
        if monotonic() > deadline:
            print(f"no time was left for {case}")
            continue
        for line in steps_of(timer, name, int(nodes)):
            print(line, flush=True)
            lines.append(line)
        write_text(Path(folder) / "kernels.txt", "\n".join(lines) + "\n")


@torch.inference_mode()
def steps_of(timer: LatencyTimer, name: str, nodes: int) -> Iterator[str]:
    """Yield the lines of one drafter; `read`: forward passes over trees of so many nodes."""
    timer.renew_shapes(static=True, compiled=False)
    base, settings = timer.base, instantiate(timer.config.decoding, nodes=nodes, max_new_tokens=ROOM)
    text_L = torch.randint(base.vocabulary, (CONTEXT,), generator=torch.Generator().manual_seed(0)).cuda()
    drafter: Any = FullTree() if name == "read" else random_drafter(name, base)
    shapes = base.static_shapes
    assert shapes is not None
    shapes.generate(base, drafter, text_L, settings, frozenset(), 0, max_steps=4)
    (decoder,) = shapes.decoders.values()
    rows, parts = decoder.rows_behind(CONTEXT + 100), dict[str, Callable[[], Any]]()

    def watch(part: str, replay: Callable[[], Any]) -> None:
        replay()
        parts[part] = replay

    decoder.run(rows, watch=watch)
    step = microseconds(lambda: decoder.run(rows))
    each = ", ".join(f"{part} {microseconds(replay):.1f}" for part, replay in parts.items())
    state = "captured" if decoder.graphs.error is None else f"not captured ({decoder.graphs.error})"
    yield f"{name}, {nodes} nodes, {rows} rows: step {step:.1f} us; {each}; {state}"
    yield from kernels_of((lambda: decoder.run(rows)) if name == "read" else parts["draft"])


def microseconds(call: Callable[[], Any]) -> float:
    """Return the mean time of a call on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(REPLAYS):
        call()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / REPLAYS


def kernels_of(call: Callable[[], Any], times: int = 3) -> Iterator[str]:
    """Yield a line for all kernels of a call, and one for each of those that take most of the time."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
    events = [event for event in events if event.self_device_time_total > 0]
    total, count = (sum(getattr(event, key) for event in events) for key in ("self_device_time_total", "count"))
    yield f"    {count / times:.0f} kernels, {total / times:.0f} us"
    for event in events[:KERNELS]:
        share = f"{event.self_device_time_total / times:9.1f} us {event.count / times:6.1f} x"
        yield f"{share}  {event.key[:110]}"


if __name__ == "__main__":
    run_cli("gpu", main)
