"""Copy bandwidth and FLOP/s with an injected clock: bytes and operations counted by hand."""

from itertools import accumulate, chain

import pytest
import torch
from tiny_models import random_base

from ctcdraft.evaluation import environment
from ctcdraft.hardware import format_hours

ROUNDS = (0.5, 4.0, 2.0, 8.0)  # seconds: the first is not counted, and would be the best


@pytest.fixture
def clock(monkeypatch):
    """Each round takes its own time, with a pause between rounds."""
    moments = accumulate(chain.from_iterable((100.0, seconds) for seconds in ROUNDS))
    monkeypatch.setattr(environment, "perf_counter", lambda: next(moments))
    return moments


def test_a_copy_reads_and_writes_every_byte(clock, monkeypatch):
    monkeypatch.setattr(environment, "COPY_BYTES", {"cpu": 1000})
    assert environment.copy_bandwidth(torch.device("cpu"), rounds=3) == (1000 + 1000) / 2.0
    assert next(clock, None) is None  # all rounds were made


def test_a_product_multiplies_and_adds(clock, monkeypatch):
    monkeypatch.setattr(environment, "MATMUL_SIZE", {"cpu": 10})
    assert environment.matmul_rate(random_base(), rounds=3) == 10 * 10 * (10 + 10) / 2.0
    assert next(clock, None) is None


def test_short_times_are_minutes_and_seconds():
    shown = [format_hours(hours) for hours in (1234.5, 12.34, 0.5, 0.05, 0.0005)]
    assert shown == ["1,234 hours", "12.3 hours", "0.50 hours", "3 minutes", "1.8 seconds"]
