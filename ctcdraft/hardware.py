"""How fast a machine that is not here is taken to be. Every number is the user's; none is made up.

What this machine can hold, and what this process has held. It knows no model.

Hours as people say them. It knows numbers alone.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from ctcdraft.errors import InputError, check_float

UNKNOWN_RATE = (
    "not known without a rate: plan.flops= is operations a second that are really reached (a card's figure times the "
    "share of it that is used), plan.bandwidth= bytes a second of its memory"
)


@dataclass(frozen=True)
class HardwareSpec:
    """flops: operations a second; bandwidth: bytes a second. None: not said."""

    flops: float | None
    bandwidth: float | None

    @classmethod
    def of(cls, values: Any) -> Self:
        """The values of plan.flops= and plan.bandwidth=."""
        for key in ("flops", "bandwidth"):
            if values[key] is not None and not check_float(values[key], f"plan.{key}") > 0:
                raise InputError(f"plan.{key}={values[key]} is no speed; it lies above 0, as in plan.{key}=4e12")
        return cls(values["flops"], values["bandwidth"])

    def seconds(self, flops: float, streamed: float = 0.0) -> float | None:
        """What so many operations take that stream so many bytes meanwhile: the slower of both. None: not known."""
        if self.flops is None:
            return None
        return max(flops / self.flops, streamed / self.bandwidth if self.bandwidth else 0.0)

    def __str__(self) -> str:
        if self.flops is None:
            return "no rate"
        memory = f" and {self.bandwidth:.3g} bytes a second" if self.bandwidth else ", memory taken to keep up"
        return f"at {self.flops:.3g} operations a second{memory}, which is assumed"


CONTAINER_MEMORY_FILE = Path("/sys/fs/cgroup/memory.max")


def device_memory_bytes(device: str) -> int | None:
    """All the memory a device has, other people's share included; None where there is no such device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else None
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # "max" is no number: no limit
        available = min(available, int(CONTAINER_MEMORY_FILE.read_text()))
    return available


def peak_process_bytes(device: torch.device) -> int:
    """The most this process has held so far: of an accelerator's memory what torch had given out, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024  # Linux counts kibibytes


def format_bytes(count: float) -> str:
    """Bytes as people say them:   13476831232  ->  13.5 GB"""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def format_hours(hours: float, kind: str = "") -> str:
    """Never 0.00: minutes or seconds where they are few, with two significant digits or more.

    1,234.5 -> 1,234 hours    12.34 -> 12.3 hours    0.5 -> 0.50 hours    0.05 -> 3 minutes    0.0005 -> 1.8 seconds
    """
    if hours >= 0.1:
        digits = 0 if hours >= 100 else 1 if hours >= 10 else 2
        return f"{hours:,.{digits}f} {kind}hours"
    number, unit = (60 * hours, "minutes") if 60 * hours >= 0.1 else (3600 * hours, "seconds")
    return f"{number:.2g} {kind}{unit}"
