"""Process started by torchrun in test_two_processes.py: items are dealt, then exit while gloo threads wait for the GIL.

torchrun --nproc-per-node 4 tests/training/exit_job.py [held]      held: a reference to the process group is
kept, and the number of threads is not printed, because printing releases the GIL to them
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
    atexit.register(print_remaining_threads)  # registered first, so it runs last
peers = init_distributed("cpu")
held = torch.distributed.group.WORLD if "held" in sys.argv else None
sys.setswitchinterval(1000)  # seconds: other threads get the GIL only where it is released
shares = [[*peers.deal(range(50))], [*peers.deal(["x"])]]
of_all = peers.all_gather_object([shares, torch.ones(10)])
assert sorted(item for (numbers, _), _ in of_all for item in numbers) == list(range(50))
assert [item for (_, texts), _ in of_all for item in texts] == ["x"]
