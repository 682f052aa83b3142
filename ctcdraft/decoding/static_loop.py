"""The decoding loop on an accelerator: steps of fixed shapes, whose outcome the host reads one step late.

While the device runs a step, the host reads what the step before has committed: one asynchronous transfer to pinned
memory. So a response ends one step after its stop token or length limit; what that step adds is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.compiled_forward import CompiledForward
from ctcdraft.decoding.loop import Drafter, commit
from ctcdraft.decoding.settings import DecodeStep, DecodingSettings, GenerationResult
from ctcdraft.decoding.static_cache import StaticCache
from ctcdraft.decoding.static_graphs import can_capture
from ctcdraft.decoding.static_prompt import padded_size
from ctcdraft.decoding.static_step import StaticDecoder, Watch
from ctcdraft.errors import InputError

MAX_DECODERS = 64  # drafters and settings whose memory and graphs are kept


class StaticShapes:
    """The memory and the captured graphs of one base's decoding steps.

    compiled: compile the forward pass of the base by torch, once per tree size, before it is run or captured.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        self.compiled_forward = CompiledForward() if compiled else None
        self.cache: StaticCache | None = None
        self.decoders: dict[tuple[Any, ...], StaticDecoder] = {}

    @classmethod
    def of(cls, static_shapes: bool, compiled: bool) -> StaticShapes | None:
        """Return what the settings base.static_shapes and base.compiled ask for; None for steps of exact shapes."""
        if compiled and not static_shapes:
            raise InputError(
                "base.compiled=true without base.static_shapes=true would compile anew for nearly every tree and text; "
                "add base.static_shapes=true"
            )
        return cls(compiled) if static_shapes else None

    def __deepcopy__(self, memo: dict) -> StaticShapes:
        return StaticShapes(self.compiled)  # graphs and compiled code belong to the weights they were made for

    @property
    def capture_error(self) -> str | None:
        """Why a step could not be captured; None where all were."""
        return self.error_of(None)

    def error_of(self, drafter: Drafter | None) -> str | None:
        """Return why a step could not be captured; None where all were. drafter: None for all."""
        decoders = [one for one in self.decoders.values() if drafter is None or one.drafter is drafter]
        return next((one.graphs.error for one in decoders if one.graphs.error), None)

    def execution_mode(self, device: torch.device, drafter: Drafter | None = None) -> str:
        """Return how steps run, for a report: "compiled and captured, fixed shapes". drafter: None for all."""
        modes = ["compiled"] if self.compiled else []
        if can_capture(device):
            error = self.error_of(drafter)
            modes.append("captured" if error is None else f"not captured ({error})")
        return f"{' and '.join(modes) or 'eager'}, fixed shapes"

    def reserve(self, base: Any, settings: DecodingSettings, rows: int) -> StaticCache:
        """Return the cache, with room for texts of so many rows; one that grows drops all graphs."""
        rows += 2 * settings.nodes  # the tree of the step that is one too many, and that before it
        if self.cache is None or self.cache.capacity < rows:
            # Doubled, so that it seldom grows: graphs are captured with the memory they read.
            self.decoders.clear()
            capacity = max(rows, 0 if self.cache is None else 2 * self.cache.capacity)
            self.cache = StaticCache(base.lm.config.num_hidden_layers, capacity, base.context_length, base.device)
        return self.cache

    def decoder(self, base: Any, drafter: Drafter, settings: DecodingSettings, rows: int) -> StaticDecoder:
        """Return the decoder of a drafter for texts of so many rows."""
        cache = self.reserve(base, settings, rows)
        settings = replace(settings, max_new_tokens=1)  # steps are the same whatever the length limit
        key = id(drafter), settings
        if (decoder := self.decoders.pop(key, None)) is None:
            if len(self.decoders) == MAX_DECODERS:
                del self.decoders[next(iter(self.decoders))]  # the least recently used one
            decoder = StaticDecoder(base, drafter, settings, cache)
        self.decoders[key] = decoder
        return decoder

    @torch.inference_mode()
    def prepare(self, base: Any, drafter: Drafter, prompt_L: Tensor, settings: DecodingSettings) -> None:
        """Capture, or compile, every step that a response to this prompt can need: that takes up to seconds."""
        longest = min(settings.max_new_tokens, base.context_length - len(prompt_L))
        decoder = self.decoder(base, drafter, settings, len(prompt_L) + longest)
        steps = {(decoder.rows_behind(len(prompt_L) + tokens), 0) for tokens in range(longest)}
        first = decoder.rows_behind(len(prompt_L)), padded_size(len(prompt_L))
        if steps | {first} <= decoder.prepared:
            return
        if first[1] is not None:
            _, context = decoder.start(prompt_L, 0)
        else:  # nothing is captured of such a prompt: a short one will do
            _, context = decoder.start(prompt_L[:1], 0, padded=False)
        decoder.run(first[0], context)
        for rows, _ in sorted(steps - decoder.prepared):
            decoder.rewind()
            decoder.run(rows)
        decoder.prepared |= steps | {first}

    @torch.inference_mode()
    def generate(
        self,
        base: Any,
        drafter: Drafter,
        prompt_L: Tensor,
        settings: DecodingSettings,
        stop_token_ids: Collection[int],
        seed: int,
        max_steps: int | None = None,
        watch: Watch | None = None,
    ) -> GenerationResult:
        """Decode one response; see loop.generate. watch: see StaticDecoder.run."""
        remaining = min(settings.max_new_tokens, base.context_length - len(prompt_L)) - 1
        decoder = self.decoder(base, drafter, settings, len(prompt_L) + remaining + 1)
        started = perf_counter()
        token, first = decoder.start(prompt_L, seed)
        prefilled = perf_counter()
        response, steps = [token], list[DecodeStep]()
        transfers, length = Transfers(decoder.report_R), len(prompt_L)
        context: Any = first
        while remaining > 0 and response[-1] not in stop_token_ids and len(steps) != max_steps:
            decoder.run(decoder.rows_behind(length), context, watch=watch)
            context = None
            transfers.begin()
            if (report := transfers.previous()) is None:
                continue
            length += len(report.tokens)
            steps.append(append_tokens(report, remaining, response, stop_token_ids))
            remaining -= len(report.tokens)
        transfers.wait()  # the surplus step is part of the time
        return GenerationResult(
            tokens=tuple(response),
            passes=tuple(steps),
            ended=response[-1] in stop_token_ids,
            seconds_prefill=prefilled - started,
            seconds_decode=perf_counter() - prefilled,
        )


