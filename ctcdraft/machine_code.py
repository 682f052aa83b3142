"""Modules of loops that numba compiles to machine code; numba is imported at their first use, as it takes a second."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent


@cache
def load_kernels(module: str) -> Any:
    """Return a module of compiled loops; None without numba, or where no folder to keep machine code in is writable."""
    try:
        config = import_module("numba").config
    except ImportError:
        return None
    if not os.environ.get("NUMBA_CACHE_DIR"):
        # numba compares the file of a function alone; loops of other files that it calls would be the old ones.
        config.CACHE_DIR = str(cache_folder())
    try:
        return import_module(module)
    except RuntimeError:  # the folder is not writable, and every process would compile
        return None


def cache_folder() -> Path:
    """Return the folder for the machine code of the loops as they are now: in the package, or in the user's cache."""
    sources = [*PACKAGE.rglob("*_kernels.py"), *PACKAGE.glob("ctc/best_first*.py")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(sources))).hexdigest()[:16]
    home = PACKAGE / "__pycache__" if os.access(PACKAGE, os.W_OK) else Path.home() / ".cache" / "ctcdraft"
    return home / f"numba-{digest}"
