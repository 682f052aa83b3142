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
from ctcdraft.evaluation.tracing.records import SeenFrames, SeenPass

ENDED, NO_DRAFT, ALL_STOOD = "ended", "no draft", "all stood"
BLANK, MERGED, WRONG, NO_NODE, REFUSED = (
    "blank too early",
    "repeat merged",
    "wrong word",
    "no node",
    "refused",
)
REASONS = {
    WRONG: "the draft foresaw another word than the base said",
    BLANK: "the frames had said all they meant to: that the text ends there was likelier than any word",
    MERGED: "the base said the last word once more, and the frames that repeated it were merged to one",
    NO_NODE: "the right word was foreseen first, or nothing was guessed there, but the tree had no node for it",
    REFUSED: "the tree held the base's word, but the verifier's coin refused the drawn guess",
    ALL_STOOD: "every guess there could be stood: no frame, no depth or no room was left",
    ENDED: "the answer ended inside the draft",
    NO_DRAFT: "nothing was guessed",
}
REST = None  # in an outlook: any word that was not recorded


@dataclass(frozen=True)
class Outlook:
    """What the frames foresee behind the accepted text: the words' probabilities (REST: of all that were not
    recorded) and that of the end."""

    words: dict[int | None, float]
    end: float

    @property
    def best(self) -> int:
        """The likeliest single word; the rest is many, and none of them is among any frame's best."""
        return max((word for word in self.words if word is not REST), key=lambda word: self.words[word])


def reason(one: SeenPass) -> str:
    """One of REASONS. For frames that are aligned it is what they foresaw most, not what the tree happened to hold."""
    below = {one.tokens[node] for node, parent in enumerate(one.parents) if parent == one.path[-1]}
    if one.committed < len(one.path):  # cut before the base's own word
        return ENDED
    if len(one.tokens) == 1:
        return ALL_STOOD if one.depth == 0 else NO_DRAFT
    if one.bonus in below:
        return REFUSED
    depth, frames = len(one.accepted), one.frames
    if depth >= one.depth or (frames is not None and depth >= frames.count):
        return ALL_STOOD
    if frames is None:
        return not_framed(one, below)
    if merged(one, frames):
        return MERGED
    foreseen = outlook(frames, one.accepted)
    if foreseen.end > foreseen.words[foreseen.best]:
        return BLANK
    return NO_NODE if foreseen.best == one.bonus else WRONG


def not_framed(one: SeenPass, below: set[int]) -> str:
    """Of a draft whose frames, if it has any, nobody saw."""
    if below:
        return WRONG
    return ALL_STOOD if len(one.accepted) == height(one) else NO_NODE


def height(one: SeenPass) -> int:
    depths = [0]
    for parent in one.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def merged(one: SeenPass, frames: SeenFrames) -> bool:
    """Whether the base repeats its word, and the likeliest way to say the accepted text holds it for more frames."""
    if not one.accepted or one.bonus != one.accepted[-1] or frames.reads == "words" or not merges(frames):
        return False
    best = alignments(frames, one.accepted, count=1)
    return bool(best) and held(best[0][1], one.bonus)


def held(frames: Sequence[int | None], word: int) -> bool:
    """Whether the last run of this word is longer than one frame.   5 5 blank -> yes,  5 blank 5 -> no"""
    last = max(place for place, one in enumerate(frames) if one == word)
    return last > 0 and frames[last - 1] == word


def outlook(frames: SeenFrames, said: Sequence[int]) -> Outlook:
    """Behind the words `said`, which were accepted."""
    if frames.reads == "words":
        row = frames.heard[min(len(said), len(frames.heard) - 1)][len(said)]
        words = 1 - row[-1] or 1.0  # the blank's share goes to them
        return Outlook({word: p / words for word, p in zip(frames.words, row, strict=False)}, 0.0)
    tables = [table_of(frames, known) for known in range(len(frames.heard))]
    place = {word: index for index, word in enumerate(frames.words)}
    topology = CTC_TOPOLOGY if merges(frames) else TRANSDUCER_TOPOLOGY
    labels = PrefixBatch.empty(tables[0], tables[0].shape[1] - 1, 1, topology)
    for known, word in enumerate(said, 1):
        heard_1TC = tables[min(known, len(tables) - 1)][None]
        labels = labels.extend(torch.tensor([place[word]]), heard_1TC if frames.listen else None)
    words_1V, end_1 = labels.next_distribution()
    return Outlook(dict(zip((*frames.words, REST), words_1V[0].tolist(), strict=True)), float(end_1))


def table_of(frames: SeenFrames, known: int) -> Tensor:
    """Probabilities_TC: the recorded words, all others as one class, and the blank last."""
    recorded_TW = torch.tensor(frames.heard[known], dtype=torch.float64)
    rest_T1 = (1 - recorded_TW.sum(1, keepdim=True)).clamp(min=0)
    return torch.cat([recorded_TW[:, :-1], rest_T1, recorded_TW[:, -1:]], dim=1)


Ways = list[tuple[float, list[int | None]]]  # probabilities, and word ids by frame, None for a blank


def alignments(frames: SeenFrames, text: Sequence[int], count: int) -> Ways:
    """The likeliest frame sequences that collapse to just this text. Frames that listen give a fixed law to the
    accepted text alone."""
    return spelled(frames, best_alignments(*told(frames, text), count, merging=merges(frames)))


def beginnings(frames: SeenFrames, text: Sequence[int], count: int) -> tuple[float, Ways]:
    """The probability that what the frames say begins with this text, and the likeliest ways to begin so."""
    ways = best_prefix_alignments(*told(frames, text), count, merging=merges(frames))
    return prefix_probability(*told(frames, text), merging=merges(frames)), spelled(frames, ways)


def told(frames: SeenFrames, text: Sequence[int]) -> tuple[FrameTables, list[int], int]:
    """The tables, the text by their columns, and the column of the blank."""
    place = {word: index for index, word in enumerate(frames.words)}
    return frames.heard, [place[word] for word in text], len(frames.words)


def merges(frames: SeenFrames) -> bool:
    return frames.reads != "transductions"


def spelled(frames: SeenFrames, found: Sequence[Alignment]) -> Ways:
    ids = (*frames.words, None)
    return [(p, [ids[one] for one in way]) for p, way in found]
