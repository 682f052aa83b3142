"""Where a pass spends its time: the same loop again, with stand-ins that carry a stopwatch. It never times a headline.

The loop itself has no clocks inside. Each object it talks to is replaced by a double that takes the time of
some of its methods; what no double saw is `other`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings, Drafter, GenerationResult
from ctcdraft.evaluation.records import AUTOREGRESSIVE

PASS_PARTS = ("draft", "tree", "read", "verify", "keep", "other")


@dataclass(frozen=True)
class PhaseTimes:
    """Totals of one contestant. seconds: by part, and `prefill`. kv_bytes: keys and values its passes read."""

    seconds: dict[str, float]
    passes: int
    answers: int
    kv_bytes: int

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        seconds = {part: self.seconds[part] + other.seconds[part] for part in self.seconds}
        return PhaseTimes(seconds, self.passes + other.passes, self.answers + other.answers, self.kv_bytes + other.kv_bytes)

    @property
    def a_pass(self) -> float:
        """Seconds of one whole pass; without the prefill, which is none."""
        return sum(self.seconds[part] for part in PASS_PARTS) / self.passes


@dataclass(frozen=True)
class Profile:
    """One instrumented pass: by contestant, with what the roof needs to know of base and machine."""

    spent: dict[str, PhaseTimes]
    weight_bytes: int
    bandwidth: float

    @classmethod
    def merged(cls, timings: Iterable[Profile]) -> Profile | None:
        """Of all shards: totals add up, the bandwidth is their mean."""
        timings = list(timings)
        if not timings:
            return None
        spent = timings[0].spent
        for timing in timings[1:]:
            spent = {name: spent[name] + timing.spent[name] for name in spent}
        bandwidth = sum(timing.bandwidth for timing in timings) / len(timings)
        return cls(spent, timings[0].weight_bytes, bandwidth)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "spent": {name: vars(spent) for name, spent in self.spent.items()}}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(**{**fields, "spent": {name: PhaseTimes(**spent) for name, spent in fields["spent"].items()}})


class Stopwatch:
    """Seconds by part. A part within a part stops the outer one. Nothing counts before the first draft: what
    comes earlier is the prefill, which the loop times as a whole."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0
        self._started = False

    def timed(self, part: str, function: Callable, starts: bool = False) -> Callable:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            self._started |= starts
            if not self._started:
                return function(*args, **kwargs)
            self._switch()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        return clocked

    def _switch(self) -> None:
        """Book the time since the last switch to the part that was running."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


class TimedProxy:
    """Stands in for an object: the named methods are clocked, all else is the object's own."""

    def __init__(self, original: Any, watch: Stopwatch, **parts: str) -> None:
        self._original = original
        for method, part in parts.items():
            setattr(self, method, watch.timed(part, getattr(original, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class TimedBase(TimedProxy):
    """A base whose caches carry the stopwatch too, and which remembers the last one it gave away."""

    def __init__(self, base: Any, watch: Stopwatch) -> None:
        super().__init__(base, watch, read_tree="read")
        self._watch = watch

    def new_cache(self, capacity: int) -> Any:
        self.cache = self._original.new_cache(capacity)
        # On the cache itself: transformers wants a Cache of its own, not a stand-in.
        self.cache.keep_path = self._watch.timed("keep", self.cache.keep_path)
        return self.cache


class TimedDrafter:
    """A drafter whose paths, where it has some, are clocked as `tree` and taken off `draft`."""

    def __init__(self, drafter: Any, watch: Stopwatch) -> None:
        if hasattr(drafter, "paths"):
            drafter = copy.copy(drafter)  # shallow: the weights are shared, the original keeps its own paths
            drafter.__dict__["paths"] = watch.timed("tree", drafter.paths)
        self.draft = watch.timed("draft", drafter.draft, starts=True)


def profile_answer(
    base: Any,
    drafter: Drafter,
    prompt_L: Tensor,
    settings: DecodingSettings,
    seed: int,
    stops: Collection[int] | None = None,
) -> PhaseTimes:
    """Answer one prompt with a stopwatch in every joint. stops: None for the base's own."""
    watch = Stopwatch(base.device)
    double = TimedBase(base, watch)
    clocked: Any = TimedProxy(settings, watch, process_logits="verify", verify="verify")
    stops = base.stop_token_ids if stops is None else stops
    said = generate(double, TimedDrafter(drafter, watch), prompt_L, clocked, stops, seed)
    seconds = {part: watch.seconds[part] for part in PASS_PARTS}
    seconds["other"] = said.seconds_decode - sum(seconds.values())
    seconds["prefill"] = said.seconds_prefill
    row_bytes = double.cache.bytes_held() // double.cache.length
    del double.cache.keep_path  # it holds on to its own cache, whose rows the next text may be waiting for
    return PhaseTimes(seconds, len(said.passes), 1, row_bytes * kv_rows_read(len(prompt_L), said))


def kv_rows_read(prompt: int, said: GenerationResult) -> int:
    """Rows of keys and values that the passes of a generation read: the text so far and the tree, each time.

    A prompt of 3; passes of 1 node, then of 4 of which 2 stand, then of 1   ->   (3 + 1) + (4 + 4) + (7 + 1)
    """
    rows, past = 0, prompt
    for step in said.passes:
        rows += past + step.nodes
        past += step.accepted + 1
    return rows


def relative_costs(spent: Mapping[str, PhaseTimes], name: str) -> dict[str, float] | None:
    """c, v and o: drafting, reading and all else, in whole autoregressive passes of the same session."""
    unit, ours = spent[AUTOREGRESSIVE], spent.get(name)
    if ours is None or not unit.passes or not ours.passes:
        return None
    whole = unit.a_pass
    c = (ours.seconds["draft"] + ours.seconds["tree"]) / ours.passes / whole
    v = ours.seconds["read"] / ours.passes / whole
    return {"c": c, "v": v, "o": ours.a_pass / whole - c - v}
