"""The lock on a run directory of the process that trains in it. torch is not imported here."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ctcdraft.errors import InputError

LOCK_FILE = "run.lock"


class InUseError(InputError):
    """A run directory that another process is training in."""


@contextlib.contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold the lock on a directory, created if absent; raise InUseError if another process holds it.

    The lock is the operating system's. It ends with the process that holds it, however that process ends, so a killed
    run can be resumed at once.
    """
    file, created = directory / LOCK_FILE, not directory.exists()
    lock = FileLock(file)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        sentence = f"{directory} is being trained by {describe_lock_holder(file)}"
        raise InUseError(f"{sentence}; wait until it ends or stop it, or choose another run=") from None
    except OSError as error:
        raise InputError(f"cannot lock {file} ({error.strerror or error}); choose another place with run=") from error
    native = isinstance(lock, FileLock)  # else the disk has no flock, and the file is filelock's own marker
    try:
        if native:
            with contextlib.suppress(OSError):  # on a full disk the message of a second process names no pid
                file.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        yield
    finally:
        with contextlib.suppress(OSError):
            if native:
                file.unlink()  # while locked: a process that has opened it meanwhile sees that it is unlinked
            if created:
                directory.rmdir()  # fails unless it is empty, which it is where the run was refused before it began
        lock.release()


def describe_lock_holder(file: Path) -> str:
    try:
        owner = json.loads(file.read_text())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
