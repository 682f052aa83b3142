"""Records of an evaluation, one per question, and their JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ctcdraft.decoding.settings import DecodeStep
from ctcdraft.evaluation.distribution_test import PITHistogram

AUTOREGRESSIVE = "autoregressive"  # the baseline


@dataclass(frozen=True)
class Answer:
    """One contestant's answer to one turn.

    Args:
        tokens: all token ids, the first of which comes from the prefill.
        passes: one entry per decoding step after the prefill.
        ended: whether the answer ends with an EOS token rather than at max_new_tokens.
        drawn: whether draft tokens were sampled; then the answer need only follow the same distribution as
            autoregression's.
    """

    tokens: tuple[int, ...]
    text: str
    passes: tuple[DecodeStep, ...]
    ended: bool
    seconds_prefill: float
    seconds_decode: float
    peak_memory_bytes: int | None
    drawn: bool = False

    @property
    def committed(self) -> int:
        """Return the tokens committed by decoding steps, which is what tau counts."""
        return sum(step.committed for step in self.passes)

    @property
    def seconds(self) -> float:
        return self.seconds_prefill + self.seconds_decode


Questions = Sequence[Sequence[Answer]]  # the answers of one contestant: by question, by turn


@dataclass(frozen=True)
class Divergence:
    """The first token at which an answer differs from autoregression's.

    Args:
        position: index of the token in the answer.
        margin: difference between the base model's two best scores there; None if only one token was possible, or if
            token identity is not promised.
        rounding: True if both answers are equal when decoded again in float64. False if they are not, or if the margin
            is too large for a rounding error. None if it cannot be decided: the base model runs in half precision and
            the margin is small, or token identity is not promised.
        owed: whether token identity is promised.
    """

    turn: int
    position: int
    margin: float | None
    rounding: bool | None
    owed: bool = True


@dataclass(frozen=True)
class Turn:
    """One turn: answers by contestant in the order they were decoded; `cut` prompt tokens did not fit the context."""

    prompt_tokens: int
    cut: int
    answers: dict[str, Answer]


@dataclass(frozen=True)
class Record:
    """One finished question.

    Args:
        index: of the question in the benchmark.
        divergences: by contestant, of the turns that differ from autoregression's.
        marks: PIT histograms by contestant; empty at temperature 0.
    """

    index: int
    id: str
    category: str
    reference: str | None
    turns: tuple[Turn, ...]
    divergences: dict[str, tuple[Divergence, ...]]
    marks: dict[str, PITHistogram] = field(default_factory=dict)

    def answers(self, contestant: str) -> list[Answer]:
        return [turn.answers[contestant] for turn in self.turns]


def to_json(record: Record) -> str:
    """Return a record as one line of JSON; a decoding step is a list of five numbers, as an answer has hundreds."""

    def plain(value: Any) -> Any:
        return list(vars(value).values()) if isinstance(value, DecodeStep) else vars(value)

    return json.dumps(record, default=plain, separators=(",", ":"), allow_nan=False)


def from_json(line: str) -> Record:
    record = json.loads(line)
    record["turns"] = tuple(
        Turn(turn["prompt_tokens"], turn["cut"], {name: parse_answer(a) for name, a in turn["answers"].items()})
        for turn in record["turns"]
    )
    record["divergences"] = {
        name: tuple(Divergence(**fields) for fields in unequal) for name, unequal in record["divergences"].items()
    }
    record["marks"] = {name: PITHistogram(**cells) for name, cells in record["marks"].items()}
    return Record(**record)


def parse_answer(fields: dict[str, Any]) -> Answer:
    passes = tuple(DecodeStep(*step) for step in fields.pop("passes"))
    return Answer(tokens=tuple(fields.pop("tokens")), passes=passes, **fields)
