"""Rows of transformers' own `generate` on the same base model, as an independent check of our decoding loop.

Its tokens must equal ours, and it is timed by the same clock; it drafts and verifies in its own way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding import loop
from ctcdraft.decoding.loop import Drafter
from ctcdraft.decoding.settings import DecodeStep, DecodingSettings, GenerationResult
from ctcdraft.drafters.draft_model import load_draft_model
from ctcdraft.errors import InputError, first_line
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import without_generation_config


def generate_answer(
    base: BaseLM, contestant: Any, prompt_L: Tensor, settings: DecodingSettings, stops: Collection[int], seed: int
) -> GenerationResult:
    """Decode one answer with any contestant: by our loop, or by transformers' `generate`."""
    if isinstance(contestant, StockGenerate):
        return contestant.answer(base, prompt_L, settings, stops)
    drafter: Drafter = contestant
    return loop.generate(base, drafter, prompt_L, settings, stops, seed)


class StockGenerate(torch.nn.Module):
    """Greedy `lm.generate(**options)`.

    Its first forward pass counts as the prefill, as ours does, although it may already verify a draft: the tokens of
    that forward pass do not count in tau. Nodes are the tokens of a forward pass. c, v and o are not measured, as it
    does not run our loop.

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
            self.assistant = without_generation_config(
                load_draft_model(assistant, base).to(base.dtype).for_inference().lm
            )
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
    if attention is None:
        yield
        return
    before = lm.config._attn_implementation
    try:
        lm.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise InputError(f"attention={attention} is not available here: {first_line(error)}") from error
    try:
        yield
    finally:
        lm.set_attn_implementation(before)


def unused_pad_token(prompt_L: Tensor, stops: Collection[int]) -> int:
    """Return a pad token id that does not occur in the text.

    `generate` requires one although nothing is padded here, and an assistant masks every token that equals it, which
    makes its drafts worse. A stop token is safe: transformers infers no mask from a pad token that is an EOS token.
    """
    if stops:
        return min(stops)
    prompt_tokens = set(prompt_L.tolist())
    return next(token for token in range(len(prompt_tokens) + 1) if token not in prompt_tokens)


@dataclass
class TimingStreamer:
    """A streamer for `generate` that records the tokens and time of every forward pass, and a hook for its input."""

    began: float = field(default_factory=perf_counter)
    committed: list[list[int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    input_lengths: list[int] = field(default_factory=list)

    def record_input(self, module: Any, args: Any, kwargs: Any) -> None:
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        self.input_lengths.append(input_ids.shape[-1])

    def put(self, tokens: Tensor) -> None:
        """Record the prompt, on the first call, then the tokens each forward pass committed; they are on the host."""
        self.committed.append(tokens.flatten().tolist())
        self.times.append(perf_counter())

    def end(self) -> None:
        self.times.append(perf_counter())

    def to_generation(self, stops: Collection[int]) -> GenerationResult:
        """Return what was recorded in the form of our loop's result."""
        answer = [token for tokens in self.committed[1:] for token in tokens]
        passes = tuple(
            DecodeStep(len(new), len(new) - 1, len(new) < nodes, nodes, nodes - 1)
            for new, nodes in zip(self.committed[2:], self.input_lengths[1:], strict=True)
        )
        prefilled = self.times[1] - self.began
        return GenerationResult(
            tuple(answer), passes, answer[-1] in stops, prefilled, self.times[-1] - self.began - prefilled
        )
