"""The CTC collapse, the number of frames that labels need, and the most probable alignments of one text.

The map from frames to labels is B of Graves et al. 2006, "Connectionist temporal classification", section 3.1. The
alignments serve displays only: distributions and searches sum over all of them instead.

`frame_tables[k][t][c]` is the probability of class c in frame t once k tokens have been emitted; one table is enough
for frames that are not label-conditioned. `merging`: equal neighbours are one token, as in CTC; in a transducer they
are two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import nlargest

import torch
from torch import Tensor


def collapse(frames_PT: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Merge repeated frames, then drop blanks; labels come back left-aligned.

    With blank = 0:   5 5 0 5 7  ->  5 5 7      0 0 0 0 0  ->  (nothing)

    A frame of -1 is an unused slot, for paths of unequal length, and counts as a blank.
    Returns labels_PT (unused slots hold -1) and lengths_P.
    """
    is_label_PT = (frames_PT != blank) & (frames_PT != -1)
    starts_PT = is_label_PT.clone()
    starts_PT[:, 1:] &= frames_PT[:, 1:] != frames_PT[:, :-1]

    # Dropped frames go to one extra column, so that no shape depends on the data.
    paths, frames = frames_PT.shape
    slots_PT = torch.where(starts_PT, starts_PT.cumsum(1) - 1, frames)
    labels_PT = frames_PT.new_full((paths, frames + 1), -1)
    labels_PT.scatter_(1, slots_PT, frames_PT.where(starts_PT, -1))
    return labels_PT[:, :frames], starts_PT.sum(1)


def frames_needed(labels_XS: Tensor, lengths_X: Tensor) -> Tensor:
    """Return the fewest frames_X that can align with the labels: one each, and a blank between equal neighbours.

    5 5 7  ->  4 (5 0 5 7)      5 6 7  ->  3      (nothing)  ->  0

    Labels from lengths on are padding and may hold anything. X is any number of leading axes.
    """
    later_S = torch.arange(1, max(labels_XS.shape[-1], 1), device=labels_XS.device)
    repeats_XS = (labels_XS[..., 1:] == labels_XS[..., :-1]) & (later_S < lengths_X[..., None])
    return lengths_X + repeats_XS.sum(-1)


Alignment = tuple[float, tuple[int, ...]]  # its probability, and the class of every frame
FrameRows = Sequence[Sequence[float]]  # one frame after k tokens: the last row also serves all larger k
FrameTables = Sequence[Sequence[Sequence[float]]]  # [k][t][c], see above
AlignmentState = tuple[int, bool]  # tokens emitted so far, and whether the last frame is the last of these tokens
PartialAlignments = dict[AlignmentState, list[Alignment]]
START_STATE: AlignmentState = (0, False)


def next_states(
    state: AlignmentState, text: Sequence[int], blank: int, merging: bool
) -> Iterator[tuple[int, AlignmentState]]:
    """Yield each class that the next frame may have in an alignment of the text, and the state after it."""
    emitted, ends_in_label = state
    yield blank, (emitted, False)
    if ends_in_label and merging:
        yield text[emitted - 1], (emitted, True)
    if emitted < len(text) and not (ends_in_label and merging and text[emitted] == text[emitted - 1]):
        yield text[emitted], (emitted + 1, True)


def best_alignments(
    frame_tables: FrameTables, text: Sequence[int], blank: int, count: int, merging: bool = True
) -> list[Alignment]:
    """Return the `count` most probable alignments that collapse to exactly this text, best first; possible ones only.

    Three frames, each p(a) = 1/2, p(b) = 1/4, p(blank) = 1/4, text "a a"   ->   a blank a (1/16), and no other
    """
    partial: PartialAlignments = {START_STATE: [(1.0, ())]}
    for rows in zip(*frame_tables, strict=True):
        partial = advance_frame(partial, rows, text, blank, count, merging)
    return nlargest(count, [*partial.get((len(text), False), ()), *partial.get((len(text), True), ())])


def best_prefix_alignments(
    frame_tables: FrameTables, text: Sequence[int], blank: int, count: int, merging: bool = True
) -> list[Alignment]:
    """Return the same for all texts that begin with this one (of at least one token).

    An alignment ends with the frame that begins the text's last token, because later frames are free.

    The frames above, text "a a"   ->   a blank a (1/16)        text "a"   ->   a (1/2), blank a (1/8), ...
    """
    partial: PartialAlignments = {START_STATE: [(1.0, ())]}
    complete: list[Alignment] = []
    for rows in zip(*frame_tables, strict=True):
        partial = advance_frame(partial, rows, text, blank, count, merging)
        complete += partial.pop((len(text), True), [])
    return nlargest(count, complete)


def advance_frame(
    partial: PartialAlignments, rows: FrameRows, text: Sequence[int], blank: int, count: int, merging: bool
) -> PartialAlignments:
    """Extend the best partial alignments by one frame; keep `count` per state."""
    reached: PartialAlignments = defaultdict(list)
    for state, alignments in partial.items():
        row = rows[min(state[0], len(rows) - 1)]
        for chosen, next_state in next_states(state, text, blank, merging):
            p = row[chosen]
            reached[next_state] += [(mass * p, (*path, chosen)) for mass, path in alignments if mass * p > 0]
    return {state: nlargest(count, alignments) for state, alignments in reached.items()}


def prefix_probability(frame_tables: FrameTables, text: Sequence[int], blank: int, merging: bool = True) -> float:
    """Return the probability of all alignments that begin with this text: the score of a tree's node."""
    if not text:
        return 1.0
    masses, complete = {START_STATE: 1.0}, 0.0
    for rows in zip(*frame_tables, strict=True):
        reached: dict[AlignmentState, float] = defaultdict(float)
        for state, mass in masses.items():
            row = rows[min(state[0], len(rows) - 1)]
            for chosen, next_state in next_states(state, text, blank, merging):
                reached[next_state] += mass * row[chosen]
        complete += reached.pop((len(text), True), 0.0)
        masses = dict(reached)
    return complete
