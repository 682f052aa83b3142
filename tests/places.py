"""Where real data and small models lie beside the repository; a test that needs them skips where they do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED_FOLDER = Path(__file__).resolve().parents[2] / "shared"
DATA_FOLDERS = {
    "CTCDRAFT_DATA": Path(os.environ.get("CTCDRAFT_DATA", SHARED_FOLDER / "data")),
    "CTCDRAFT_MODELS": Path(os.environ.get("CTCDRAFT_MODELS", SHARED_FOLDER / "models")),
}


def require_data(variable: str, name: str) -> Path:
    """PLACES[variable] / name, or the test is skipped."""
    place = DATA_FOLDERS[variable] / name
    if not place.exists():
        pytest.skip(f"no {name} at {place.parent}; {variable}= names the folder that holds it")
    return place
