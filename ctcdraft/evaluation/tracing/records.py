"""A few answers pass by pass, as they were seen from outside, and their JSON. It knows words and numbers, no model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class TraceFrames:
    """What the frames of a pass said, of the words that matter and of the blank.

    reads: how the drafter's paths make texts of them: `alignments`, `raw frames`, `transductions`, or `words`, where
    frame k says word k and the blank means nothing. words: W ids. heard: K tables of T rows, each with the
    probabilities of these words and, last, of the blank; table k holds once k accepted words are said, and there is
    but one where frames do not listen.
    """

    reads: str
    words: tuple[int, ...]
    heard: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def is_conditioned(self) -> bool:
        return len(self.heard) > 1

    @property
    def frame_count(self) -> int:
        """T."""
        return len(self.heard[0])


@dataclass(frozen=True)
class TraceStep:
    """One pass. tokens, parents: of the tree, the root first (its parent is -1). path: the accepted nodes, root first.
    bonus: the base's own next word. committed: tokens of the answer that came of it. depth: how deep the tree might
    have been. base: the base's best words after the last accepted node, each with its probability."""

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
        """The guesses that stood."""
        return tuple(self.tokens[node] for node in self.path[1:])

    @property
    def committed_tokens(self) -> tuple[int, ...]:
        """What the answer got of it, the base's own word last if the answer had not ended by then."""
        return (*self.accepted, self.bonus)[: self.committed]


@dataclass(frozen=True)
class TraceAnswer:
    """One contestant's answer to the first turn of a question. pieces: its text token by token, first the one that
    the prefill says. noise: how far the base's top-2 margins in its passes lay, at most, from those of one reading of
    the finished text; None where there was no pass."""

    id: str
    category: str
    contestant: str
    prompt: str
    pieces: tuple[str, ...]
    passes: tuple[TraceStep, ...]
    noise: float | None

    @property
    def tau(self) -> float | None:
        return sum(one.committed for one in self.passes) / len(self.passes) if self.passes else None


@dataclass(frozen=True)
class Trace:
    """words: what every id that occurs looks like."""

    words: dict[int, str]
    answers: tuple[TraceAnswer, ...]

    @classmethod
    def merge_shards(cls, parts: Iterable[Self]) -> Self | None:
        """Of all shards; None where there are none."""
        parts = list(parts)
        if not parts:
            return None
        texts = {token: text for part in parts for token, text in part.words.items()}
        return cls(texts, tuple(answer for part in parts for answer in part.answers))


def trace_to_json(seen: Trace) -> str:
    return json.dumps(seen, default=vars, separators=(",", ":"), allow_nan=False) + "\n"


def trace_from_json(text: str) -> Trace:
    fields = json.loads(text)
    texts = {int(token): text_of_token for token, text_of_token in fields["words"].items()}
    return Trace(texts, tuple(parse_trace_answer(one) for one in fields["answers"]))


def parse_trace_answer(fields: dict[str, Any]) -> TraceAnswer:
    passes = tuple(parse_trace_step(one) for one in fields["passes"])
    return TraceAnswer(**{**fields, "pieces": tuple(fields["pieces"]), "passes": passes})


def parse_trace_step(fields: dict[str, Any]) -> TraceStep:
    frames = fields["frames"] and TraceFrames(**{key: to_tuples(value) for key, value in fields["frames"].items()})
    return TraceStep(**{key: to_tuples(value) for key, value in fields.items() if key != "frames"}, frames=frames)


def to_tuples(value: Any) -> Any:
    """Lists of lists as tuples of tuples."""
    return tuple(map(to_tuples, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