@dataclass(frozen=True)
class StepReport:
    """The outcome of a step on the host."""

    tokens: tuple[int, ...]  # committed, the bonus token last
    has_rejected_child: bool
    drafted: int  # depth of the tree
    nodes: int  # of the tree, without padding

    @classmethod
    def of(cls, values: Sequence[int]) -> StepReport:
        length, has_child, drafted, nodes, *tokens = values
        return cls(tuple(tokens[:length]), bool(has_child), drafted, nodes)


def append_tokens(report: StepReport, limit: int, response: list[int], stops: Collection[int]) -> DecodeStep:
    """Append the tokens of a step, at most `limit`, to the response; return the step's counts."""
    tokens = report.tokens[:limit]
    is_rejected = report.has_rejected_child and tokens == report.tokens
    return commit(replace(report, tokens=tokens, has_rejected_child=is_rejected), report.nodes, response, stops)


class Transfers:
    """Reports of steps on their way to the host, in two buffers in turn."""

    def __init__(self, report_R: Tensor) -> None:
        self.report_R = report_R
        waits, device = not report_R.is_cpu, report_R.device
        self.buffers = [torch.empty(len(report_R), dtype=torch.int64, pin_memory=waits) for _ in range(2)]
        self.events = [torch.Event(device) if waits else None for _ in range(2)]
        self.count = 0

    def begin(self) -> None:
        """Queue the transfer of the newest step's report."""
        slot = self.count % 2
        self.buffers[slot].copy_(self.report_R, non_blocking=True)
        if (event := self.events[slot]) is not None:
            event.record()
        self.count += 1

    def previous(self) -> StepReport | None:
        """Wait for the report of the step before the newest one; None if there is none."""
        if self.count < 2:
            return None
        slot = self.count % 2
        if (event := self.events[slot]) is not None:
            event.synchronize()
        return StepReport.of(self.buffers[slot].tolist())

    def wait(self) -> None:
        """Wait until the newest step is done."""
        if self.count and (event := self.events[(self.count - 1) % 2]) is not None:
            event.synchronize()
