"""How a process that has met others over gloo ends. It knows no run and no work, only that both are done.

gloo's threads let go of an exchange's tensors a moment after it, and for that they ask for the interpreter. Who asks
when it is going down aborts the process, and torchrun calls a finished run failed (pytorch/pytorch#190489).
"""

from __future__ import annotations

import atexit
import time

import torch

LAST_MOMENT = 0.2  # seconds; what a thread needs is microseconds


def leave_at_exit(backend: str) -> None:
    """Of NCCL nothing is asked: its threads hold no tensors."""
    if backend == "gloo":
        atexit.unregister(leave)
        atexit.register(leave)


def leave() -> None:
    """End the threads while the interpreter is there to be asked. Those of a group that somebody still holds, as
    DeepSpeed does, go on: they are given a moment."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(LAST_MOMENT)
