"""Folders of real data and small models beside the repository; tests that need them skip where they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED_FOLDER = Path(__file__).resolve().parents[2] / "shared"
DATA_FOLDERS = {
    "CTCDRAFT_DATA": Path(os.environ.get("CTCDRAFT_DATA", SHARED_FOLDER / "data")),
    "CTCDRAFT_MODELS": Path(os.environ.get("CTCDRAFT_MODELS", SHARED_FOLDER / "models")),
    "CTCDRAFT_HEADS": Path(os.environ.get("CTCDRAFT_HEADS", SHARED_FOLDER / "heads")),
}


def require_data(variable: str, name: str) -> Path:
    """Return DATA_FOLDERS[variable] / name, or skip the test."""
    path = DATA_FOLDERS[variable] / name
    if not path.exists():
        pytest.skip(f"no {name} at {path.parent}; set {variable}= to the folder that contains it")
    return path
