"""Records of an evaluation, one per question, and their JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ctcdraft.decoding.settings import DecodeStep
from ctcdraft.evaluation.distribution_test import PITHistogram

AUTOREGRESSIVE = "autoregressive"  # the baseline
# What decoding promises relative to autoregression, as the stored values of `owes` in report.json.
SAME_TOKENS, SAME_DISTRIBUTION, NO_GUARANTEE = "words", "law", "nothing"


@dataclass(frozen=True)
class Answer:
    """One contestant's answer to one turn."""

    tokens: tuple[int, ...]  # the first one comes from the prefill
    text: str
    passes: tuple[DecodeStep, ...]  # after the prefill
    ended: bool  # with an EOS token, not at max_new_tokens
    seconds_prefill: float
    seconds_decode: float
    peak_memory_bytes: int | None
    drawn: bool = False  # draft tokens were sampled: only autoregression's distribution may be promised, not its tokens

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
        rounding: True if rounding explains it: by decoding again in float64 (see losslessness.py), in half precision by
            the base in float32 (see half_precision.py). False if it does not. None if it cannot be decided: no copy of
            the base in float32 is possible and the margin is small, or token identity is not promised.
        owed: whether token identity is promised.
    """

    turn: int
    position: int
    margin: float | None
    rounding: bool | None
    owed: bool = True


@dataclass(frozen=True)
class Turn:
    """One turn of a question."""

    prompt_tokens: int
    cut: int  # prompt tokens that did not fit the context
    answers: dict[str, Answer]  # by contestant, in the order they were decoded


@dataclass(frozen=True)
class Record:
    """One finished question."""

    index: int  # in the benchmark
    id: str
    category: str
    reference: str | None
    turns: tuple[Turn, ...]
    divergences: dict[str, tuple[Divergence, ...]]  # by contestant, of the turns that differ from autoregression's
    marks: dict[str, PITHistogram] = field(default_factory=dict)  # by contestant; empty at temperature 0

    def answers(self, contestant: str) -> list[Answer]:
        return [turn.answers[contestant] for turn in self.turns]

    @property
    def timed(self) -> bool:
        return any(answer.seconds for turn in self.turns for answer in turn.answers.values())

    def without_times(self) -> Record:
        """Return the record with times of 0, which metrics leave out: other processes ran beside it."""

        def untimed(turn: Turn) -> Turn:
            answers = {
                name: replace(one, seconds_prefill=0.0, seconds_decode=0.0) for name, one in turn.answers.items()
            }
            return replace(turn, answers=answers)

        return replace(self, turns=tuple(map(untimed, self.turns)))


def to_json(record: Record) -> str:
    """Return a record as one line of JSON; a decoding step is a list of five numbers, as an answer has hundreds."""

    def plain(value: Any) -> Any:
        return list(vars(value).values()) if isinstance(value, DecodeStep) else vars(value)

    return json.dumps(record, default=plain, separators=(",", ":"), allow_nan=False)


def from_json(line: str) -> Record:
    def parse_answer(fields: dict[str, Any]) -> Answer:
        passes = tuple(DecodeStep(*step) for step in fields.pop("passes"))
        return Answer(tokens=tuple(fields.pop("tokens")), passes=passes, **fields)

    record = json.loads(line)
    for turn in record["turns"]:
        turn["answers"] = {name: parse_answer(answer) for name, answer in turn["answers"].items()}
    record["turns"] = tuple(Turn(**turn) for turn in record["turns"])
    divergences, histograms = record["divergences"].items(), record["marks"].items()
    record["divergences"] = {name: tuple(Divergence(**fields) for fields in unequal) for name, unequal in divergences}
    record["marks"] = {name: PITHistogram(**cells) for name, cells in histograms}
    return Record(**record)
