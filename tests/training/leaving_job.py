"""What every process of a torchrun does in test_peers.py: exchange something and end at once, its threads kept waiting.

torchrun --nproc-per-node 4 tests/training/leaving_job.py [held]      held: somebody goes on holding the group; who is
left is not said then, for printing lets threads have the interpreter
"""

from __future__ import annotations

import atexit
import sys
from pathlib import Path

import torch

from ctcdraft.distributed import init_distributed


def print_remaining_threads() -> None:
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print(f"{sum('gloo' in name for name in threads)} threads left\n", end="", flush=True)


if "held" not in sys.argv:
    atexit.register(print_remaining_threads)  # the first told is the last asked
peers = init_distributed("cpu")
held = torch.distributed.group.WORLD if "held" in sys.argv else None
sys.setswitchinterval(1000)  # seconds: who asks for the interpreter gets it only where it is given away
peers.all_gather_object([torch.ones(10)])
