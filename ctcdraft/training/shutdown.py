"""A stop that was asked for, noticed between two steps. It knows signals; not what there is to save."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShutdownRequest:
    """asked: the signal that asked for it, None as long as nobody has."""

    received_signal: signal.Signals | None = None


@contextlib.contextmanager
def catch_signals() -> Iterator[ShutdownRequest]:
    """Within, SIGTERM and Ctrl-C only set `asked`; a second one, for the impatient, does what it always does."""
    request = ShutdownRequest()
    if threading.current_thread() is not threading.main_thread():  # Python handles signals nowhere else
        yield request
        return
    before = {number: signal.getsignal(number) for number in SHUTDOWN_SIGNALS}

    def ask(number: int, frame: object) -> None:
        request.received_signal = signal.Signals(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in SHUTDOWN_SIGNALS:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        restore()
