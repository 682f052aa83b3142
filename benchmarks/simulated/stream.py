"""The stream of the simulated accelerator: asynchronous copies to the host, events, and the rules of a graph capture.

An asynchronous copy is carried out at the first synchronisation after it. Until then the host buffer keeps what it
held, so code that reads it before it waits for the event decodes wrong tokens here, as it would on an accelerator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.simulated.records import Cause, cause_of, record


class CaptureError(RuntimeError):
    """An operation that a graph cannot contain."""


class Stream:
    """The only stream: what was enqueued on it and has not been waited for."""

    def __init__(self) -> None:
        self.enqueued = 0  # asynchronous copies so far
        self.pending: list[tuple[int, Tensor, Tensor]] = []  # number, host buffer, values at the time of the copy
        self.capture: Any = None  # the graph that is being captured

    def enqueue_copy(self, host: Tensor, source: Tensor) -> None:
        """Copy to the host asynchronously. source: the values on the device."""

        def copy() -> None:
            self.enqueued += 1
            self.pending.append((self.enqueued, host, source.detach().clone()))

        if self.capture is None:
            copy()
        else:
            self.capture.add(copy)  # a capture executes nothing

    def deliver(self, until: int) -> None:
        """Carry out the copies up to this number."""
        for number, host, values in self.pending:
            if number <= until:
                host.copy_(values)
        self.pending = [one for one in self.pending if one[0] > until]

    def wait(self, cause: Cause, until: int | None = None) -> None:
        """Record a synchronisation and carry out what was enqueued before it."""
        if self.capture is not None:
            raise CaptureError(f"{cause}: a host synchronisation within a capture")
        record("synchronisations", cause)
        self.deliver(self.enqueued if until is None else until)


STREAM = Stream()


class Event:
    """An event of the simulated accelerator."""

    def __init__(self, *options: Any, **more: Any) -> None:
        self.enqueued = 0  # copies before it

    def record(self, stream: Any = None) -> None:
        self.enqueued = STREAM.enqueued

    def synchronize(self) -> None:
        """Wait: one synchronisation, after which the copies enqueued before `record` have arrived."""
        STREAM.wait(cause_of("event.synchronize"), self.enqueued)

    def query(self) -> bool:
        """Return whether the copies before it have arrived, without waiting for them."""
        return all(number > self.enqueued for number, *_ in STREAM.pending)


class DeviceModule:
    """What torch.get_device_module returns for the simulated accelerator."""

    def __init__(self, is_available: Callable[[], bool]) -> None:
        self.is_available = is_available

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        STREAM.wait(cause_of("synchronize"))

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: numbers without a generator come from the host's default one."""

    def _is_in_bad_fork(self) -> bool:
        return False


PlainGenerator: Any = torch.Generator


# Of the device, by address: torch passes a generator on without its Python class.
DEVICE_GENERATORS: set[int] = set()


class GeneratorType(type(PlainGenerator)):  # type: ignore[misc]
    """Makes every generator an instance of the class that stands for torch.Generator."""

    def __instancecheck__(cls, value: Any) -> bool:
        return type.__instancecheck__(PlainGenerator, value)


class Generator(PlainGenerator, metaclass=GeneratorType):
    """torch.Generator for both devices: the host's random numbers, of which the device's are usable there alone."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type == "cpu":
            return PlainGenerator(device)
        generator = super().__new__(cls, "cpu")
        generator.on = torch.device(device)
        DEVICE_GENERATORS.add(generator._cdata)
        weakref.finalize(generator, DEVICE_GENERATORS.discard, generator._cdata)
        return generator

    @property
    def device(self) -> torch.device:
        return self.on
