"""Profiling of a decoding step by phase: drafting, tree building, reading, verification, cache update.

The decoding loop contains no clocks. For profiling, each object it calls is replaced by a proxy that times some of its
methods; time outside of them is `other`. Reported speeds never come from profiled runs, which synchronise more often.
The first step of an answer is left out: its draft reads the whole prompt, and behind a long one it is not captured.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Drafter, generate, uses_fixed_shapes
from ctcdraft.decoding.settings import DecodeStep, DecodingSettings, GenerationResult
from ctcdraft.evaluation.records import AUTOREGRESSIVE

PASS_PARTS = ("draft", "tree", "read", "verify", "keep", "other")
FIXED_SHAPE_PARTS = {"draft": "draft", "read": "read", "commit": "verify"}  # the tree and the cache update included


@dataclass(frozen=True)
class PhaseTimes:
    """Totals of one contestant."""

    seconds: dict[str, float]  # by part, and of the prefill
    passes: int  # that were timed, all but an answer's first
    answers: int
    kv_bytes: int  # of keys and values that were read

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        seconds = {part: self.seconds[part] + other.seconds[part] for part in self.seconds}
        counts = self.passes + other.passes, self.answers + other.answers, self.kv_bytes + other.kv_bytes
        return PhaseTimes(seconds, *counts)

    @property
    def seconds_per_pass(self) -> float:
        """Return the mean seconds of one decoding step, without the prefill and the first step."""
        return sum(self.seconds[part] for part in PASS_PARTS) / self.passes


@dataclass(frozen=True)
class Profile:
    """Phase times by contestant, and what memory-bandwidth utilization needs of base model and device."""

    spent: dict[str, PhaseTimes]
    weight_bytes: int  # that a forward pass reads
    bandwidth: float  # bytes per second of a copy

    @classmethod
    def merge_shards(cls, timings: Sequence[Profile]) -> Profile | None:
        """Return the sum of the shards' profiles, with their mean bandwidth; None if there are none."""
        if not timings:
            return None
        spent = {name: reduce(add, (timing.spent[name] for timing in timings)) for name in timings[0].spent}
        bandwidth = sum(timing.bandwidth for timing in timings) / len(timings)
        return cls(spent, timings[0].weight_bytes, bandwidth)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "spent": {name: vars(spent) for name, spent in self.spent.items()}}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(**{**fields, "spent": {name: PhaseTimes(**spent) for name, spent in fields["spent"].items()}})


class Stopwatch:
    """Seconds by part; a nested part pauses the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open_parts: list[str] = []
        self._last_switch = self._began = 0.0
        self._steps = 0  # before the first it is the prefill, which the loop times as a whole

    @property
    def steps(self) -> int:
        """The steps that were timed, all but the first."""
        return max(self._steps - 1, 0)

    def timed(self, part: str, function: Callable, is_first: bool = False) -> Callable:
        """Return `function` with its time counted for `part`. is_first: a step begins with it."""

        def clocked(*args: Any, **kwargs: Any) -> Any:
            self._steps += is_first
            if is_first and self.steps == 1:
                self._book_time()
                self._began = self._last_switch
            if not self.steps:
                return function(*args, **kwargs)
            self._book_time()
            self._open_parts.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._book_time()
                self._open_parts.pop()

        return clocked

    def stop(self) -> dict[str, float]:
        """Return the seconds of all parts since the first timed step began."""
        self._book_time()
        seconds = {part: self.seconds[part] for part in PASS_PARTS}
        total = self._last_switch - self._began if self.steps else 0.0
        return seconds | {"other": max(total - sum(seconds.values()), 0.0)}

    def _book_time(self) -> None:
        """Add the time since the last switch to the part that was running."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels still queued are work of the part that ends here
        now = perf_counter()
        if self._open_parts:
            self.seconds[self._open_parts[-1]] += now - self._last_switch
        self._last_switch = now


