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
KINDS = ("whole", "stream", "stop token", "stop string", "sampled", "aborted", "disconnected", "wrong")
WEIGHTS = (25, 30, 10, 10, 8, 8, 7, 2)


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


class Clients:
    """Requests of all kinds to one server."""

    def __init__(self, options: argparse.Namespace, client: httpx.AsyncClient, tally: Tally) -> None:
        self.options, self.client, self.tally = options, client, tally

    def body(self, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        ids = {"model": self.options.model, "messages": messages, "max_tokens": tokens, "return_token_ids": True}
        return ids | {"temperature": 0.0} | more

    async def whole(self, body: dict[str, Any]) -> tuple[list[int], list[int], str]:
        """Return token ids of prompt and answer, and its text."""
        response = await self.client.post(CHAT, json=body)
        response.raise_for_status()
        answer = response.json()
        (choice,) = answer["choices"]
        return answer["prompt_token_ids"], choice["token_ids"], choice["message"]["content"] or ""

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
        kind, tokens = rng.choices(KINDS, WEIGHTS)[0], rng.choice((1, rng.randint(2, 40), rng.randint(2, LONGEST)))
        body = self.body(prompt, tokens)
        self.tally.kinds[kind] += 1
        try:
            if kind == "wrong":
                await self.wrong(prompt, rng)
            elif kind == "aborted":
                await self.stream(body | {"max_tokens": LONGEST}, rng.randint(1, 8))
            elif kind == "disconnected":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.whole(body | {"max_tokens": LONGEST}), rng.uniform(0.001, 0.2))
            elif kind == "sampled":
                _, ids, _ = await self.whole(body | {"temperature": 0.8, "top_k": rng.choice((0, 12)), "top_p": 0.9})
                self.expect(0 < len(ids) <= tokens, f"{len(ids)} sampled tokens of {tokens}")
            elif kind == "stop string":
                await self.stop_string(body, reference, rng)
            elif kind == "stop token":
                stop = rng.choice(reference.ids)
                _, ids, _ = await self.whole(body | {"stop_token_ids": [stop]})
                self.compare(reference, reference.ids[: reference.ids.index(stop) + 1][:tokens], ids)
            elif kind == "stream":
                ids = await self.stream(body)
                self.compare(reference, reference.ids[:tokens], ids)
            else:
                _, ids, _ = await self.whole(body)
                self.compare(reference, reference.ids[:tokens], ids)
        except Exception as error:
            self.tally.problems.append(f"{kind}: {type(error).__name__} {error}")

    async def stop_string(self, body: dict[str, Any], reference: Reference, rng: random.Random) -> None:
        """Compare the ids, and see that the text ends before the string."""
        stop = reference.stop_string(rng)
        _, ids, text = await self.whole(body | {"stop": [stop]})
        self.expect(stop not in text, f"{stop!r} is in {text!r}")
        self.compare(reference, reference.ids[: len(ids)], ids)
        if len(ids) < min(body["max_tokens"], len(reference.ids)):
            self.expect(reference.text.startswith(text + stop), f"{text!r} ended before {stop!r} of {reference.text!r}")

    async def wrong(self, prompt: str, rng: random.Random) -> None:
        """Send a request that must be refused with one sentence."""
        bodies = (
            self.body(prompt * 400, 8),
            self.body(prompt, 1_000_000),
            self.body(prompt, 8) | {"model": "another"},
            self.body(prompt, 8) | {"temperature": -1.0},
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
