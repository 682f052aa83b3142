"""Slots of a server stay busy across turns and batches: seeded latencies in simulated time, and all slots over HTTP."""

from __future__ import annotations

import random
import threading
from heapq import heappop, heappush

from completions_server import serving
from test_generation_server import served
from tiny_models import EOS_ID, random_base

from ctcdraft.corpus.generation.openai import OpenAIClient
from ctcdraft.corpus.generation.requests import Response, batch_samples
from ctcdraft.corpus.types import Prompt

SLOTS = 32
STALL_SECONDS = 5.0  # real time without a new request after which a free slot counts as idle
RNG = random.Random(0)
PROMPTS = [
    Prompt(f"p{n}", "test", tuple(f"turn {turn}" for turn in range(1 + min(7, int(RNG.expovariate(0.4))))), None)
    for n in range(320)
]
TURNS = {prompt.id: len(prompt.turns) for prompt in PROMPTS}


def latency(key: int) -> float:
    """Return the seconds of a response: from 0.2 to 8, as answers of 10 to 400 tokens take."""
    return 0.2 + 7.8 * random.Random(key).random() ** 2


class SimulatedServer:
    """Answers in simulated time, which goes on once every slot is taken or no conversation is left for it."""

    def __init__(self) -> None:
        self.now = self.busy = 0.0
        self.unfinished, self.requests = len(PROMPTS), 0
        self.ends: list[float] = []
        self.changed = threading.Condition()

    def generate(self, client, request):
        with self.changed:
            seconds = latency(request.random_key(0))
            end = self.now + seconds
            self.busy += seconds
            self.requests += 1
            heappush(self.ends, end)
            self.changed.notify_all()
            while self.now < end:
                if len(self.ends) >= min(SLOTS, self.unfinished) or not self.changed.wait(STALL_SECONDS):
                    self.now = self.ends[0]
                    self.changed.notify_all()
                    if self.now < end:
                        self.changed.wait(STALL_SECONDS)
            heappop(self.ends)
            self.unfinished -= request.turn + 1 == TURNS[request.id]
            return Response([5, EOS_ID])


def answer_all(base, answers):
    """Answer all conversations; assert that each is there, in the order of its batch."""
    batches = dict(enumerate(batch_samples(base.tokenizer, PROMPTS, answers)))
    answered = dict(answers.answer_batches(base, batches.items()))
    for number, batch in batches.items():
        keys = [(sample.prompt.id, turn) for sample in batch for turn in range(TURNS[sample.prompt.id])]
        assert [(line["id"], line["turn"]) for line in answered[number]] == keys


def test_slots_are_busy_for_nine_tenths_of_simulated_time(monkeypatch):
    base, server = random_base(), SimulatedServer()
    monkeypatch.setattr(OpenAIClient, "_generate", lambda client, request: server.generate(client, request))
    with serving(base, True) as unused:
        answer_all(base, served(unused, batch_size=64, concurrency=SLOTS, checked=0))
    share = server.busy / (SLOTS * server.now)
    print(f"{server.requests} requests in {server.now:.0f} s of {SLOTS} slots, busy for {share:.3f} of the time")
    assert server.requests == sum(TURNS.values())
    assert share >= 0.9


def test_every_slot_is_in_use_over_http():
    """The first answers come only when as many requests as there are slots have arrived."""
    base, all_arrived = random_base(), threading.Barrier(SLOTS, timeout=60)
    with serving(base, True) as server:
        choice = {"text": "a", "token_ids": [5, EOS_ID], "finish_reason": "stop"}

        def wait_for_all(number):
            if number < SLOTS:
                all_arrived.wait()

        server.trouble = wait_for_all
        server.complete = lambda body: {"choices": [choice], "usage": {}}
        answer_all(base, served(server, batch_size=64, concurrency=SLOTS, checked=0))
        assert server.max_in_flight == SLOTS
