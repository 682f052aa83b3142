"""A headless browser for the tests that look at rendered pages."""

import shutil

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser():
    command = next(filter(None, map(shutil.which, BROWSERS)), None)
    if command is None:
        pytest.skip("no Chromium here; apt-get install chromium-headless-shell")
    return [command, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
