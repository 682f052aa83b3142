"""Who may write into a folder: one process a shard, all of one split. It knows locks, not what is written.

A lock is held by a living process and by nothing else: the system lets go of it when the process ends, however it
ends. So the file that a killed process leaves behind stops nobody.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ctcdraft.errors import InputError
from ctcdraft.shard import Shard

TRIES = 10  # a sibling that looks whether a lock is held, holds it for an instant


@contextmanager
def writing(out: Path, shard: Shard) -> Iterator[None]:
    """Hold `out` for this shard; refuse where another process writes the same, or shares the work otherwise.

    Drafts that a killed process left are removed, once nobody else is alive who could be writing one.
    """
    file = out / f"writer{shard}.lock"
    try:
        out.mkdir(parents=True, exist_ok=True)
        mine = held(file, TRIES)
    except OSError as error:
        raise InputError(
            f"cannot write {file} ({error.strerror}); make room or choose another place, then run again: what was "
            "finished is kept"
        ) from error
    if mine is None:
        raise InputError(occupied(out, file))
    try:
        drafts = list(out.glob("*.partial"))  # before looking who is alive: whoever comes later has none of these
        siblings = set(out.glob(f"writer{shard.siblings}.lock"))
        alive = [other for other in sorted(out.glob("writer*.lock")) if other != file and not abandoned(other)]
        for other in alive:
            if other not in siblings:
                raise InputError(occupied(out, other))
        for draft in [] if alive else drafts:
            draft.unlink(missing_ok=True)
        yield
    finally:
        file.unlink(missing_ok=True)
        mine.close()


def held(file: Path, tries: int) -> IO[str] | None:
    """The open file, locked and signed by this process, or None if another one keeps it."""
    for attempt in range(tries):
        stream = file.open("a+")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still(stream, file):
                stream.truncate(0)
                stream.write(f"process {os.getpid()} on {socket.gethostname()}")
                stream.flush()
                return stream
        except BlockingIOError:
            pass
        except OSError:
            stream.close()
            raise
        stream.close()
        if attempt + 1 < tries:
            time.sleep(0.05)
    return None


def is_still(stream: IO[str], file: Path) -> bool:
    """Whether the locked file is the one of that name: its last holder may just have removed it."""
    try:
        return os.fstat(stream.fileno()).st_ino == file.stat().st_ino
    except FileNotFoundError:
        return False


def abandoned(file: Path) -> bool:
    """Whether nobody keeps this lock; the file is removed then."""
    try:
        stream = file.open("a+")
    except FileNotFoundError:
        return True
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if is_still(stream, file):
            file.unlink(missing_ok=True)
        return True


def occupied(out: Path, file: Path) -> str:
    try:
        who = file.read_text() or "another process"
    except OSError:
        who = "another process"
    return f"{who} is writing into {out} ({file.name}); wait for it, stop it, or choose another out="
