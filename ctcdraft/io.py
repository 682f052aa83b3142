"""Files that are whole or not there at all. It knows paths; not what is written.

Folders that a command reads or writes, judged before anything is loaded.

Only the file system is asked, and no torch is imported, so that a command that cannot end well ends at once.
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
    """Let `write` fill a draft beside the path, then move it there: a kill leaves the old file or the new one."""
    # Sibling shards, and parallel trials of a search in one process, may write the same report.
    draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = create_empty_file(draft)
        write(draft)
        if stat.S_IMODE(draft.stat().st_mode) != mode:
            draft.chmod(mode)  # safetensors moves a file of mode 600 over the draft: colleagues could not read it
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        draft.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk has a name of its own in each library
        with contextlib.suppress(OSError):
            draft.unlink()  # half a file would keep a full disk full
        raise InputError(
            f"cannot write {path} ({' '.join(str(error).split())}); make room or choose another place, then run "
            "again: what was finished is kept"
        ) from error


def create_empty_file(path: Path) -> int:
    """Create an empty file, and return the permission bits it got from the umask and the folder.

    os.umask tells only by setting another one, which a file that another thread creates meanwhile would get.
    """
    path.unlink(missing_ok=True)
    path.touch()
    return stat.S_IMODE(path.stat().st_mode)


def apply_default_mode(folder: Path) -> None:
    """Give a folder's tensors the permission bits of a new file: safetensors keeps what it writes to its owner."""
    probe = folder / f"mode.{os.getpid()}.{threading.get_ident()}.partial"
    mode = create_empty_file(probe)
    probe.unlink()
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def write_text(path: Path, text: str) -> None:
    """The text, whole or not at all."""
    atomic_write(path, lambda draft: draft.write_text(text))


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raise InputError unless files can be made in a folder, or in the nearest one above it that is there.

    A file is really made, and gone again: permissions do not tell of a read-only or full disk, and the superuser has
    them everywhere. key: what the user types, as in run.
    """
    there = folder.absolute()
    try:
        while not there.exists():
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        why = f"{there} is a file" if there.is_file() else f"{there}: {error.strerror}"
        raise InputError(f"{key}={folder} cannot be written ({why}); choose another {key}=") from error


def refuse_existing_run(run: Path) -> NoReturn:
    raise InputError(
        f"{run} holds a run already; continue it with resume={run}, choose another run=, "
        "or throw it away with overwrite=true"
    )


def refuse_missing_run(run: Path) -> None:
    """Raise InputError unless a folder holds a run."""
    if not (run / "config.yaml").is_file():
        raise InputError(f"{run} holds no run: there is no config.yaml; give a directory that train.py made")


def has_complete_corpus(folder: Path) -> bool:
    """Return whether a folder holds a prepared corpus that is complete, so that it is only read."""
    try:
        return bool(json.loads((folder / "manifest.json").read_text())["complete"])
    except (OSError, ValueError, KeyError, TypeError):  # another program's manifest.json is no corpus
        return False
