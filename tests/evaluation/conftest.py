"""A browser for the tests that look at pages as a reader does."""

import shutil

import pytest

from ctcdraft.report.html.files import BROWSERS


@pytest.fixture(scope="session")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium here; apt-get install chromium-headless-shell")
    return [found, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
