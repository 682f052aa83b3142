"""Figures as PNG, for places that take no SVG: a browser that is on this machine draws them. It knows files alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from ctcdraft.errors import InputError
from ctcdraft.files import write_whole

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
DENSITY = 2  # pixels for one of the figure's own, so that print is not coarse
PATIENCE = 120  # seconds


def pictures(folder: Path) -> list[Path]:
    """A PNG beside every SVG of the folder; returns where they are."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise InputError(
            f"no browser is here to draw PNG files with (one of {', '.join(BROWSERS)}); install one, or take the SVG "
            f"files in {folder}, which show the same"
        )
    made = []
    for svg in sorted(folder.glob("*.svg")):
        content = drawn(browser, svg)
        made.append(svg.with_suffix(".png"))
        write_whole(made[-1], lambda draft, content=content: draft.write_bytes(content))  # type: ignore[misc]
    return made


def drawn(browser: str, svg: Path) -> bytes:
    size = re.search(r'width="(\d+)" height="(\d+)"', svg.read_text())
    if size is None:
        raise InputError(f"{svg} is no figure of ours: it does not begin with its size; draw it with `pages` again")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # which root has none of
    looks = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--force-device-scale-factor={DENSITY}"]
    with TemporaryDirectory() as place:
        png = Path(place) / "picture.png"  # by its name the browser knows what it is to make
        words = [f"--window-size={size[1]},{size[2]}", f"--screenshot={png}", svg.resolve().as_uri()]
        try:
            subprocess.run([browser, *sandbox, *looks, *words], capture_output=True, timeout=PATIENCE, check=False)
            return png.read_bytes()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InputError(f"{browser} drew nothing of {svg}; take the SVG file") from error
