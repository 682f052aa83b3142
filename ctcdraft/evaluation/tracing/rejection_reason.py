"""Why a draft was rejected where it was, from the trace of its decoding step.

A draft is rejected after its last accepted token. What its frames predict there is exact: all alignments that begin
with the accepted text are summed, as in ctc/next_label.py, over the recorded tokens, with all others as one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctcdraft.ctc.alignment import Alignment, FrameTables, best_alignments, best_prefix_alignments, prefix_probability
from ctcdraft.ctc.next_label import PrefixBatch
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY
from ctcdraft.evaluation.tracing.records import TraceFrames, TraceStep

ENDED, NO_DRAFT, ALL_ACCEPTED = "ended", "no draft", "all accepted"
EARLY_BLANK, MERGED_REPEAT, WRONG_TOKEN, NOT_IN_TREE, REJECTED_BY_VERIFIER = (
    "blank too early",
    "repeat merged",
    "wrong token",
    "not in tree",
    "rejected",
)
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
OTHER_TOKENS = None  # key of a forecast: all tokens that were not recorded


@dataclass(frozen=True)
class Forecast:
    """What the frames predict after the accepted text: probabilities of tokens (and OTHER_TOKENS) and of the end."""

    token_probs: dict[int | None, float]
    end: float

    @property
    def best(self) -> int:
        """Return the most probable recorded token; the others are not among any frame's best."""
        recorded = (token for token in self.token_probs if token is not OTHER_TOKENS)
        return max(recorded, key=lambda token: self.token_probs[token])


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
    if frames is None:
        return reason_without_frames(step, below)
    if is_merged_repeat(step, frames):
        return MERGED_REPEAT
    predicted = forecast(frames, step.accepted)
    if predicted.end > predicted.token_probs[predicted.best]:
        return EARLY_BLANK
    return NOT_IN_TREE if predicted.best == step.bonus else WRONG_TOKEN


def reason_without_frames(step: TraceStep, below: set[int]) -> str:
    """Return the reason for a draft whose frames were not recorded. below: tokens after the last accepted node."""
    if below:
        return WRONG_TOKEN
    return ALL_ACCEPTED if len(step.accepted) == tree_depth(step) else NOT_IN_TREE


def tree_depth(step: TraceStep) -> int:
    depths = [0]
    for parent in step.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def is_merged_repeat(step: TraceStep, frames: TraceFrames) -> bool:
    """Return whether the base model repeats the last token, on which the best alignment spends several frames."""
    if not step.accepted or step.bonus != step.accepted[-1] or frames.reads == "words" or not merges_repeats(frames):
        return False
    best = exact_alignments(frames, step.accepted, count=1)
    return bool(best) and spans_several_frames(best[0][1], step.bonus)


def spans_several_frames(frames: Sequence[int | None], token: int) -> bool:
    """Return whether the last run of this token is longer than one frame.   5 5 blank -> yes,  5 blank 5 -> no"""
    last = max(index for index, label in enumerate(frames) if label == token)
    return last > 0 and frames[last - 1] == token


def forecast(frames: TraceFrames, accepted: Sequence[int]) -> Forecast:
    """Return what the frames predict after the accepted tokens."""
    if frames.reads == "words":
        row = frames.heard[min(len(accepted), len(frames.heard) - 1)][len(accepted)]
        total = 1 - row[-1] or 1.0  # renormalised without the blank
        return Forecast({token: p / total for token, p in zip(frames.words, row, strict=False)}, 0.0)
    tables = [recorded_probs(frames, known) for known in range(len(frames.heard))]
    column = {token: index for index, token in enumerate(frames.words)}
    topology = CTC_TOPOLOGY if merges_repeats(frames) else TRANSDUCER_TOPOLOGY
    labels = PrefixBatch.empty(tables[0], tables[0].shape[1] - 1, 1, topology)
    for known, token in enumerate(accepted, 1):
        probs_1TC = tables[min(known, len(tables) - 1)][None]
        labels = labels.extend(torch.tensor([column[token]]), probs_1TC if frames.is_conditioned else None)
    probs_1V, end_1 = labels.next_distribution()
    return Forecast(dict(zip((*frames.words, OTHER_TOKENS), probs_1V[0].tolist(), strict=True)), float(end_1))


def recorded_probs(frames: TraceFrames, known: int) -> Tensor:
    """Return probs_TC after `known` accepted tokens: the recorded tokens, all others as one class, and the blank."""
    recorded_TW = torch.tensor(frames.heard[known], dtype=torch.float64)
    rest_T1 = (1 - recorded_TW.sum(1, keepdim=True)).clamp(min=0)
    return torch.cat([recorded_TW[:, :-1], rest_T1, recorded_TW[:, -1:]], dim=1)


AlignmentList = list[tuple[float, list[int | None]]]  # probability, and token id per frame, None for a blank


def exact_alignments(frames: TraceFrames, text: Sequence[int], count: int) -> AlignmentList:
    """Return the most probable frame sequences that collapse to this text.

    For label-conditioned frames that is defined for the accepted text only.
    """
    alignments = best_alignments(*alignment_inputs(frames, text), count, merging=merges_repeats(frames))
    return with_token_ids(frames, alignments)


def prefix_alignments(frames: TraceFrames, text: Sequence[int], count: int) -> tuple[float, AlignmentList]:
    """Return the probability of this prefix under the frames, and its most probable alignments."""
    inputs, merging = alignment_inputs(frames, text), merges_repeats(frames)
    alignments = best_prefix_alignments(*inputs, count, merging=merging)
    return prefix_probability(*inputs, merging=merging), with_token_ids(frames, alignments)


def alignment_inputs(frames: TraceFrames, text: Sequence[int]) -> tuple[FrameTables, list[int], int]:
    """Return the tables, the text as their columns, and the column of the blank."""
    column = {token: index for index, token in enumerate(frames.words)}
    return frames.heard, [column[token] for token in text], len(frames.words)


def merges_repeats(frames: TraceFrames) -> bool:
    return frames.reads != "transductions"


def with_token_ids(frames: TraceFrames, alignments: Sequence[Alignment]) -> AlignmentList:
    ids = (*frames.words, None)
    return [(p, [ids[column] for column in columns]) for p, columns in alignments]
