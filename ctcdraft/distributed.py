"""Processes that train one head together, started by torchrun, and shards of work that need no communication.

Every process takes its own batches of a step; gradients are averaged in one collective, so that all hold the same
weights, and rank 0 writes them.

gloo's worker threads release the tensors of a collective shortly after it and need the interpreter for that. If the
interpreter is already finalizing, the process aborts and torchrun reports a finished run as failed
(pytorch/pytorch#190489); so the process group is destroyed at exit.

torch is imported in the functions that communicate: a command line is checked before torch is imported.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from ctcdraft.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


class Distributed:
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
        import torch

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
        import torch

        gathered = [value]
        if self.world_size > 1:
            gathered = [None] * self.world_size
            torch.distributed.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        """Until all are here."""
        self.all_gather_object(None)


def from_environment() -> Distributed:
    """Return this process among those that torchrun started together, not joined: a plan exchanges nothing."""
    return Distributed(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


def init_distributed(device: str) -> Distributed:
    """The processes that torchrun started together, or this one alone."""
    import torch

    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return Distributed()
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
            shut_down_gloo_at_exit(backend)
    except (RuntimeError, ValueError) as error:  # a port in use is a DistNetworkError, which is a RuntimeError
        raise InputError(
            f"{world} processes cannot meet at {where} ({str(error).strip().splitlines()[0]}); choose a free port with "
            "torchrun --master-port"
        ) from error
    return Distributed(int(os.environ["RANK"]), world)


def local_batches(batches: int, peers: Distributed) -> list[int]:
    """Which batches of a step are this process's: 4 over 2   ->   0 2 and 1 3."""
    if batches % peers.world_size:
        raise InputError(
            f"trainer.accumulate={batches} batches a step cannot be shared equally by {peers.world_size} processes; "
            "make it "
            f"a multiple of {peers.world_size}"
        )
    return list(range(peers.rank, batches, peers.world_size))


def main_process_first(peers: Distributed, work: Callable[[], Any]) -> Any:
    """Process 0 first, and what it has written down is there for the others."""
    if not peers.is_main:
        peers.barrier()
    result = work()
    if peers.is_main:
        peers.barrier()
    return result


THREAD_EXIT_SECONDS = 0.2  # seconds; what a thread needs is microseconds


def shut_down_gloo_at_exit(backend: str) -> None:
    """Of NCCL nothing is asked: its threads hold no tensors."""
    if backend == "gloo":
        atexit.unregister(shut_down_gloo)
        atexit.register(shut_down_gloo)


def shut_down_gloo() -> None:
    """End the threads while the interpreter is there to be asked. Those of a group that somebody still holds, as
    DeepSpeed does, go on: they are given a moment."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(THREAD_EXIT_SECONDS)


@dataclass(frozen=True)
class Shard:
    """Every `of`-th piece, starting with the `number`-th: 1/4, 2/4, 3/4 and 4/4 together take all."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        number, _, of = str(text).partition("/")
        if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
            raise InputError(f"shard={text} is not i/N with i from 1 to N; for the first of four say shard=1/4")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"-{self.number}-of-{self.of}" if self.of > 1 else ""

    @property
    def siblings(self) -> str:
        """A pattern for the names of all shards of this split."""
        return f"-*-of-{self.of}" if self.of > 1 else ""

    def takes(self, piece: int) -> bool:
        """Whether piece number `piece`, counted from 0, is this shard's."""
        return piece % self.of == self.number - 1
