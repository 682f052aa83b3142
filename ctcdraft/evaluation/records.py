"""What was measured, question by question, and its JSON. Records know no clock, no model and no statistics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ctcdraft.decoding.settings import DecodeStep
from ctcdraft.evaluation.distribution_test import PITHistogram

AUTOREGRESSIVE = "autoregressive"  # the contestant everything is measured against


@dataclass(frozen=True)
class Answer:
    """One contestant's answer to one turn. tokens: the first one, which the prefill says, included. drawn: its
    guesses were drawn, so that it may owe autoregression its law and not its words."""

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
        """Tokens that passes committed: what tau counts."""
        return sum(step.committed for step in self.passes)

    @property
    def seconds(self) -> float:
        return self.seconds_prefill + self.seconds_decode


Questions = Sequence[Sequence[Answer]]  # the answers of one contestant: by question, by turn


@dataclass(frozen=True)
class Divergence:
    """Where an answer first leaves autoregression's, and by how little the base preferred its word there.

    margin: between the base's two best words; None where only one was possible, or where another word was due.
    rounding: True: equal when both were decoded again in float64. False: not so, or the margin is too great to ask.
    None: nobody can tell, because the base runs in half precision and the margin is small there. owed: whether the
    answer owes autoregression its words at all; where it does not, rounding is None too.
    """

    turn: int
    position: int
    margin: float | None
    rounding: bool | None
    owed: bool = True


@dataclass(frozen=True)
class Turn:
    """answers: in the order they were made, which is shuffled. cut: prompt tokens that did not fit."""

    prompt_tokens: int
    cut: int
    answers: dict[str, Answer]


@dataclass(frozen=True)
class Record:
    """One finished question. index: its place in the benchmark. divergences: by contestant, unequal turns only.
    marks: by contestant, empty where every answer owes its words."""

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
    """One line. A pass is a list of its five numbers: there are hundreds an answer."""

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
        name: tuple(Divergence(**one) for one in found) for name, found in record["divergences"].items()
    }
    record["marks"] = {name: PITHistogram(**cells) for name, cells in record["marks"].items()}
    return Record(**record)


def parse_answer(fields: dict[str, Any]) -> Answer:
    passes = tuple(DecodeStep(*step) for step in fields.pop("passes"))
    return Answer(tokens=tuple(fields.pop("tokens")), passes=passes, **fields)
