"""Where a draft died and why, from what was seen of its pass. It knows no model and no page.

A draft dies behind its last accepted guess. What its frames then foresee is exact: every alignment that begins with
the accepted text is summed, as in `ctc/law.py`, over the words that were recorded, with all others as one class.
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

ENDED, NO_DRAFT, ALL_ACCEPTED = "ended", "no draft", "all stood"
EARLY_BLANK, MERGED_REPEAT, WRONG_TOKEN, NOT_IN_TREE, REJECTED_BY_VERIFIER = (
    "blank too early",
    "repeat merged",
    "wrong word",
    "no node",
    "refused",
)
REASONS = {
    WRONG_TOKEN: "the draft foresaw another word than the base said",
    EARLY_BLANK: "the frames had said all they meant to: that the text ends there was likelier than any word",
    MERGED_REPEAT: "the base said the last word once more, and the frames that repeated it were merged to one",
    NOT_IN_TREE: "the right word was foreseen first, or nothing was guessed there, but the tree had no node for it",
    REJECTED_BY_VERIFIER: "the tree held the base's word, but the verifier's coin refused the drawn guess",
    ALL_ACCEPTED: "every guess there could be stood: no frame, no depth or no room was left",
    ENDED: "the answer ended inside the draft",
    NO_DRAFT: "nothing was guessed",
}
OTHER_TOKENS = None  # in an outlook: any word that was not recorded


@dataclass(frozen=True)
class Forecast:
    """What the frames foresee behind the accepted text: the words' probabilities (REST: of all that were not
    recorded) and that of the end."""

    token_probs: dict[int | None, float]
    end: float

    @property
    def best(self) -> int:
        """The likeliest single word; the rest is many, and none of them is among any frame's best."""
        return max(
            (token for token in self.token_probs if token is not OTHER_TOKENS),
            key=lambda token: self.token_probs[token],
        )


def rejection_reason(one: TraceStep) -> str:
    """One of REASONS. For frames that are aligned it is what they foresaw most, not what the tree happened to hold."""
    below = {one.tokens[node] for node, parent in enumerate(one.parents) if parent == one.path[-1]}
    if one.committed < len(one.path):  # cut before the base's own word
        return ENDED
    if len(one.tokens) == 1:
        return ALL_ACCEPTED if one.depth == 0 else NO_DRAFT
    if one.bonus in below:
        return REJECTED_BY_VERIFIER
    depth, frames = len(one.accepted), one.frames
    if depth >= one.depth or (frames is not None and depth >= frames.frame_count):
        return ALL_ACCEPTED
    if frames is None:
        return reason_without_frames(one, below)
    if is_merged_repeat(one, frames):
        return MERGED_REPEAT
    predicted = forecast(frames, one.accepted)
    if predicted.end > predicted.token_probs[predicted.best]:
        return EARLY_BLANK
    return NOT_IN_TREE if predicted.best == one.bonus else WRONG_TOKEN


def reason_without_frames(one: TraceStep, below: set[int]) -> str:
    """Of a draft whose frames, if it has any, nobody saw."""
    if below:
        return WRONG_TOKEN
    return ALL_ACCEPTED if len(one.accepted) == tree_depth(one) else NOT_IN_TREE


def tree_depth(one: TraceStep) -> int:
    depths = [0]
    for parent in one.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def is_merged_repeat(one: TraceStep, frames: TraceFrames) -> bool:
    """Whether the base repeats its word, and the likeliest way to say the accepted text holds it for more frames."""
    if not one.accepted or one.bonus != one.accepted[-1] or frames.reads == "words" or not merges_repeats(frames):
        return False
    best = exact_alignments(frames, one.accepted, count=1)
    return bool(best) and spans_several_frames(best[0][1], one.bonus)


def spans_several_frames(frames: Sequence[int | None], token: int) -> bool:
    """Whether the last run of this word is longer than one frame.   5 5 blank -> yes,  5 blank 5 -> no"""
    last = max(index for index, one in enumerate(frames) if one == token)
    return last > 0 and frames[last - 1] == token


def forecast(frames: TraceFrames, accepted: Sequence[int]) -> Forecast:
    """Behind the words `accepted`, which were accepted."""
    if frames.reads == "words":
        row = frames.heard[min(len(accepted), len(frames.heard) - 1)][len(accepted)]
        words = 1 - row[-1] or 1.0  # the blank's share goes to them
        return Forecast({token: p / words for token, p in zip(frames.words, row, strict=False)}, 0.0)
    tables = [recorded_probs(frames, known) for known in range(len(frames.heard))]
    column = {token: index for index, token in enumerate(frames.words)}
    topology = CTC_TOPOLOGY if merges_repeats(frames) else TRANSDUCER_TOPOLOGY
    labels = PrefixBatch.empty(tables[0], tables[0].shape[1] - 1, 1, topology)
    for known, token in enumerate(accepted, 1):
        probs_1TC = tables[min(known, len(tables) - 1)][None]
        labels = labels.extend(torch.tensor([column[token]]), probs_1TC if frames.is_conditioned else None)
    words_1V, end_1 = labels.next_distribution()
    return Forecast(dict(zip((*frames.words, OTHER_TOKENS), words_1V[0].tolist(), strict=True)), float(end_1))


def recorded_probs(frames: TraceFrames, benchmark_hashes: int) -> Tensor:
    """Probabilities_TC: the recorded words, all others as one class, and the blank last."""
    recorded_TW = torch.tensor(frames.heard[benchmark_hashes], dtype=torch.float64)
    rest_T1 = (1 - recorded_TW.sum(1, keepdim=True)).clamp(min=0)
    return torch.cat([recorded_TW[:, :-1], rest_T1, recorded_TW[:, -1:]], dim=1)


AlignmentList = list[tuple[float, list[int | None]]]  # probabilities, and word ids by frame, None for a blank


def exact_alignments(frames: TraceFrames, text: Sequence[int], count: int) -> AlignmentList:
    """The likeliest frame sequences that collapse to just this text. Frames that listen give a fixed law to the
    accepted text alone."""
    return with_token_ids(
        frames, best_alignments(*alignment_inputs(frames, text), count, merging=merges_repeats(frames))
    )


def prefix_alignments(frames: TraceFrames, text: Sequence[int], count: int) -> tuple[float, AlignmentList]:
    """The probability that what the frames say begins with this text, and the likeliest ways to begin so."""
    ways = best_prefix_alignments(*alignment_inputs(frames, text), count, merging=merges_repeats(frames))
    return prefix_probability(*alignment_inputs(frames, text), merging=merges_repeats(frames)), with_token_ids(
        frames, ways
    )


def alignment_inputs(frames: TraceFrames, text: Sequence[int]) -> tuple[FrameTables, list[int], int]:
    """The tables, the text by their columns, and the column of the blank."""
    column = {token: index for index, token in enumerate(frames.words)}
    return frames.heard, [column[token] for token in text], len(frames.words)


def merges_repeats(frames: TraceFrames) -> bool:
    return frames.reads != "transductions"


def with_token_ids(frames: TraceFrames, found: Sequence[Alignment]) -> AlignmentList:
    ids = (*frames.words, None)
    return [(p, [ids[one] for one in way]) for p, way in found]
