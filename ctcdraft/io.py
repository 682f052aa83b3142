"""Atomic writing of files, and checks of the folders that a command reads or writes.

torch is not imported here, so that a command with a wrong folder ends at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from safetensors import SafetensorError

from ctcdraft.errors import InputError


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: a kill leaves the old file or the new one.

    Raises InputError where the file cannot be written, such as on a full disk.
    """
    # Sibling shards, and parallel trials of a search in one process, may write the same report.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = create_empty_file(temporary)
        write(temporary)
        if stat.S_IMODE(temporary.stat().st_mode) != mode:
            temporary.chmod(mode)  # safetensors creates files of mode 600, which colleagues could not read
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # each library has its own error for a full disk
        with contextlib.suppress(OSError):
            temporary.unlink()  # frees the space on a full disk
        raise InputError(
            f"cannot write {path} ({' '.join(str(error).split())}); make room or choose another place, then run "
            "again: what was finished is kept"
        ) from error


def create_empty_file(path: Path) -> int:
    """Create an empty file and return the permission bits that it got from the umask and the folder."""
    # os.umask cannot be read without setting it, which would affect files that other threads create meanwhile.
    path.unlink(missing_ok=True)
    path.touch()
    return stat.S_IMODE(path.stat().st_mode)


def write_text(path: Path, text: str) -> None:
    atomic_write(path, lambda temporary: temporary.write_text(text))


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raise InputError unless a file can be created in a folder, or in the nearest existing one above it."""
    existing = folder.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        # Permission bits show neither a read-only nor a full disk, and do not bind root.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = f"{existing} is a file" if existing.is_file() else f"{existing}: {error.strerror}"
        raise InputError(f"{key}={folder} cannot be written ({reason}); choose another {key}=") from error


def refuse_existing_run(run: Path) -> NoReturn:
    raise InputError(
        f"{run} holds a run already; continue it with resume={run}, choose another run=, or replace it with "
        "overwrite=true"
    )


def refuse_missing_run(run: Path) -> None:
    """Raise InputError unless the folder holds a run."""
    if not (run / "config.yaml").is_file():
        raise InputError(f"{run} holds no run: there is no config.yaml; give a run directory of train.py")


def has_complete_corpus(folder: Path) -> bool:
    """Return whether a folder holds a complete prepared corpus, which is only read."""
    try:
        return bool(json.loads((folder / "manifest.json").read_text())["complete"])
    except (OSError, ValueError, KeyError, TypeError):  # absent, or a manifest.json of another program
        return False
