"""Modules of loops that numba compiles to machine code; numba is imported at their first use, as it takes a second."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


@cache
def load_kernels(module: str) -> Any:
    """Return a module of compiled loops; None without numba, or where it finds no folder to keep machine code in."""
    try:
        return import_module(module)
    except (ImportError, RuntimeError):  # RuntimeError: no cache folder is writable, and every process would compile
        return None
