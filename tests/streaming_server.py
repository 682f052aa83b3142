"""A server of streamed chat completions for tests, on loopback, whose events and their times are given."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from local_server import LocalServer, QuietHandler, running

Stream = list[tuple[float, dict[str, Any]]]  # events, each with the seconds before it


def stream(counts: list[int], gap: float, continuous: bool = True, finished: bool = True, used: bool = True) -> Stream:
    """Return events with so many new tokens each, then usage, as vLLM sends them."""
    events: Stream = []
    for number, _ in enumerate(counts, 1):
        choice = {"delta": {"content": "a"}}
        if finished and number == len(counts):
            choice |= {"finish_reason": "stop"}
        usage = {"usage": {"completion_tokens": sum(counts[:number])}} if continuous else {}
        events.append((gap if number > 1 else 0.0, {"choices": [choice]} | usage))
    if used:
        events.append((0.0, {"choices": [], "usage": {"completion_tokens": sum(counts)}}))
    return events


class StreamingServer(LocalServer):
    def __init__(self, answer: Callable[[dict[str, Any]], Stream | None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.bodies = answer, list[dict[str, Any]]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(QuietHandler):
    server: StreamingServer

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def do_POST(self) -> None:
        """Stream the events of an answer; None is status 500."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        events = self.server.answer(body)
        self.send_response(500 if events is None else 200)
        self.end_headers()
        with suppress(ConnectionError):  # the client may have closed the connection
            for seconds, event in events or ():
                time.sleep(seconds)
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


def streaming(answer: Callable[[dict[str, Any]], Stream | None]) -> AbstractContextManager[StreamingServer]:
    return running(StreamingServer(answer))
