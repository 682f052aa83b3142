"""Threads in the place of torchrun's processes, for tests of work that is shared: they exchange objects, no tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ctcdraft.distributed import Distributed


class SharedIterator:
    def __init__(self, items: Sequence[Any]) -> None:
        self.items, self.lock = iter(items), threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self.lock:
            return next(self.items)


@dataclass
class Job:
    values: list
    barrier: threading.Barrier


@dataclass(frozen=True)
class ThreadProcess(Distributed):
    """A thread in place of a process; `local_rank` numbers those of a machine."""

    job: Job = field(default=None)  # type: ignore[assignment]
    local_rank: int = 0

    @property
    def is_local_main(self):
        return self.local_rank == 0

    def all_gather_object(self, value, group=None):
        self.job.values[self.rank] = value
        self.job.barrier.wait(100)
        gathered = [*self.job.values]
        self.job.barrier.wait(100)
        return gathered

    def from_process(self, rank, work):
        return self.all_gather_object(self.in_turn(work, self.rank == rank))[rank]

    def deal(self, items):
        return self.from_process(0, lambda: SharedIterator(items))


def run_threads(work: Callable[[ThreadProcess], Any], local_ranks: Sequence[int]) -> list[Any]:
    """Return work(process) of one thread per local rank; where one raises, so do the others, and this does."""
    count = len(local_ranks)
    job = Job([None] * count, threading.Barrier(count))

    def guarded(rank: int) -> Any:
        try:
            return work(ThreadProcess(rank, count, job, local_ranks[rank]))
        except BaseException:
            job.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(count)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
