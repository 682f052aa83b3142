"""A completions server for tests, on loopback, with a base model of ours and failures on demand."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from local_server import LocalServer, QuietHandler, running

from ctcdraft.corpus.generation.transformers import generate_batch, sample_tokens
from ctcdraft.models.base_model import BaseLM


class CompletionsServer(LocalServer):
    """A server of token ids, as vLLM is, or (without `with_ids`) of text only, which refuses unknown fields.

    `trouble(number)` is the failure of request `number`, counted from 0: "500", "hang", "die", "nonsense" or None.
    """

    plain = frozenset({"model", "prompt", "max_tokens", "temperature", "top_p", "seed"})

    def __init__(self, base: BaseLM, with_ids: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.base, self.with_ids = base, with_ids
        self.trouble: Any = lambda number: None
        self.requests: list[dict[str, Any]] = []
        self.in_flight = self.max_in_flight = 0
        self.lock = threading.Lock()
        self.extra_tokens = 0  # reported beside the prompt, as by a server that adds BOS
        self.temperature_factor = 1.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self.base.tokenizer
        ids = body["prompt"] if self.with_ids else tokenizer(body["prompt"])["input_ids"]
        temperature = body["temperature"] * self.temperature_factor
        uniform_L = torch.rand(512, generator=torch.Generator().manual_seed(body["seed"]), dtype=torch.float64)

        def choose(logits_BV, rows, step):
            if temperature == 0:
                return logits_BV.argmax(dim=-1)
            return sample_tokens(logits_BV, temperature, uniform_L[step : step + 1])

        (answer,) = generate_batch(self.base, [list(ids)], [body["max_tokens"]], choose)
        ended = answer[-1] in self.base.stop_token_ids
        choice = {
            "text": tokenizer.decode(answer, skip_special_tokens=True),
            "finish_reason": "stop" if ended else "length",
        }
        usage = {"prompt_tokens": len(ids) + self.extra_tokens, "completion_tokens": len(answer)}
        return {"choices": [choice | ({"token_ids": answer} if self.with_ids else {})], "usage": usage}


class Handler(QuietHandler):
    server: CompletionsServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            number = len(server.requests)
            server.requests.append(body | {"path": self.path, "key": self.headers.get("Authorization")})
            server.in_flight += 1
            server.max_in_flight = max(server.max_in_flight, server.in_flight)
        self.answer(body, server.trouble(number))

    def answer(self, body: dict[str, Any], trouble: str | None) -> None:
        if trouble == "hang":
            time.sleep(30)
        elif trouble == "die":
            self.connection.close()
        elif trouble == "500":
            self.reply(500, {"error": "out of memory"})
        elif trouble == "nonsense":
            self.reply(200, {"text": "hello"})
        elif not self.server.with_ids and set(body) - self.server.plain:
            self.reply(422, {"detail": "unexpected fields"})
        elif body["model"] != "served":
            self.reply(404, {"detail": "no such model"})
        else:
            with self.server.lock:  # one forward pass at a time
                completion = self.server.complete(body)
            self.reply(200, completion)

    def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        with self.server.lock:  # before the client can send its next request
            self.server.in_flight -= 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client may have closed the connection
            self.wfile.write(data)


def serving(base: BaseLM, with_ids: bool) -> AbstractContextManager[CompletionsServer]:
    return running(CompletionsServer(base, with_ids))
