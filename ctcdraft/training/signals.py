"""SIGTERM and Ctrl-C, by which a job is stopped: noted, so that the training saves its state between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def catch_signals() -> Iterator[list[signal.Signals]]:
    """Yield a list to which the first SIGTERM or Ctrl-C is added, so that the state is saved between two steps."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # Python handles signals nowhere else
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def record(number: int, frame: object) -> None:
        received.append(signal.Signals(number))
        restore()  # a second signal has its usual effect: a step may take minutes

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, record)
    try:
        yield received
    finally:
        restore()
