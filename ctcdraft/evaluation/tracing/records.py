"""Trace records: every decoding step of a few answers, and their JSON, from which report.html is drawn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class TraceFrames:
    """Frame probabilities of one decoding step, for a few tokens and the blank.

    Args:
        reads: how the tree builder interprets frames: `alignments`, `raw frames`, `transductions`, or `words`, where
            frame k proposes token k and the blank means nothing.
        words: the W token ids.
        heard: K tables of T rows with the probabilities of these tokens and, last, of the blank. Table k is that of
            label-conditioned frames after k accepted tokens; unconditioned frames have one table.
    """

    reads: str
    words: tuple[int, ...]
    heard: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def is_conditioned(self) -> bool:
        return len(self.heard) > 1

    @property
    def frame_count(self) -> int:
        """Return T."""
        return len(self.heard[0])


@dataclass(frozen=True)
class TraceStep:
    """One decoding step.

    Args:
        tokens, parents: of the tree, root first; the root's parent is -1.
        path: the accepted nodes, root first.
        committed: number of tokens that the answer got from the step.
        depth: greatest depth the tree could have had.
        base: the base model's most probable tokens after the last accepted node, with their probabilities.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    bonus: int
    committed: int
    depth: int
    base: tuple[tuple[int, float], ...]
    frames: TraceFrames | None

    @property
    def accepted(self) -> tuple[int, ...]:
        """Return the accepted draft tokens."""
        return tuple(self.tokens[node] for node in self.path[1:])

    @property
    def committed_tokens(self) -> tuple[int, ...]:
        """Return the tokens the answer got from the step, the bonus token last unless the answer ended before it."""
        return (*self.accepted, self.bonus)[: self.committed]


@dataclass(frozen=True)
class TraceAnswer:
    """One contestant's answer to the first turn of a question.

    Args:
        pieces: its text token by token; the first token comes from the prefill.
        noise: largest difference between the base model's top-2 margins in the decoding steps and in one forward pass
            over the finished text; None if there were no steps.
    """

    id: str
    category: str
    contestant: str
    prompt: str
    pieces: tuple[str, ...]
    passes: tuple[TraceStep, ...]
    noise: float | None

    @property
    def tau(self) -> float | None:
        return sum(step.committed for step in self.passes) / len(self.passes) if self.passes else None


@dataclass(frozen=True)
class Trace:
    """The traced answers, and the text of every token id in them (`words`)."""

    words: dict[int, str]
    answers: tuple[TraceAnswer, ...]

    @classmethod
    def merge_shards(cls, parts: Iterable[Self]) -> Self | None:
        """Return the traces of all shards as one, or None if there are none."""
        parts = list(parts)
        if not parts:
            return None
        texts = {token: text for part in parts for token, text in part.words.items()}
        return cls(texts, tuple(answer for part in parts for answer in part.answers))


def trace_to_json(trace: Trace) -> str:
    return json.dumps(trace, default=vars, separators=(",", ":"), allow_nan=False) + "\n"


def trace_from_json(text: str) -> Trace:
    fields = json.loads(text)
    texts = {int(token): piece for token, piece in fields["words"].items()}
    return Trace(texts, tuple(parse_trace_answer(answer) for answer in fields["answers"]))


def parse_trace_answer(fields: dict[str, Any]) -> TraceAnswer:
    passes = tuple(parse_trace_step(step) for step in fields["passes"])
    return TraceAnswer(**{**fields, "pieces": tuple(fields["pieces"]), "passes": passes})


def parse_trace_step(fields: dict[str, Any]) -> TraceStep:
    frames = fields["frames"] and TraceFrames(**{key: to_tuples(value) for key, value in fields["frames"].items()})
    return TraceStep(**{key: to_tuples(value) for key, value in fields.items() if key != "frames"}, frames=frames)


def to_tuples(value: Any) -> Any:
    """Return nested lists as nested tuples."""
    return tuple(map(to_tuples, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
