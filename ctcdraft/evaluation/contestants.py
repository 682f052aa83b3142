"""Contestants of an evaluation: drafters of this project, and transformers' own `generate` as an independent check.

All share one base model and one set of decoding settings, and are timed by the same clock. `generate` drafts and
verifies in its own way; its tokens must equal ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding import loop
from ctcdraft.decoding.loop import Drafter
from ctcdraft.decoding.settings import DecodeStep, DecodingSettings, GenerationResult
from ctcdraft.drafters.draft_model import load_draft_model
from ctcdraft.errors import InputError, first_line
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import without_generation_config


@dataclass(frozen=True)
class Contestant:
    """A drafter under comparison, with what a report row states about it."""

    drafter: Drafter
    identity: str  # hash of config and weights; an evaluation resumes only with equal ones
    parameters: int  # of the draft head
    fingerprint: dict[str, Any]  # of the base model that the head was trained for; empty without weights
    crossing: str | None = None  # a sentence if the tree reads the frames otherwise than the objective trained them


@dataclass(frozen=True)
class EvaluationSetup:
    """Base model, drafters and decoding settings under comparison; `autoregressive` is always among the drafters."""

    base: BaseLM
    contestants: Mapping[str, Drafter]
    settings: DecodingSettings
    seed: int
    nodes: Mapping[str, int] = field(default_factory=dict)  # tree sizes that differ from the settings', by contestant

    @property
    def drafter_names(self) -> list[str]:
        """Return the contestants, besides autoregression, whose answers our loop decodes."""
        others = (name for name in self.contestants if name != AUTOREGRESSIVE)
        return [name for name in others if not isinstance(self.contestants[name], StockGenerate)]

    def settings_of(self, contestant: str) -> DecodingSettings:
        return replace(self.settings, nodes=self.nodes.get(contestant, self.settings.nodes))

    def tree_limits(self, *contestants: str) -> int | str:
        """Return the limit of the nodes of their trees, or where these differ all limits, as 12/6."""
        sizes = dict.fromkeys(self.settings_of(contestant).nodes for contestant in contestants)
        return "/".join(map(str, sizes)) if len(sizes) > 1 else next(iter(sizes))

    def answer(self, contestant: str, prompt_L: Tensor, seed: int) -> GenerationResult:
        drafter, base = self.contestants[contestant], self.base
        return generate_answer(base, drafter, prompt_L, self.settings_of(contestant), base.stop_token_ids, seed)


def generate_answer(
    base: BaseLM, contestant: Any, prompt_L: Tensor, settings: DecodingSettings, stops: Collection[int], seed: int
) -> GenerationResult:
    """Decode one answer with any contestant: by our loop, or by transformers' `generate`."""
    if isinstance(contestant, StockGenerate):
        return contestant.answer(base, prompt_L, settings, stops)
    return loop.generate(base, contestant, prompt_L, settings, stops, seed)


