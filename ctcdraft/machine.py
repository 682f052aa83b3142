"""What this machine can hold, and what this process has held. It knows no model."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(device: str) -> int | None:
    """All the memory a device has, other people's share included; None where there is no such device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else None
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # "max" is no number: no limit
        available = min(available, int(CONTAINER_LIMIT.read_text()))
    return available


def peak_bytes(device: torch.device) -> int:
    """The most this process has held so far: of an accelerator's memory what torch had given out, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024  # Linux counts kibibytes


def spelled(count: float) -> str:
    """Bytes as people say them:   13476831232  ->  13.5 GB"""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"
