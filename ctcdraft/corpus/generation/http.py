"""A server that is asked in JSON and answers in JSON: retried while that may help. It knows no tokens and no corpus.

Written on the standard library, because the project has no other use for an HTTP client.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any, TypeVar

from ctcdraft.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")

RETRYABLE_STATUS = {408, 409, 425, 429}  # refusals that may not last; so may every 5xx


class RefusedError(InputError):
    """The server understood and says no: asking the same again is no use."""


@dataclass(frozen=True)
class JSONClient:
    """`timeout_s` is for each answer, `backoff_s` before the first retry and doubled before each further one."""

    url: str
    timeout_s: float
    retries: int
    backoff_s: float
    key_from: str | None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InputError(
                f"answers.url={self.url} is no address of a server; give one like http://127.0.0.1:8000/v1"
            )
        if self.timeout_s <= 0 or self.retries < 0 or self.backoff_s < 0:
            raise InputError(
                f"no server can be asked with timeout_s {self.timeout_s}, retries {self.retries} and backoff_s "
                f"{self.backoff_s}; a time-out is above 0, the others 0 or more"
            )
        if self.key_from is not None and self.key_from not in os.environ:
            raise InputError(f"answers.key_from={self.key_from} names no variable of this environment; export it first")

    def post(self, path: str, body: dict[str, Any], given_up: threading.Event) -> dict[str, Any]:
        """The answer's JSON. Raises RefusedError at a refusal, any InputError once all retries failed."""
        failures: list[str] = []
        for attempt in range(self.retries + 1):
            if attempt and given_up.wait(self.backoff_s * 2 ** (attempt - 1)):
                break
            try:
                return self._post(path, body)
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in RETRYABLE_STATUS:
                    raise RefusedError(
                        f"the server at {self.url} refuses a question ({error.code}: {error_text(error)}); check "
                        "answers.url= and answers.model=, then run again: finished batches are kept"
                    ) from error
                failures.append(f"{error.code}: {error_text(error)}")
            except TimeoutError:
                failures.append(f"no answer within {self.timeout_s:g} s")
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = getattr(error, "reason", error)
                failures.append(" ".join(str(reason).split()) or type(reason).__name__)
        raise InputError(
            f"the server at {self.url} failed {len(failures)} times at one question (last: {failures[-1]}); see to it "
            "and run again: finished batches are kept"
        )

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.key_from is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.key_from]}"
        request = urllib.request.Request(self.url.rstrip("/") + path, json.dumps(body).encode(), headers)
        # No proxy: a server of one's own is reached directly, and most proxies refuse loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout_s) as response:
                answer = json.loads(response.read())
        except urllib.error.URLError as error:  # hides a time-out of the connection in its reason
            if isinstance(error.reason, TimeoutError):
                raise error.reason from error
            raise
        if not isinstance(answer, dict):
            raise ValueError(f"a {type(answer).__name__} instead of an object")
        return answer


def error_text(error: urllib.error.HTTPError) -> str:
    """The first words of what a server says about an error."""
    try:
        return " ".join(error.read(2000).decode(errors="replace").split())[:160] or error.reason
    except (OSError, http.client.HTTPException):
        return str(error.reason)


def map_concurrently(
    work: Callable[[Item, threading.Event], Result], items: Sequence[Item], concurrency: int
) -> list[Result]:
    """work(item, given_up) of all items, in their order, `concurrency` of them under way at a time.

    The first error is raised at once, and `given_up` tells the others. Daemon threads instead of a pool: a pool
    would keep the process alive until the last hanging server has answered.
    """
    given_up = threading.Event()
    waiting: Queue[int] = Queue()
    finished: Queue[tuple[int, Any, BaseException | None]] = Queue()
    for number in range(len(items)):
        waiting.put(number)

    def worker() -> None:
        while not given_up.is_set():
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            try:
                finished.put((number, work(items[number], given_up), None))
            except BaseException as error:
                finished.put((number, None, error))

    for _ in range(min(concurrency, len(items))):
        threading.Thread(target=worker, daemon=True).start()
    results: dict[int, Any] = {}
    try:
        for _ in items:
            number, result, error = finished.get()
            if error is not None:
                raise error
            results[number] = result
    finally:
        given_up.set()
    return [results[number] for number in range(len(items))]
