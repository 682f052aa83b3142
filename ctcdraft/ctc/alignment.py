"""From frames to labels, and how many frames labels need. It knows class ids, and no probability.

The map from frames to labels is B of Graves et al. 2006, "Connectionist temporal classification",
section 3.1.

The likeliest ways to say one text, frame by frame. For the eye: laws and searches sum over all of them instead.

heard[k]: a table of probabilities by frame and class, once k words are said; the last one also serves for more, so
that one is enough where frames do not listen. merging: equal neighbours are one word, as in CTC; a transducer has none.
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

    A frame of -1 is a free slot, for paths of unequal length: it says nothing, as a blank does.
    Returns labels_PT (free slots hold -1) and lengths_P.
    """
    is_label_PT = (frames_PT != blank) & (frames_PT != -1)
    starts_PT = is_label_PT.clone()
    starts_PT[:, 1:] &= frames_PT[:, 1:] != frames_PT[:, :-1]

    # What is dropped goes to one column too many, so that no shape depends on the data.
    paths, frames = frames_PT.shape
    slots_PT = torch.where(starts_PT, starts_PT.cumsum(1) - 1, frames)
    labels_PT = frames_PT.new_full((paths, frames + 1), -1)
    labels_PT.scatter_(1, slots_PT, frames_PT.where(starts_PT, -1))
    return labels_PT[:, :frames], starts_PT.sum(1)


def frames_needed(labels_XS: Tensor, lengths_X: Tensor) -> Tensor:
    """The fewest frames that can say the labels: one each, and a blank between equal neighbours.

    5 5 7  ->  4 (5 0 5 7)      5 6 7  ->  3      (nothing)  ->  0

    Labels from lengths on are padding and may hold anything. X is any number of leading axes.
    Returns needed_X.
    """
    later_S = torch.arange(1, max(labels_XS.shape[-1], 1), device=labels_XS.device)
    repeats_XS = (labels_XS[..., 1:] == labels_XS[..., :-1]) & (later_S < lengths_X[..., None])
    return lengths_X + repeats_XS.sum(-1)


Alignment = tuple[float, tuple[int, ...]]  # its probability, and the class of every frame
FrameTables = Sequence[Sequence[Sequence[float]]]
AlignmentState = tuple[int, bool]  # how many words are said, and whether the last frame said the last of them
START_STATE: AlignmentState = (0, False)


def next_states(
    state: AlignmentState, text: Sequence[int], blank: int, merging: bool
) -> Iterator[tuple[int, AlignmentState]]:
    """What the next frame may say if the text is to come out, and the state after it."""
    emitted, ends_in_label = state
    yield blank, (emitted, False)
    if ends_in_label and merging:
        yield text[emitted - 1], (emitted, True)
    if emitted < len(text) and not (ends_in_label and merging and text[emitted] == text[emitted - 1]):
        yield text[emitted], (emitted + 1, True)


def best_alignments(
    frame_tables: FrameTables, text: Sequence[int], blank: int, count: int, merging: bool = True
) -> list[Alignment]:
    """The `count` most probable alignments that collapse to just this text, best first; impossible ones are left out.

    Three frames, each p(a) = 1/2, p(b) = 1/4, p(blank) = 1/4, text "a a"   ->   a blank a (1/16), and no other
    """
    partial: dict[AlignmentState, list[Alignment]] = {START_STATE: [(1.0, ())]}
    for frame in range(len(frame_tables[0])):
        partial = advance_frame(partial, frame_tables, frame, text, blank, count, merging)
    return nlargest(count, [*partial.get((len(text), False), ()), *partial.get((len(text), True), ())])


def best_prefix_alignments(
    frame_tables: FrameTables, text: Sequence[int], blank: int, count: int, merging: bool = True
) -> list[Alignment]:
    """The same of all that begin with this text (a word at least): up to the frame that begins its last word, for the
    later ones are free.

    The frames above, text "a a"   ->   a blank a (1/16)        text "a"   ->   a (1/2), blank a (1/8), ...
    """
    partial: dict[AlignmentState, list[Alignment]] = {START_STATE: [(1.0, ())]}
    found: list[Alignment] = []
    for frame in range(len(frame_tables[0])):
        partial = advance_frame(partial, frame_tables, frame, text, blank, count, merging)
        found += partial.pop((len(text), True), [])
    return nlargest(count, found)


def advance_frame(
    partial: dict[AlignmentState, list[Alignment]],
    frame_tables: FrameTables,
    frame: int,
    text: Sequence[int],
    blank: int,
    count: int,
    merging: bool,
) -> dict[AlignmentState, list[Alignment]]:
    """One frame more: the best ways to get to every state."""
    reached: dict[AlignmentState, list[Alignment]] = defaultdict(list)
    for state, here in partial.items():
        row = frame_tables[min(state[0], len(frame_tables) - 1)][frame]
        for chosen, next_state in next_states(state, text, blank, merging):
            reached[next_state] += [(p * row[chosen], (*way, chosen)) for p, way in here if p * row[chosen] > 0]
    return {state: nlargest(count, found) for state, found in reached.items()}


def prefix_probability(frame_tables: FrameTables, text: Sequence[int], blank: int, merging: bool = True) -> float:
    """The probability of all alignments that begin with this text: what a tree ranks its nodes by."""
    if not text:
        return 1.0
    masses, begun = {START_STATE: 1.0}, 0.0
    for frame in range(len(frame_tables[0])):
        reached: dict[AlignmentState, float] = defaultdict(float)
        for state, mass in masses.items():
            row = frame_tables[min(state[0], len(frame_tables) - 1)][frame]
            for chosen, next_state in next_states(state, text, blank, merging):
                reached[next_state] += mass * row[chosen]
        begun += reached.pop((len(text), True), 0.0)
        masses = dict(reached)
    return begun
