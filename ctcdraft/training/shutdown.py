"""Graceful shutdown: SIGTERM and Ctrl-C are recorded, and the training loop saves its state between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShutdownRequest:
    """The first signal received; None before one arrives."""

    received_signal: signal.Signals | None = None


@contextlib.contextmanager
def catch_signals() -> Iterator[ShutdownRequest]:
    """Within, the first SIGTERM or Ctrl-C is only recorded; a second one has its usual effect."""
    request = ShutdownRequest()
    if threading.current_thread() is not threading.main_thread():  # Python handles signals nowhere else
        yield request
        return
    before = {number: signal.getsignal(number) for number in SHUTDOWN_SIGNALS}

    def record(number: int, frame: object) -> None:
        request.received_signal = signal.Signals(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in SHUTDOWN_SIGNALS:
        signal.signal(number, record)
    try:
        yield request
    finally:
        restore()