class TimedProxy:
    """An object with some methods timed; all other attributes are the object's own."""

    def __init__(self, original: Any, watch: Stopwatch, **parts: str) -> None:
        self._wrapped = original
        for method, part in parts.items():
            setattr(self, method, watch.timed(part, getattr(original, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class TimedBase(TimedProxy):
    """A base model whose caches are timed too; the last cache is kept as `cache`."""

    def __init__(self, base: Any, watch: Stopwatch) -> None:
        super().__init__(base, watch, read_tree="read")
        self._watch = watch

    def new_cache(self, capacity: int) -> Any:
        self.cache = self._wrapped.new_cache(capacity)
        # On the cache itself: transformers accepts only its own Cache classes, not a proxy.
        self.cache.keep_path = self._watch.timed("keep", self.cache.keep_path)
        return self.cache


class TimedDrafter:
    """A drafter whose tree builder is timed as `tree` and not as `draft`."""

    def __init__(self, drafter: Any, watch: Stopwatch) -> None:
        if hasattr(drafter, "frame_tree"):
            drafter = copy.copy(drafter)  # shallow: weights are shared, the original keeps its tree builder
            drafter.__dict__["frame_tree"] = watch.timed("tree", drafter.frame_tree)
        self.draft = watch.timed("draft", drafter.draft, is_first=True)


def profile_answer(
    base: Any,
    drafter: Drafter,
    prompt_L: Tensor,
    settings: DecodingSettings,
    seed: int,
    steps: int | None = None,
) -> PhaseTimes:
    """Decode one answer with every phase timed; see `profile_generation`."""
    return profile_generation(base, drafter, prompt_L, settings, seed, steps)[0]


def profile_generation(
    base: Any,
    drafter: Drafter,
    prompt_L: Tensor,
    settings: DecodingSettings,
    seed: int,
    steps: int | None = None,
) -> tuple[PhaseTimes, GenerationResult]:
    """Decode one answer; return the times of its phases, too.

    steps: time so many steps, after a first one and without regard to EOS tokens.
    """
    stops = base.stop_token_ids if steps is None else frozenset[int]()
    if uses_fixed_shapes(base, drafter, settings):
        stopwatch, generation = time_fixed_shapes(base, drafter, prompt_L, settings, stops, seed, steps)
        passes, row_bytes = [*generation.passes, *generation.passes[-1:]], base.static_shapes.cache.bytes_per_row()
    else:
        stopwatch = Stopwatch(base.device)
        timed_base = TimedBase(base, stopwatch)
        timed_settings: Any = TimedProxy(settings, stopwatch, process_logits="verify", verify="verify")
        timed, limit = TimedDrafter(drafter, stopwatch), None if steps is None else steps + 1
        generation = generate(timed_base, timed, prompt_L, timed_settings, stops, seed, limit)
        passes, row_bytes = [*generation.passes], timed_base.cache.bytes_held() // timed_base.cache.length
        del timed_base.cache.keep_path  # a reference cycle that would keep the cache rows, which the next text may need
    seconds = stopwatch.stop() | {"prefill": generation.seconds_prefill}
    kv_bytes = row_bytes * sum(kv_rows_read(len(prompt_L), passes)[1:])
    return PhaseTimes(seconds, stopwatch.steps, 1, kv_bytes), generation


def time_fixed_shapes(
    base: Any, drafter: Drafter, prompt_L: Tensor, settings: DecodingSettings, *how: Any
) -> tuple[Stopwatch, GenerationResult]:
    """Decode one answer in steps of fixed shapes: each of their three parts is timed, and captured by itself.

    The step that is one too many is timed, so that the first one is made up for.
    """

    def decode() -> tuple[Stopwatch, GenerationResult]:
        stopwatch = Stopwatch(base.device)

        def watch(part: str, function: Callable[[], Any]) -> Any:
            return stopwatch.timed(FIXED_SHAPE_PARTS[part], function, is_first=part == "draft")()

        return stopwatch, base.static_shapes.generate(base, drafter, prompt_L, settings, *how, watch=watch)

    if base.device.type == "cuda":
        decode()  # captures the parts
    return decode()


def kv_rows_read(prompt: int, steps: Sequence[DecodeStep]) -> list[int]:
    """Return the rows of keys and values that each decoding step reads: the text so far and the tree.

    A prompt of 3; trees of 1 node, then of 4 with 2 accepted, then of 1   ->   3 + 1, 4 + 4, 7 + 1
    """
    rows, past = [], prompt
    for step in steps:
        rows.append(past + step.nodes)
        past += step.accepted + 1
    return rows


def relative_costs(spent: Mapping[str, PhaseTimes], name: str) -> dict[str, float] | None:
    """Return c, v and o: drafting, reading and all else, in units of one autoregressive step of the same profile."""
    unit, ours = spent[AUTOREGRESSIVE], spent.get(name)
    if ours is None or not unit.passes or not ours.passes:
        return None
    step = unit.seconds_per_pass
    c = (ours.seconds["draft"] + ours.seconds["tree"]) / ours.passes / step
    v = ours.seconds["read"] / ours.passes / step
    return {"c": c, "v": v, "o": ours.seconds_per_pass / step - c - v}