def qualified_name(value: Any) -> str:
    """Return a description of a verifier that is equal in every process: its import path and its field values."""
    if isinstance(value, partial):
        return qualified_name(value.func)
    if is_dataclass(value):
        arguments = ", ".join(f"{field.name}={qualified_name(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__module__}.{type(value).__qualname__}({arguments})"
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else repr(value)


class StockGenerate(torch.nn.Module):
    """Greedy `lm.generate(**options)` of transformers; c, v and o are not measured, as it does not run our loop.

    Args:
        assistant: folder of a small LM for assisted generation.
        attention: attention implementation (eager, sdpa, ...) to use instead of the base model's, hence other kernels.
    """

    def __init__(
        self,
        base: BaseLM,
        options: Mapping[str, Any],
        assistant: str | None,
        assistant_tokens: int | None,
        attention: str | None = None,
    ) -> None:
        super().__init__()
        self.options = dict(options)
        self.attention = None if attention == base.lm.config._attn_implementation else attention
        with attention_implementation(base.lm, self.attention):  # raises if it is not available
            pass
        self.assistant: Any = None
        if assistant is not None:
            draft_model = load_draft_model(assistant, base).to(base.dtype).for_inference()
            self.assistant = without_generation_config(draft_model.lm)
            # A fixed number of draft tokens, as ours drafts: by default it follows acceptance and confidence.
            self.assistant.generation_config.num_assistant_tokens = assistant_tokens
            self.assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self.assistant.generation_config.assistant_confidence_threshold = 0.0
        elif assistant_tokens is not None:
            raise InputError("assistant must be a Hugging Face folder with the base's tokenizer, got null")

    @property
    def uses_other_kernels(self) -> bool:
        """Return whether this is plain autoregression with other attention kernels, a control for rounding."""
        return self.attention is not None and self.assistant is None and not self.options

    @torch.inference_mode()
    def answer(
        self, base: BaseLM, prompt_L: Tensor, settings: DecodingSettings, stops: Collection[int]
    ) -> GenerationResult:
        """Decode one answer; raise InputError at temperatures above 0."""
        if settings.temperature > 0:
            raise InputError(
                f"decoding.temperature must be 0 for rows of transformers' generate, got {settings.temperature}: they "
                "sample with other noise, so that tokens cannot be compared; leave them out, or use decoding=greedy"
            )
        assisted = {} if self.assistant is None else {"assistant_model": self.assistant}
        streamer = TimingStreamer()
        lm = without_generation_config(base.lm)
        # The streamer gets the committed tokens alone; only the model's input tells how many nodes were read.
        handle = lm.register_forward_pre_hook(streamer.record_input, with_kwargs=True)
        try:
            with attention_implementation(base.lm, self.attention):
                lm.generate(
                    prompt_L[None],
                    attention_mask=torch.ones_like(prompt_L)[None],
                    max_new_tokens=min(settings.max_new_tokens, base.context_length - len(prompt_L)),
                    do_sample=False,
                    eos_token_id=sorted(stops) or None,
                    pad_token_id=unused_pad_token(prompt_L, stops),
                    streamer=streamer,
                    **self.options,
                    **assisted,
                )
        finally:
            handle.remove()
        return streamer.to_generation(stops)


@contextmanager
def attention_implementation(lm: Any, attention: str | None) -> Iterator[None]:
    """Switch the attention implementation of an LM within the context; None leaves it."""
    before = lm.config._attn_implementation
    try:
        if attention is not None:
            lm.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise InputError(f"attention={attention} is not available here: {first_line(error)}") from error
    try:
        yield
    finally:
        if attention is not None:
            lm.set_attn_implementation(before)


def unused_pad_token(prompt_L: Tensor, stops: Collection[int]) -> int:
    """Return a pad token id; `generate` requires one although nothing is padded here."""
    # An assistant masks every token that equals it, which makes its drafts worse. So it must not occur in the text, or
    # be a stop token: transformers infers no mask from a pad token that is an EOS token.
    if stops:
        return min(stops)
    prompt_tokens = set(prompt_L.tolist())
    return next(token for token in range(len(prompt_tokens) + 1) if token not in prompt_tokens)


class TimingStreamer:
    """A streamer for `generate` that records the tokens and time of every forward pass, and a hook for its input."""

    def __init__(self) -> None:
        self.committed: list[list[int]] = []
        self.input_lengths: list[int] = []
        self.times = [perf_counter()]

    def record_input(self, module: Any, args: Any, kwargs: Any) -> None:
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        self.input_lengths.append(input_ids.shape[-1])

    def put(self, tokens: Tensor) -> None:  # the prompt first, then what each forward pass committed, on the host
        self.committed.append(tokens.flatten().tolist())
        self.times.append(perf_counter())

    def end(self) -> None:
        self.times.append(perf_counter())

    def to_generation(self, stops: Collection[int]) -> GenerationResult:
        answer = [token for tokens in self.committed[1:] for token in tokens]
        # The first forward pass is the prefill, as ours is, although it may verify a draft already: its tokens do not
        # count in tau. Nodes are the tokens of a forward pass.
        passes = tuple(
            DecodeStep(len(new), len(new) - 1, len(new) < nodes, nodes, nodes - 1)
            for new, nodes in zip(self.committed[2:], self.input_lengths[1:], strict=True)
        )
        prefill = self.times[2] - self.times[0]  # times: start, prompt, first token, ...
        decode = self.times[-1] - self.times[0] - prefill
        return GenerationResult(tuple(answer), passes, answer[-1] in stops, prefill, decode)
