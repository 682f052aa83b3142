"""Clients that ask a server for whole, streamed, stopped, aborted and wrong answers, and compare what they get."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.server_process import CHAT, stream_events

LONGEST = 160  # tokens of an answer
# Methods of Clients, and how often each is called.
KINDS = {
    "whole": 25, "streamed": 30, "stop_token": 10, "stop_string": 10, "sampled": 8, "aborted": 8, "disconnected": 7,
    "wrong": 2,
}  # fmt: skip


@dataclass
class Tally:
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    different: list[dict[str, Any]] = field(default_factory=list)  # answers that are not the undrafted server's
    tokens: int = 0
    compared: int = 0


@dataclass(frozen=True)
class Reference:
    prompt_ids: list[int]
    ids: list[int]
    text: str

    def stop_string(self, rng: random.Random) -> str:
        start = rng.randrange(max(1, len(self.text) - 4))
        return self.text[start : start + rng.randint(2, 4)] or "."


def with_first_cause(error: BaseException) -> str:
    """Return the error and the one that all were raised from, where one was hidden with `from None`, too."""
    first = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    return repr(error) if first is error else f"{error!r}, caused by {first!r}"


class Clients:
    """Requests of all kinds to one server. Each kind gets a body, the undrafted answer and random numbers."""

    def __init__(self, options: argparse.Namespace, client: httpx.AsyncClient, tally: Tally) -> None:
        self.options, self.client, self.tally = options, client, tally

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        ids = {"model": self.options.model, "messages": messages, "max_tokens": tokens, "return_token_ids": True}
        return ids | {"temperature": 0.0}

    async def post(self, body: dict[str, Any]) -> Reference:
        response = await self.client.post(CHAT, json=body)
        response.raise_for_status()
        answer = response.json()
        (choice,) = answer["choices"]
        return Reference(answer["prompt_token_ids"], choice["token_ids"], choice["message"]["content"] or "")

    async def stream(self, body: dict[str, Any], chunks: int | None = None) -> list[int]:
        """Return token ids; after `chunks` the connection is closed."""
        ids: list[int] = []
        async with contextlib.aclosing(stream_events(self.client, body)) as events:
            async for event in events:
                if "error" in event:
                    raise RuntimeError(f"the stream has the error {event['error']}")
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
                if chunks is not None and (chunks := chunks - 1) <= 0:
                    break
        return ids

    async def request(self, prompt: str, reference: Reference, rng: random.Random) -> None:
        """Send a request of a random kind; count it and its problems."""
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        self.tally.kinds[kind] += 1
        body = self.body(prompt, rng.choice((1, rng.randint(2, 40), rng.randint(2, LONGEST))))
        try:
            await getattr(self, kind)(body, reference, rng)
        except Exception as error:
            self.tally.problems.append(f"{kind}: {with_first_cause(error)}")

    async def whole(self, body: dict[str, Any], reference: Reference, rng: random.Random) -> None:
        self.compare(reference, reference.ids[: body["max_tokens"]], (await self.post(body)).ids)

    async def streamed(self, body: dict[str, Any], reference: Reference, rng: random.Random) -> None:
        self.compare(reference, reference.ids[: body["max_tokens"]], await self.stream(body))

    async def stop_token(self, body: dict[str, Any], reference: Reference, rng: random.Random) -> None:
        stop = rng.choice(reference.ids)
        expected = reference.ids[: reference.ids.index(stop) + 1][: body["max_tokens"]]
        self.compare(reference, expected, (await self.post(body | {"stop_token_ids": [stop]})).ids)

    async def stop_string(self, body: dict[str, Any], reference: Reference, rng: random.Random) -> None:
        """Compare the ids, and see that the text ends before the string."""
        stop = reference.stop_string(rng)
        answer = await self.post(body | {"stop": [stop]})
        ids, text = answer.ids, answer.text
        self.expect(stop not in text, f"{stop!r} is in {text!r}")
        self.compare(reference, reference.ids[: len(ids)], ids)
        if len(ids) < min(body["max_tokens"], len(reference.ids)):
            self.expect(reference.text.startswith(text + stop), f"{text!r} ended before {stop!r} of {reference.text!r}")

    async def sampled(self, body: dict[str, Any], reference: Reference, rng: random.Random) -> None:
        ids = (await self.post(body | {"temperature": 0.8, "top_k": rng.choice((0, 12)), "top_p": 0.9})).ids
        self.expect(0 < len(ids) <= body["max_tokens"], f"{len(ids)} sampled tokens of {body['max_tokens']}")

    async def aborted(self, body: dict[str, Any], reference: Reference, rng: random.Random) -> None:
        await self.stream(body | {"max_tokens": LONGEST}, rng.randint(1, 8))

    async def disconnected(self, body: dict[str, Any], reference: Reference, rng: random.Random) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.post(body | {"max_tokens": LONGEST}), rng.uniform(0.001, 0.2))

    async def wrong(self, body: dict[str, Any], reference: Reference, rng: random.Random) -> None:
        """Send a request that must be refused with one sentence."""
        bodies = (
            self.body(body["messages"][0]["content"] * 400, 8),
            body | {"max_tokens": 1_000_000},
            body | {"model": "another"},
            body | {"temperature": -1.0},
            {"model": self.options.model},
        )
        response = await self.client.post(CHAT, json=rng.choice(bodies))
        message = response.json().get("error", {}).get("message", "")
        self.expect(response.status_code in (400, 404, 422) and message, f"{response.status_code} {response.text}")

    def compare(self, reference: Reference, expected: list[int], ids: list[int]) -> None:
        self.tally.compared += 1
        self.tally.tokens += len(ids)
        if ids != expected:
            self.tally.different.append({"prompt": reference.prompt_ids, "ours": ids, "theirs": expected})

    def expect(self, right: Any, problem: str) -> None:
        if not right:
            self.tally.problems.append(problem)
