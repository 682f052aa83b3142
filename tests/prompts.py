"""Requests from bare token ids, and the responses of an engine: for tests that are not about prompts or files."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ctcdraft.corpus.generation.requests import Request, ResponseGenerator
from ctcdraft.models.base_model import BaseLM


def make_requests(
    prompts: Sequence[Sequence[int]], names: Sequence[str] | None = None, turn: int = 0, sample: int = 0
) -> list[Request]:
    """Return one request per prompt, with the ids q0, q1, ... or `names`."""
    names = names or [f"q{number}" for number in range(len(prompts))]
    return [
        Request(name, turn, sample, "test", array("i", tokens), 0) for name, tokens in zip(names, prompts, strict=True)
    ]


def generated_tokens(
    answers: ResponseGenerator, base: BaseLM, prompts: Sequence[Sequence[int]], names: Sequence[str] | None = None
) -> list[list[int]]:
    return [reply.tokens for reply in answers.start(base)(make_requests(prompts, names))]
