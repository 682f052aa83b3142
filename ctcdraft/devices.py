"""GPUs of one machine, leased to the jobs of a sweep, and the end of such a job with the process that began it.

A lease is a lock of the operating system on a file in the temporary folder, so it ends with the process that holds it,
and the sweeps of one user share the GPUs of a machine. A job number would not do: jobs end in any order, and Slurm
numbers the GPUs of every job from 0.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

VISIBLE = "CUDA_VISIBLE_DEVICES"
_kept: list[ExitStack] = []  # the lease of this process, held to its end


def visible_devices() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or the numbers of all GPUs of this machine."""
    if VISIBLE in os.environ:
        return [device.strip() for device in os.environ[VISIBLE].split(",") if device.strip()]
    import torch

    # Asks NVML, which leaves CUDA uninitialised: after that the variable would have no effect.
    return [str(number) for number in range(torch.cuda.device_count())]


@contextmanager
def leased_device(devices: list[str]) -> Iterator[str | None]:
    """Yield the device with the fewest leases, of this and other processes, and hold one on it; None of no devices."""
    if not devices:
        yield None
        return
    folder = Path(tempfile.gettempdir()) / f"ctcdraft-devices-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for others in count():  # where every device is leased, a second job shares the first of them
        for device in devices:
            lock = FileLock(folder / f"{device.replace('/', '-')}.{others}")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                yield device
            finally:
                lock.release()
            return


def keep_device() -> None:
    """Lease a device to this process until it ends, and hide the others from it; call it before CUDA is used."""
    # A process keeps its device for all its jobs: what CUDA has initialised ignores a later change of the variable.
    if _kept:
        return
    _kept.append(ExitStack())
    device = _kept[0].enter_context(leased_device(visible_devices()))
    if device is not None:
        os.environ[VISIBLE] = device


def end_with_parent() -> None:
    """Ask Linux for a SIGTERM when the parent process ends, even by SIGKILL; a training then saves its state.

    For `preexec_fn` of subprocess.Popen.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
