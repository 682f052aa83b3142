"""A server under test, started by its command and waited for, and its streamed responses."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
START_SECONDS, STOP_SECONDS = 1800, 120  # a server is slow to start on a shared machine


class Server:
    """A server process of its own group, which ends with all its children; no other may answer at its URL."""

    def __init__(self, command: str, url: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{url}/health", timeout=5)
            raise SystemExit(f"a server answers at {url} already, and would be measured instead; end it first")
        self.process = subprocess.Popen(
            shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.url = url

    def __enter__(self) -> Server:
        try:
            self.wait()
        except BaseException:  # an interruption too: the process has a session of its own, which gets no signal
            self.__exit__()
            raise
        return self

    def wait(self) -> None:
        end = time.time() + START_SECONDS
        while time.time() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(1)
        raise SystemExit(f"the server did not answer at {self.url}/health; start its command by hand to see why")

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def open_client(url: str, timeout: float) -> httpx.AsyncClient:
    """Return a client without a limit of open requests."""
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=httpx.Limits(max_connections=None))


async def stream_events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a streamed chat completion."""
    async with client.stream("POST", CHAT, json=body | {"stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))
