"""Files that are whole or not there at all. It knows paths; not what is written."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from ctcdraft.errors import InputError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a draft beside the path, then move it there: a kill leaves the old file or the new one."""
    # Sibling shards, and parallel trials of a search in one process, may write the same report.
    draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(draft)
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


def write_text(path: Path, text: str) -> None:
    """The text, whole or not at all."""
    write_whole(path, lambda draft: draft.write_text(text))
