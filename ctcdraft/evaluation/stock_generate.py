"""Outside rows: transformers' own `generate` on the same base, so that nobody need take our loop's word for it.

Its text must be ours and its clock is ours; how it drafts and verifies is its own business.
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
from ctcdraft.decoding.settings import DecodeStep, DecodingSettings, Drafter, GenerationResult
from ctcdraft.drafters.draft_model import load_draft_model
from ctcdraft.errors import InputError, first_line
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import without_generation_config


def generate_answer(
    base: BaseLM, contestant: Any, prompt_L: Tensor, settings: DecodingSettings, stops: Collection[int], seed: int
) -> GenerationResult:
    """One answer of any contestant: through our loop, or as an outside row does it."""
    if isinstance(contestant, StockGenerate):
        return contestant.answer(base, prompt_L, settings, stops)
    drafter: Drafter = contestant
    return loop.generate(base, drafter, prompt_L, settings, stops, seed)


class StockGenerate(torch.nn.Module):
    """`lm.generate(**options)`, greedy; with assistant a small LM's folder, assisted by it; with attention another
    implementation of it than the base's own (eager, sdpa, ...), and so with other kernels.

    What it reads first is its prefill, as ours is, although it verifies a draft there already: the tokens of
    that reading count in no tau. Nodes are the tokens read in a pass. It has no c, v and o: no clock of ours
    runs inside it.
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
        with attention_implementation(base.lm, self.attention):  # refused here, if it is
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
            raise InputError("no assistant: give a Hugging Face folder with the base's tokenizer as assistant:")

    @property
    def uses_other_kernels(self) -> bool:
        """Whether it is autoregression once more, its attention computed otherwise: what rounding alone does."""
        return self.attention is not None and self.assistant is None and not self.options

    @torch.inference_mode()
    def answer(
        self, base: BaseLM, prompt_L: Tensor, settings: DecodingSettings, stops: Collection[int]
    ) -> GenerationResult:
        if settings.temperature > 0:
            raise InputError(
                f"decoding.temperature={settings.temperature}: transformers' generate draws with noise of its own, so "
                "its text cannot be compared token for token; leave the outside rows to greedy decoding"
            )
        helped = {} if self.assistant is None else {"assistant_model": self.assistant}
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
                    **helped,
                )
        finally:
            handle.remove()
        return streamer.to_generation(stops)


@contextmanager
def attention_implementation(lm: Any, attention: str | None) -> Iterator[None]:
    """Meanwhile the LM computes attention so, by transformers' own switch; None: as it does."""
    if attention is None:
        yield
        return
    before = lm.config._attn_implementation
    try:
        lm.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise InputError(f"attention: {attention} is none that can be had here: {first_line(error)}") from error
    try:
        yield
    finally:
        lm.set_attn_implementation(before)


def unused_pad_token(prompt_L: Tensor, stops: Collection[int]) -> int:
    """An id that nothing is padded with, but that must be named: an assistant takes any other word that equals it
    for padding and does not see it, and then guesses badly. A stop word is safe by transformers' own rule."""
    if stops:
        return min(stops)
    prompt_tokens = set(prompt_L.tolist())
    return next(token for token in range(len(prompt_tokens) + 1) if token not in prompt_tokens)


@dataclass
class TimingStreamer:
    """Stands where `generate` expects a streamer, and at the door of the model: who said how much, and when."""

    began: float = field(default_factory=perf_counter)
    committed: list[list[int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    input_lengths: list[int] = field(default_factory=list)

    def record_input(self, module: Any, args: Any, kwargs: Any) -> None:
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        self.input_lengths.append(input_ids.shape[-1])

    def put(self, tokens: Tensor) -> None:
        """The prompt comes first, then what each reading committed; both are on the host already."""
        self.committed.append(tokens.flatten().tolist())
        self.times.append(perf_counter())

    def end(self) -> None:
        self.times.append(perf_counter())

    def to_generation(self, stops: Collection[int]) -> GenerationResult:
        answer = [token for tokens in self.committed[1:] for token in tokens]
        passes = tuple(
            DecodeStep(len(new), len(new) - 1, len(new) < nodes, nodes, nodes - 1)
            for new, nodes in zip(self.committed[2:], self.input_lengths[1:], strict=True)
        )
        prefilled = self.times[1] - self.began
        return GenerationResult(
            tuple(answer), passes, answer[-1] in stops, prefilled, self.times[-1] - self.began - prefilled
        )
