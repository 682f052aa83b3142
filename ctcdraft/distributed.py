"""Processes of torchrun, and shards of work that need no communication.

Process 0 writes the run directory. torch is imported in the functions that communicate: a command line is checked
before torch is imported.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import uuid4

from ctcdraft.errors import InputError, first_line

if TYPE_CHECKING:
    from torch import Tensor


Item = TypeVar("Item")

# The process group for objects, on CPUs; emptied at exit, or its threads would outlive the interpreter.
object_groups: list[Any] = []


class LostProcessError(InputError):
    """Another process has ended, or does not answer."""


@dataclass(frozen=True)
class Distributed:
    """Rank and world size of this process, and the collective operations; with one process these do nothing."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes; the tensor is overwritten with it."""
        import torch

        if self.world_size > 1:
            with lost_process():
                torch.distributed.all_reduce(tensor)
        return tensor

    def any_process(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is True in any process."""
        return [any(column) for column in zip(*self.all_gather_object(flags), strict=True)]

    def all_gather_object(self, value: Any, group: Any = None) -> list[Any]:
        """Return the `value` of every process, by rank."""
        import torch

        gathered = [value]
        if self.world_size > 1:
            gathered = [None] * self.world_size
            with lost_process():
                torch.distributed.all_gather_object(gathered, value, group)
        return gathered

    @property
    def is_local_main(self) -> bool:
        """Whether this process is the first of its machine, which may have a disk of its own."""
        return self.is_main or int(os.environ.get("LOCAL_RANK", self.rank)) == 0

    def from_main(self, work: Callable[[], Any]) -> Any:
        """Return in every process what `work` returns in process 0, which may have files that the others have not."""
        return self.from_process(0, work)

    def from_process(self, rank: int, work: Callable[[], Any]) -> Any:
        """Return in every process what `work` returns in this one."""
        import torch

        result = [self.in_turn(work, self.rank == rank)]
        if self.world_size > 1:
            with lost_process():
                torch.distributed.broadcast_object_list(result, rank, *object_groups)
        return result[0]

    def deal(self, items: Sequence[Item]) -> Iterator[Item]:
        """Return an iterator over the items that no other process takes; each takes the next one when it is free.

        All processes must call it with the same items; only this call waits for the others.
        """
        import torch

        if self.world_size == 1:
            return iter(items)
        group, taken = torch.distributed.group.WORLD, self.from_main(lambda: uuid4().hex)
        assert group is not None
        store = group.get_group_store()

        def take() -> Iterator[Item]:
            while True:
                with lost_process():
                    number = store.add(taken, 1) - 1
                if number >= len(items):
                    return
                yield items[number]

        return take()

    def main_process_first(self, work: Callable[[], Any]) -> Any:
        """Call `work` in process 0, then in the first of each other machine, then in all others.

        So each later one finds the files that an earlier one wrote, with a disk that all machines share and without.
        """
        turn = 0 if self.is_main else 1 if self.is_local_main else 2
        results = [self.in_turn(work, turn == number) for number in range(3)]
        return results[turn]

    def in_turn(self, work: Callable[[], Any], mine: bool) -> Any:
        """Call `work` if it is this process's turn, and wait for the others; where one raises InputError, all do."""
        result = error = None
        try:
            result = work() if mine else None
        except InputError as raised:
            if self.world_size == 1:
                raise
            error = raised
        for other in self.all_gather_object(error, *object_groups):
            if other is not None:
                raise other
        return result


def from_environment() -> Distributed:
    """Return rank and world size as torchrun set them, without joining a process group."""
    return Distributed(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


ALONE = Distributed()


@contextmanager
def lost_process() -> Iterator[None]:
    """Turn the error of an exchange whose other end is gone or silent into one sentence."""
    import torch

    try:
        yield
    except RuntimeError as error:
        # gloo's have no class of their own; DistError is that of the store, which ends with the first machine.
        if not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error) or "NCCL" in str(error)):
            raise
        raise LostProcessError(
            f"another process of this job has ended, or did not answer within timeout_minutes= ({first_line(error)})"
        ) from error


def init_distributed(device: str, timeout_minutes: float = 30, tensors: bool = True) -> Distributed:
    """Join the process group of torchrun, if this process was started by it, and return it.

    tensors: whether tensors on the device are exchanged; the processes of one that only shares work may end one by one.
    """
    import torch

    processes = from_environment()
    if processes.world_size == 1:
        return ALONE
    count = f"{processes.world_size} processes"
    if device == "cuda":
        raise InputError(f"device=cuda is one device for {count}; leave it out to give each its own")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        if not torch.distributed.is_initialized():
            backend = "nccl" if tensors and device.startswith("cuda") else "gloo"
            timeout = timedelta(minutes=timeout_minutes)
            torch.distributed.init_process_group(backend, timeout=timeout)
            atexit.register(shut_down_gloo)
            object_groups[:] = [torch.distributed.new_group(backend="gloo", timeout=timeout)]
    except (RuntimeError, ValueError) as error:  # a port in use is a DistNetworkError, which is a RuntimeError
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        sentence = f"{count} cannot connect at {address} ({first_line(error)})"
        raise InputError(f"{sentence}; choose a free port with torchrun --master-port") from error
    return processes


def shut_down_gloo() -> None:
    """Destroy the process group, which ends its threads while the interpreter still runs."""
    import torch

    # gloo's worker threads release the tensors of a collective shortly after it and need the interpreter for that. If
    # it is already finalizing, the process aborts and torchrun reports a finished run as failed
    # (pytorch/pytorch#190489).
    if torch.distributed.is_initialized():
        object_groups.clear()
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
