"""The processes that train one head together. It knows numbers and flags that they share; not what is trained.

Every process takes its own batches of a step; gradients are averaged in one exchange, so all of them hold the same
weights and process 0 writes them down for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ctcdraft.errors import InputError
from ctcdraft.leaving import leave_at_exit


class Peers:
    """`world` processes, of which this is number `rank`; one process alone exchanges nothing."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes, prints and probes."""
        return self.rank == 0

    def all_reduce_mean(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its mean over the processes, in place and in one exchange a dtype."""
        if self.world_size == 1:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # in the same order everywhere
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in same])
            torch.distributed.all_reduce(flat)
            flat /= self.world_size
            for tensor, mean in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def any_process(self, *flags: bool) -> list[bool]:
        """Whether a flag is raised by any process."""
        return [any(column) for column in zip(*self.all_gather_object(flags), strict=True)]

    def all_gather_object(self, value: Any) -> list[Any]:
        """What every process has here, by rank."""
        gathered = [value]
        if self.world_size > 1:
            gathered = [None] * self.world_size
            torch.distributed.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        """Until all are here."""
        self.all_gather_object(None)


def launched() -> Peers:
    """Return this process among those that torchrun started together, not joined: a plan exchanges nothing."""
    return Peers(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


def join(device: str) -> Peers:
    """The processes that torchrun started together, or this one alone."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return Peers()
    if device == "cuda":
        raise InputError(f"device=cuda is one device for {world} processes; leave it out, and each takes its own")
    backend = "nccl" if device.startswith("cuda") else "gloo"
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        if not torch.distributed.is_initialized():
            # Process 0 may answer a whole corpus before the others go on.
            torch.distributed.init_process_group(backend, timeout=timedelta(days=2))
            leave_at_exit(backend)
    except (RuntimeError, ValueError) as error:  # a port in use is a DistNetworkError, which is a RuntimeError
        raise InputError(
            f"{world} processes cannot meet at {where} ({str(error).strip().splitlines()[0]}); choose a free port with "
            "torchrun --master-port"
        ) from error
    return Peers(int(os.environ["RANK"]), world)


def share_of(batches: int, peers: Peers) -> list[int]:
    """Which batches of a step are this process's: 4 over 2   ->   0 2 and 1 3."""
    if batches % peers.world_size:
        raise InputError(
            f"trainer.accumulate={batches} batches a step cannot be shared equally by {peers.world_size} processes; make it "
            f"a multiple of {peers.world_size}"
        )
    return list(range(peers.rank, batches, peers.world_size))


def in_turn(peers: Peers, work: Callable[[], Any]) -> Any:
    """Process 0 first, and what it has written down is there for the others."""
    if not peers.is_main:
        peers.barrier()
    result = work()
    if peers.is_main:
        peers.barrier()
    return result
