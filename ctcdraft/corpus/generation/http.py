"""JSON over HTTP with retries (httpx), and work in threads that does not wait for hanging requests."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from queue import Queue
from typing import Any, TypeVar

import httpx

from ctcdraft.errors import InputError, check_float, check_int

Item = TypeVar("Item")
Result = TypeVar("Result")

RETRYABLE_STATUS = {408, 409, 425, 429}  # and every 5xx


class RefusedError(InputError):
    """A status that the same request will get again."""


@dataclass(frozen=True)
class JSONClient:
    """A client of one server."""

    url: str
    timeout_s: float  # for each response
    retries: int
    backoff_s: float  # before the first retry, doubled before each further one
    key_from: str | None  # name of the environment variable with the API key

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InputError(
                f"answers.url={self.url} is no address of a server; give one like http://127.0.0.1:8000/v1"
            )
        check_float(self.timeout_s, "answers.timeout_s", above=0)
        check_int(self.retries, "answers.retries", least=0)
        check_float(self.backoff_s, "answers.backoff_s", least=0)
        _ = self._headers  # checks the key before anything is generated

    @cached_property
    def _headers(self) -> dict[str, str]:
        if self.key_from is None:
            return {}
        if self.key_from not in os.environ:
            raise InputError(f"answers.key_from={self.key_from} names no variable of this environment; export it first")
        key = os.environ[self.key_from].strip()
        # httpx would print the header with the key in its error, once per retry.
        if not (key and key.isascii() and key.isprintable()):
            raise InputError(
                f"answers.key_from={self.key_from} holds no API key: one line of ASCII characters is needed; export it "
                "again"
            )
        return {"Authorization": f"Bearer {key}"}

    @cached_property
    def _client(self) -> httpx.Client:
        return httpx.Client(
            headers=self._headers,
            timeout=self.timeout_s,
            # No proxy of the environment: most refuse loopback addresses. That also makes httpx ignore SSL_CERT_FILE
            # and SSL_CERT_DIR, which this context reads; its default is the system's certificate authorities.
            trust_env=False,
            verify=ssl.create_default_context(),
            # A new connection per request: a server may close an idle one just as it is used again.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    def post(self, path: str, body: dict[str, Any], cancelled: threading.Event) -> dict[str, Any]:
        """Return the JSON object of the response.

        Raise RefusedError for a status that a retry does not change, InputError after the last failed attempt.
        """
        failures: list[str] = []
        for attempt in range(self.retries + 1):
            if attempt and cancelled.wait(self.backoff_s * 2 ** (attempt - 1)):
                break
            try:
                reply = self._client.post(self.url.rstrip("/") + path, json=body).raise_for_status().json()
                if isinstance(reply, dict):
                    return reply
                failures.append(f"a {type(reply).__name__} instead of an object")
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                text = " ".join(error.response.text.split())[:160] or error.response.reason_phrase
                if status < 500 and status not in RETRYABLE_STATUS:
                    raise RefusedError(
                        f"the server at {self.url} refuses a request ({status}: {text}); check answers.url= and "
                        "answers.model=, then run again: finished batches are kept"
                    ) from error
                failures.append(f"{status}: {text}")
            except httpx.TimeoutException:
                failures.append(f"no response within {self.timeout_s:g} s")
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
                failures.append(" ".join(str(error).split()).rstrip(".") or type(error).__name__)
        raise InputError(
            f"the server at {self.url} failed {len(failures)} times at one request (last: {failures[-1]}); check the "
            "server and run again: finished batches are kept"
        )


def stream_concurrently(
    work: Callable[[Item], Result], items: Iterable[Item], concurrency: int, cancelled: threading.Event
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with work(item) as it is finished; until the items run out, `concurrency` are at work at a time.

    An item is taken from `items` when a thread is free for it. The first exception is raised at once, and sets
    `cancelled`, as the end of the iteration does.
    """
    remaining, taking = iter(items), threading.Lock()
    finished: Queue[tuple[Item, Result] | BaseException | None] = Queue()

    def worker() -> None:
        try:
            while not cancelled.is_set():
                with taking:  # a generator must not run in two threads
                    item = next(remaining)
                finished.put((item, work(item)))
        except StopIteration:
            pass
        except BaseException as error:  # raised by the thread that waits for the results
            finished.put(error)
        finished.put(None)

    # Daemons: a ThreadPoolExecutor would keep the process alive until the last hanging request has timed out.
    for _ in range(concurrency):
        threading.Thread(target=worker, daemon=True).start()
    running = concurrency
    try:
        while running:
            result = finished.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                running -= 1
            else:
                yield result
    finally:
        cancelled.set()
