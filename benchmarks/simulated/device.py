"""A simulated accelerator: a device of its own for torch, whose tensors compute on the CPU.

A tensor subclass on a backend that is registered from Python holds its values as a CPU tensor (tensor.py). Each of its
operations refuses what an accelerator refuses, operands on two devices, and records launches, transfers and host
synchronisations. So code that leaves a tensor on the host, or waits for the device within a step, fails on a machine
without an accelerator. Nothing can be said about time.

    with count() as report:
        generate(base.to(device()), ...)
    print(report)

A launch is an operation that writes memory of the device: views and allocations are none. An operation counts once, no
matter how many kernels an accelerator has for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration

from benchmarks.simulated.records import Report, cause_of, collected
from benchmarks.simulated.stream import STREAM, DeviceModule, Event, Generator
from benchmarks.simulated.tensor import NAME, PINNED, copy_from, execute, is_pinned

aten = torch.ops.aten
HOOKS: Any = getattr(getattr(torch._C, "_acc", None), "PrivateUse1Hooks", None)  # private names, absent in older torch
SETUP = HOOKS and getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
UNSUPPORTED = f"torch {torch.__version__} cannot register a backend from Python"  # the reason of skipped tests
# torch would allocate their results empty and resize them, which these tensors cannot follow.
FACTORIES = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.eye.m, aten.linspace.default,
    aten.randperm.default, aten.randperm.generator, aten.tril_indices.default, aten.triu_indices.default,
)  # fmt: skip
LIBRARIES: list[torch.library.Library] = []  # held, because registrations end with these objects
ACTIVE: list[None] = []  # an entry for every open `active`


@cache
def device() -> torch.device:
    """Return the device; the first call registers it, which a process can do once."""
    if SETUP is None:
        raise RuntimeError(f"{UNSUPPORTED}; install torch 2.13")
    SETUP(NAME, DeviceModule(lambda: bool(ACTIVE)), make_hooks())
    LIBRARIES.append(torch.library.Library("_", "IMPL"))
    LIBRARIES[-1].fallback(execute, "PrivateUse1")
    LIBRARIES.append(torch.library.Library("aten", "IMPL"))
    LIBRARIES[-1].impl("_copy_from", copy_from, "PrivateUse1")
    for factory in FACTORIES:
        LIBRARIES[-1].impl(factory._name.removeprefix("aten::"), partial(execute, factory), "PrivateUse1")
    return torch.device(NAME, 0)


def make_hooks() -> Any:
    class Hooks(HOOKS):
        # Not available outside `active`, or other code of the process would take it for the accelerator to use.
        def is_available(self) -> bool:
            return bool(ACTIVE)

        def has_primary_context(self, device_id: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    return Hooks()


@contextmanager
def active() -> Iterator[torch.device]:
    """Yield the device; in this block torch's generators, events and pinned memory can be those of the device."""
    simulated = device()
    ACTIVE.append(None)
    try:
        # Their classes ask for hooks that a backend in Python cannot give.
        with (
            patch.object(torch, "Generator", Generator),
            patch.object(torch, "Event", Event),
            patch.object(torch.accelerator, "synchronize", synchronize),
            HostMemory(),
        ):
            yield simulated
    finally:
        ACTIVE.pop()


@contextmanager
def count() -> Iterator[Report]:
    """Yield a report of all operations on the device in this block."""
    with active(), collected() as report:
        yield report


def synchronize(*devices: Any) -> None:
    STREAM.wait(cause_of("synchronize"))


class HostMemory(TorchFunctionMode):
    """Pinned memory of the host, which torch has only beside a real accelerator."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.is_pinned and args[0].device.type == "cpu":
            return is_pinned(args[0])
        if function is Tensor.pin_memory:
            return pin(args[0].clone())
        pins = kwargs.pop("pin_memory", False)
        result = function(*args, **kwargs)
        return pin(result) if pins else result


def pin(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    PINNED[storage.data_ptr()] = storage
    return tensor
