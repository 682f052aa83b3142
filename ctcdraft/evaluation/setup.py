"""What is compared: base model, contestants and decoding settings, and what these promise about the text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ctcdraft.decoding.loop import Drafter
from ctcdraft.decoding.settings import DecodingSettings, GenerationResult
from ctcdraft.evaluation.records import Answer
from ctcdraft.evaluation.stock_generate import generate_answer
from ctcdraft.models.base_model import BaseLM


@dataclass(frozen=True)
class Contestant:
    """A drafter under comparison.

    Args:
        identity: hash of config and weights; an evaluation resumes only with equal ones.
        parameters: number of weights of the draft head.
        fingerprint: of the base model that the head was trained for; empty for drafters without weights.
        crossing: a sentence if the tree reads the frames otherwise than the objective trained them, else None.
    """

    drafter: Drafter
    identity: str
    parameters: int
    fingerprint: dict[str, Any]
    crossing: str | None = None


@dataclass(frozen=True)
class EvaluationSetup:
    """Base model, drafters and decoding settings under comparison; `autoregressive` is always among the drafters.

    Args:
        nodes: tree sizes of single contestants, where they differ from the settings'.
    """

    base: BaseLM
    contestants: Mapping[str, Drafter]
    settings: DecodingSettings
    seed: int
    nodes: Mapping[str, int] = field(default_factory=dict)

    def settings_of(self, contestant: str) -> DecodingSettings:
        return replace(self.settings, nodes=self.nodes.get(contestant, self.settings.nodes))

    def answer(self, contestant: str, prompt_L: Tensor, seed: int) -> GenerationResult:
        drafter, base = self.contestants[contestant], self.base
        return generate_answer(base, drafter, prompt_L, self.settings_of(contestant), base.stop_token_ids, seed)


def guarantee(settings: DecodingSettings, answers: Iterable[Answer]) -> str:
    """Return what decoding promises relative to autoregression, as the `owes` field of report.json.

    `words`: identical tokens. `law`: tokens from the same distribution. `nothing`: the verifier is lossy.
    """
    if all(settings.owes_token_identity(answer.drawn) for answer in answers):
        return "words"
    return "law" if settings.lossless else "nothing"


def qualified_name(value: Any) -> str:
    """Return a description of a verifier that is equal in every process: its import path and its field values."""
    if isinstance(value, partial):
        return qualified_name(value.func)
    if is_dataclass(value):
        arguments = ", ".join(f"{field.name}={qualified_name(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__module__}.{type(value).__qualname__}({arguments})"
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else repr(value)


def dtype_name(setup: EvaluationSetup) -> str:
    return str(setup.base.dtype).removeprefix("torch.")
