"""Counts by which losses are divided, over the processes and the accumulated batches of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ctcdraft.distributed import ALONE, Distributed, lost_process

step_processes: ContextVar[Distributed] = ContextVar("step_processes", default=ALONE)
counts_seen: ContextVar[list[Tensor] | None] = ContextVar("counts_seen", default=None)
counts_known: ContextVar[Iterator[Tensor] | None] = ContextVar("counts_known", default=None)


@contextmanager
def setting(variable: ContextVar[Any], value: Any) -> Iterator[Any]:
    """Give a context variable a value, and yield it."""
    before = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(before)


@contextmanager
def shared_step(processes: Distributed) -> Iterator[None]:
    """Let `mean_over_processes` average over these processes, which divide the rows of a training step among them.

    All of them must call it the same number of times. Outside a step, as in the plan, it exchanges nothing.
    """
    with lost_process(), setting(step_processes, processes):
        yield


def mean_over_processes(count: Tensor) -> Tensor:
    """Return the mean of a count over the processes of a step.

    A loss divided by this instead of its own count has, averaged over the processes, the value that one process with
    all rows would compute. A mean of the processes' means has not, as their windows differ in number.
    """
    if (known := counts_known.get()) is not None:
        return next(known)
    processes, seen = step_processes.get(), counts_seen.get()
    if processes.world_size > 1:
        # float64: a float32 count would be off from its 16,777,217th window on.
        count = processes.sum(count.double()) / processes.world_size
    if seen is not None:
        seen.append(count)
    return count


def mean_counts(batches: Iterable[Callable[[], object]]) -> list[Tensor]:
    """Return the mean over batches of each count that `mean_over_processes` returns in a call, in order.

    With `setting(counts_known, iter(...))` a loss is divided by these: the mean of the batches' losses then is that of
    one batch with all rows, however many counts a loss has.
    """
    seen = []
    for batch in batches:
        with torch.no_grad(), setting(counts_seen, []) as counts:
            batch()
        seen.append(counts)
    return [torch.stack(of_batches).double().mean(dim=0) for of_batches in zip(*seen, strict=True)]
