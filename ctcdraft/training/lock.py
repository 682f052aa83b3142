"""One process at a time in a run directory.

The lock is the operating system's, on DIR/run.lock (filelock). It ends with the process that holds it, however that
process ends, so a killed run can be resumed at once. The file holds the pid and the host of the process for the
sentence that refuses a second one, and is removed with the lock.
"""

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
    """Hold the directory, which is made where it is absent; raise InUseError if another process holds it.

    A directory that was made here and is empty at the end is removed: the start was refused before its run began.
    """
    file, made = directory / LOCK_FILE, not directory.exists()
    lock = FileLock(file)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise InUseError(
            f"{directory} is being trained by {describe_lock_holder(file)}; wait until it ends or stop it, or choose "
            "another run="
        ) from None
    except OSError as error:
        raise InputError(f"cannot lock {file} ({error.strerror or error}); choose another place with run=") from error
    native = isinstance(lock, FileLock)  # else filelock has put a marker of its own there: no flock on this disk
    try:
        if native:
            with contextlib.suppress(OSError):  # a full disk; only the sentence loses by it
                file.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        yield
    finally:
        with contextlib.suppress(OSError):
            if native:
                file.unlink()  # while it is held: a process that has opened it meanwhile sees that it has no name
            if made:
                directory.rmdir()  # which fails where something is in it
        lock.release()


def describe_lock_holder(file: Path) -> str:
    """Return who holds the lock, as far as the file tells."""
    try:
        owner = json.loads(file.read_text())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
