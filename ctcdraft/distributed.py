"""Data-parallel training under torchrun, and shards of work that need no communication.

Every process computes its own batches of a step; gradients are averaged in one all-reduce, so that all processes hold
the same weights, and rank 0 writes them. torch is imported in the functions that communicate: a command line is checked
before torch is imported.
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


@dataclass
class Distributed:
    """Rank and world size of this process, and the collective operations; with one process these do nothing."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files, prints and validates."""
        return self.rank == 0

    def all_reduce_mean(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its mean over the processes, in place, with one all-reduce per dtype."""
        import torch

        if self.world_size == 1:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # in the same order in every process
            group = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in group])
            torch.distributed.all_reduce(flat)
            flat /= self.world_size
            for tensor, mean in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def any_process(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is True in any process."""
        return [any(column) for column in zip(*self.all_gather_object(flags), strict=True)]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the `value` of every process, by rank."""
        import torch

        gathered = [value]
        if self.world_size > 1:
            gathered = [None] * self.world_size
            torch.distributed.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        """Wait until every process has called this."""
        self.all_gather_object(None)


def from_environment() -> Distributed:
    """Return rank and world size as torchrun set them, without joining a process group."""
    return Distributed(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


def init_distributed(device: str) -> Distributed:
    """Join the process group of torchrun, if this process was started by it, and return it."""
    import torch

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        return Distributed()
    if device == "cuda":
        raise InputError(f"device=cuda is one device for {world_size} processes; leave it out to give each its own")
    backend = "nccl" if device.startswith("cuda") else "gloo"
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        if not torch.distributed.is_initialized():
            # The others wait while process 0 generates the responses of a whole corpus.
            torch.distributed.init_process_group(backend, timeout=timedelta(days=2))
            shut_down_gloo_at_exit(backend)
    except (RuntimeError, ValueError) as error:  # a port in use is a DistNetworkError, which is a RuntimeError
        raise InputError(
            f"{world_size} processes cannot connect at {address} ({str(error).strip().splitlines()[0]}); choose a free "
            "port with torchrun --master-port"
        ) from error
    return Distributed(int(os.environ["RANK"]), world_size)


def local_batches(batches: int, peers: Distributed) -> list[int]:
    """Return the indices of the batches of a step that this process computes: 4 over 2   ->   0 2 and 1 3."""
    if batches % peers.world_size:
        raise InputError(
            f"trainer.gradient_accumulation_steps must be a multiple of the {peers.world_size} processes, got {batches}"
        )
    return list(range(peers.rank, batches, peers.world_size))


def main_process_first(peers: Distributed, work: Callable[[], Any]) -> Any:
    """Call `work` in process 0, then in the others, which find the files that process 0 wrote."""
    if not peers.is_main:
        peers.barrier()
    result = work()
    if peers.is_main:
        peers.barrier()
    return result


def shut_down_gloo_at_exit(backend: str) -> None:
    if backend == "gloo":  # the threads of NCCL hold no tensors
        atexit.unregister(shut_down_gloo)  # so that a second call does not register it twice
        atexit.register(shut_down_gloo)


def shut_down_gloo() -> None:
    """Destroy the process group, which ends its threads while the interpreter still runs."""
    import torch

    # gloo's worker threads release the tensors of a collective shortly after it and need the interpreter for that. If
    # it is already finalizing, the process aborts and torchrun reports a finished run as failed
    # (pytorch/pytorch#190489).
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        # Threads of a group that DeepSpeed still references go on, and need microseconds to release their tensors.
        time.sleep(0.2)


@dataclass(frozen=True)
class Shard:
    """Every `of`-th piece of work, starting with the `number`-th; 1/4, 2/4, 3/4 and 4/4 together cover all."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        number, _, of = str(text).partition("/")
        if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
            raise InputError(f"shard must be i/N with i from 1 to N, as in shard=1/4, got {text}")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"-{self.number}-of-{self.of}" if self.of > 1 else ""

    @property
    def siblings(self) -> str:
        """A glob pattern for the file names of all shards of this split."""
        return f"-*-of-{self.of}" if self.of > 1 else ""

    def takes(self, piece: int) -> bool:
        """Return whether piece number `piece`, counted from 0, belongs to this shard."""
        return piece % self.of == self.number - 1
