"""Speed and memory of hardware: given by the user for plans, read from the device for this machine."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from ctcdraft.errors import check_float

UNKNOWN_RATE = (
    "not known without a rate: plan.flops= is the FLOP/s that are reached (peak times utilization), plan.bandwidth= "
    "the bytes/s of the memory"
)


@dataclass(frozen=True)
class HardwareSpec:
    """Sustained FLOP/s, bandwidth in bytes/s and memory of one device, and bytes/s to others; None: not given."""

    flops: float | None
    bandwidth: float | None
    memory: float | None = None
    link: float | None = None

    @classmethod
    def of(cls, values: Any) -> Self:
        """Return the spec of a `plan` node, or of a study's with these keys, which the schema does not check."""
        keys = ("flops", "bandwidth", "memory", "link")
        return cls(*(check_float(values.get(key), f"plan.{key}", above=0, null=True) for key in keys))

    def seconds(self, flops: float, streamed: float = 0.0) -> float | None:
        """Return the time of so many FLOPs while `streamed` bytes are read: the slower of both, None if unknown."""
        if self.flops is None:
            return None
        return max(flops / self.flops, streamed / self.bandwidth if self.bandwidth else 0.0)

    def all_reduce_seconds(self, count: float, processes: int) -> float:
        """Return the time in which a ring of processes sums so many bytes; 0 without a link."""
        return 2 * (processes - 1) / processes * count / self.link if self.link else 0.0

    def describe_fit(self, peak: float, ways_out: str) -> str:
        """Return whether a peak fits into the memory, as the end of a line of the plan."""
        if self.memory is None:
            return ""
        card = f"a card of {format_bytes(self.memory)}"
        return f"; fits {card}" if peak <= self.memory else f"; DOES NOT FIT {card}: {ways_out}"

    def __str__(self) -> str:
        if self.flops is None:
            return "no rate"
        memory = f" and {self.bandwidth:.3g} bytes/s" if self.bandwidth else ", not limited by memory bandwidth"
        return f"at {self.flops:.3g} FLOP/s{memory}, which is assumed"


# What a container may use; sysconf reports the memory of the host.
CONTAINER_MEMORY_FILE = Path("/sys/fs/cgroup/memory.max")


def device_memory_bytes(device: str) -> int | None:
    """Return the total memory of a device, the part used by others included; None where the device is absent."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else None
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # "max" means no limit
        available = min(available, int(CONTAINER_MEMORY_FILE.read_text()))
    return available


def peak_process_bytes() -> int:
    """Return the most bytes this process has held: allocated on its GPU if it uses one, else resident."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource

    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024  # Linux reports kibibytes


def format_bytes(count: float) -> str:
    """Format bytes with a unit:   13476831232  ->  13.5 GB"""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def format_hours(hours: float) -> str:
    """Format a duration as hours, or as minutes or seconds where it is short, with two significant digits or more.

    1,234.5 -> 1,234 hours    12.34 -> 12.3 hours    0.5 -> 0.50 hours    0.05 -> 3 minutes    0.0005 -> 1.8 seconds
    """
    if hours >= 0.1:
        digits = 0 if hours >= 100 else 1 if hours >= 10 else 2
        return f"{hours:,.{digits}f} hours"
    number, unit = (60 * hours, "minutes") if 60 * hours >= 0.1 else (3600 * hours, "seconds")
    return f"{number:.2g} {unit}"
