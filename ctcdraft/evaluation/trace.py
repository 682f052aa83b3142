"""Traces: every decoding step of a few answers, from which report.html is drawn, and why drafts were rejected.

What frames predict after the accepted text is exact: all alignments that begin with it are summed, as in
ctc/next_label.py, over the recorded tokens, with all others as one class.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ctcdraft.ctc.alignment import Alignment, best_alignments, best_prefix_alignments, prefix_probability
from ctcdraft.ctc.next_label import PrefixBatch
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY

FrameTables = tuple[tuple[tuple[float, ...], ...], ...]
AlignmentList = list[tuple[float, list[int | None]]]  # probability, and token id per frame, None for a blank
OTHER_TOKENS = None  # key of a forecast: all tokens that were not recorded
ENDED, NO_DRAFT, ALL_ACCEPTED, REJECTED_BY_VERIFIER = "ended", "no draft", "all accepted", "rejected"
EARLY_BLANK, MERGED_REPEAT, WRONG_TOKEN, NOT_IN_TREE = "blank too early", "repeat merged", "wrong token", "not in tree"
REASONS = {
    WRONG_TOKEN: "the draft predicted another token than the base model's",
    EARLY_BLANK: "the frames predicted the end of the draft: only blanks were more probable than any further token",
    MERGED_REPEAT: "the base model repeated the last token, and the frames that repeated it were merged into one",
    NOT_IN_TREE: "the right token was the most probable one, or nothing was drafted there, but the tree lacked it",
    REJECTED_BY_VERIFIER: "the tree held the base model's token, but the verifier rejected the sampled draft token",
    ALL_ACCEPTED: "all draft tokens were accepted: no frame, depth or position was left",
    ENDED: "the answer ended within the draft",
    NO_DRAFT: "nothing was drafted",
}


@dataclass(frozen=True)
class TraceFrames:
    """Frame probabilities of one decoding step, for W tokens and the blank."""

    reads: str  # alignments, raw frames, transductions, or tokens: frame k proposes token k, a blank means nothing
    tokens: tuple[int, ...]
    # K tables of T rows with the probabilities of these tokens and, last, of the blank. Table k is that of
    # label-conditioned frames after k accepted tokens; unconditioned frames have one table.
    probs: FrameTables

    @property
    def is_conditioned(self) -> bool:
        return len(self.probs) > 1

    @property
    def is_aligned(self) -> bool:
        return self.reads != "tokens"

    @property
    def frame_count(self) -> int:
        return len(self.probs[0])

    @property
    def merges_repeats(self) -> bool:
        return self.reads != "transductions"


@dataclass(frozen=True)
class TraceStep:
    """One decoding step."""

    tokens: tuple[int, ...]  # of the tree, root first
    parents: tuple[int, ...]  # that of the root is -1
    path: tuple[int, ...]  # the accepted nodes, root first
    bonus: int
    committed: int  # number of tokens that the answer got from the step
    depth: int  # the greatest that the tree could have had
    base: tuple[tuple[int, float], ...]  # the base model's most probable tokens after the path, and their probabilities
    frames: TraceFrames | None

    @property
    def accepted(self) -> tuple[int, ...]:
        return tuple(self.tokens[node] for node in self.path[1:])

    @property
    def committed_tokens(self) -> tuple[int, ...]:
        """Return the tokens the answer got from the step, the bonus token last unless the answer ended before it."""
        return (*self.accepted, self.bonus)[: self.committed]


@dataclass(frozen=True)
class TraceAnswer:
    """One contestant's answer to the first turn of a question."""

    id: str
    category: str
    contestant: str
    prompt: str
    pieces: tuple[str, ...]  # its text token by token; the first token comes from the prefill
    passes: tuple[TraceStep, ...]
    noise: float | None  # see `Tracer.margin_noise`

    @property
    def tau(self) -> float | None:
        return sum(step.committed for step in self.passes) / len(self.passes) if self.passes else None


@dataclass(frozen=True)
class Trace:
    """The traced answers, and the text of every token id in them."""

    token_texts: dict[int, str]
    answers: tuple[TraceAnswer, ...]

    @classmethod
    def merge_shards(cls, parts: Sequence[Self]) -> Self | None:
        """Return the traces of all shards as one, or None if there are none."""
        texts = {token: text for part in parts for token, text in part.token_texts.items()}
        return cls(texts, tuple(answer for part in parts for answer in part.answers)) if parts else None


def trace_to_json(trace: Trace) -> str:
    """Return a trace as JSON. In the file `words` are tokens, and `heard` are the probabilities of frames."""

    def plain(value: Any) -> Any:
        if isinstance(value, TraceFrames):
            return {"reads": value.reads.replace("tokens", "words"), "words": value.tokens, "heard": value.probs}
        return vars(value)

    fields = {"words": trace.token_texts, "answers": trace.answers}
    return json.dumps(fields, default=plain, separators=(",", ":"), allow_nan=False) + "\n"


def trace_from_json(text: str) -> Trace:
    def parse_step(fields: dict[str, Any]) -> TraceStep:
        frames = fields.pop("frames")
        if frames:
            frames = {key: to_tuples(value) for key, value in frames.items()}
            frames = TraceFrames(frames["reads"].replace("words", "tokens"), frames["words"], frames["heard"])
        return TraceStep(**{key: to_tuples(value) for key, value in fields.items()}, frames=frames)

    fields = json.loads(text)
    for answer in fields["answers"]:
        answer |= {"pieces": tuple(answer["pieces"]), "passes": tuple(map(parse_step, answer["passes"]))}
    texts = {int(token): piece for token, piece in fields["words"].items()}
    return Trace(texts, tuple(TraceAnswer(**answer) for answer in fields["answers"]))


