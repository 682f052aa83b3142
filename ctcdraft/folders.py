"""Folders that a command reads or writes, judged before anything is loaded.

Only the file system is asked, and no torch is imported, so that a command that cannot end well ends at once.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NoReturn

from ctcdraft.errors import InputError


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


def refuse_held(run: Path) -> NoReturn:
    raise InputError(
        f"{run} holds a run already; continue it with resume={run}, choose another run=, "
        "or throw it away with overwrite=true"
    )


def refuse_no_run(run: Path) -> None:
    """Raise InputError unless a folder holds a run."""
    if not (run / "config.yaml").is_file():
        raise InputError(f"{run} holds no run: there is no config.yaml; give a directory that train.py made")


def holds_corpus(folder: Path) -> bool:
    """Return whether a folder holds a prepared corpus that is complete, so that it is only read."""
    try:
        return bool(json.loads((folder / "manifest.json").read_text())["complete"])
    except (OSError, ValueError, KeyError, TypeError):  # another program's manifest.json is no corpus
        return False