def to_tuples(value: Any) -> Any:
    return tuple(map(to_tuples, value)) if isinstance(value, list) else value


def rejection_reason(step: TraceStep) -> str:
    """Return one of REASONS; for aligned frames by their most probable continuation, whatever the tree held."""
    below = {step.tokens[node] for node, parent in enumerate(step.parents) if parent == step.path[-1]}
    if step.committed < len(step.path):  # cut before the bonus token
        return ENDED
    if len(step.tokens) == 1:
        return ALL_ACCEPTED if step.depth == 0 else NO_DRAFT
    if step.bonus in below:
        return REJECTED_BY_VERIFIER
    depth, frames = len(step.accepted), step.frames
    if depth >= step.depth or (frames is not None and depth >= frames.frame_count):
        return ALL_ACCEPTED
    if frames is None:  # only the tree is known
        if below:
            return WRONG_TOKEN
        return ALL_ACCEPTED if depth == tree_depth(step) else NOT_IN_TREE
    if is_merged_repeat(step, frames):
        return MERGED_REPEAT
    predicted = forecast(frames, step.accepted)
    if predicted.end > predicted.token_probs[predicted.best]:
        return EARLY_BLANK
    return NOT_IN_TREE if predicted.best == step.bonus else WRONG_TOKEN


def tree_depth(step: TraceStep) -> int:
    depths = [0]
    for parent in step.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def is_merged_repeat(step: TraceStep, frames: TraceFrames) -> bool:
    """Return whether the base model repeats the last token, on which the best alignment spends several frames.

    The last token is 5:   5 5 blank -> yes,  5 blank 5 -> no
    """
    if not step.accepted or step.bonus != step.accepted[-1] or not frames.is_aligned or not frames.merges_repeats:
        return False
    best = exact_alignments(frames, step.accepted, count=1)
    labels = best[0][1] if best else []
    last = max((index for index, label in enumerate(labels) if label == step.bonus), default=0)
    return last > 0 and labels[last - 1] == step.bonus


@dataclass(frozen=True)
class Forecast:
    """What the frames predict after the accepted text: probabilities of tokens (and OTHER_TOKENS) and of the end."""

    token_probs: dict[int | None, float]
    end: float

    @property
    def best(self) -> int:
        """Return the most probable recorded token; the others are not among any frame's best."""
        recorded = (token for token in self.token_probs if token is not OTHER_TOKENS)
        return max(recorded, key=self.token_probs.__getitem__)


def forecast(frames: TraceFrames, accepted: Sequence[int]) -> Forecast:
    if not frames.is_aligned:
        row = frames.probs[min(len(accepted), len(frames.probs) - 1)][len(accepted)]
        total = 1 - row[-1] or 1.0  # renormalised without the blank
        return Forecast({token: p / total for token, p in zip(frames.tokens, row, strict=False)}, 0.0)
    tables = [recorded_probs(frames, known) for known in range(len(frames.probs))]
    topology = CTC_TOPOLOGY if frames.merges_repeats else TRANSDUCER_TOPOLOGY
    labels = PrefixBatch.empty(tables[0], tables[0].shape[1] - 1, 1, topology)
    for known, token in enumerate(accepted, 1):
        probs_1TC = tables[min(known, len(tables) - 1)][None] if frames.is_conditioned else None
        labels = labels.extend(torch.tensor([frames.tokens.index(token)]), probs_1TC)
    probs_1V, end_1 = labels.next_distribution()
    return Forecast(dict(zip((*frames.tokens, OTHER_TOKENS), probs_1V[0].tolist(), strict=True)), float(end_1))


def recorded_probs(frames: TraceFrames, known: int) -> Tensor:
    """Return probs_TC after `known` accepted tokens: the recorded tokens, all others as one class, and the blank."""
    recorded_TW = torch.tensor(frames.probs[known], dtype=torch.float64)
    rest_T1 = (1 - recorded_TW.sum(1, keepdim=True)).clamp(min=0)
    return torch.cat([recorded_TW[:, :-1], rest_T1, recorded_TW[:, -1:]], dim=1)


def exact_alignments(frames: TraceFrames, text: Sequence[int], count: int) -> AlignmentList:
    """Return the most probable frame sequences that collapse to this text, of conditioned frames the accepted text."""
    alignments = best_alignments(*alignment_inputs(frames, text), count, merging=frames.merges_repeats)
    return with_token_ids(frames, alignments)


def prefix_alignments(frames: TraceFrames, text: Sequence[int], count: int) -> tuple[float, AlignmentList]:
    """Return the probability of this prefix under the frames, and its most probable alignments."""
    inputs, merging = alignment_inputs(frames, text), frames.merges_repeats
    alignments = with_token_ids(frames, best_prefix_alignments(*inputs, count, merging=merging))
    return prefix_probability(*inputs, merging=merging), alignments


def alignment_inputs(frames: TraceFrames, text: Sequence[int]) -> tuple[FrameTables, list[int], int]:
    """Return the tables, the text as their columns, and the column of the blank."""
    return frames.probs, [frames.tokens.index(token) for token in text], len(frames.tokens)


def with_token_ids(frames: TraceFrames, alignments: Sequence[Alignment]) -> AlignmentList:
    ids = (*frames.tokens, None)
    return [(p, [ids[column] for column in columns]) for p, columns in alignments]
