"""The likeliest ways to say one text, frame by frame. For the eye: laws and searches sum over all of them instead.

heard[k]: a table of probabilities by frame and class, once k words are said; the last one also serves for more, so
that one is enough where frames do not listen. merging: equal neighbours are one word, as in CTC; a transducer has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import nlargest

Alignment = tuple[float, tuple[int, ...]]  # its probability, and the class of every frame
Heard = Sequence[Sequence[Sequence[float]]]
State = tuple[int, bool]  # how many words are said, and whether the last frame said the last of them
BEFORE: State = (0, False)


def moves(state: State, text: Sequence[int], blank: int, merging: bool) -> Iterator[tuple[int, State]]:
    """What the next frame may say if the text is to come out, and the state after it."""
    emitted, ends_in_label = state
    yield blank, (emitted, False)
    if ends_in_label and merging:
        yield text[emitted - 1], (emitted, True)
    if emitted < len(text) and not (ends_in_label and merging and text[emitted] == text[emitted - 1]):
        yield text[emitted], (emitted + 1, True)


def best_alignments(frame_tables: Heard, text: Sequence[int], blank: int, count: int, merging: bool = True) -> list[Alignment]:
    """The `count` most probable alignments that collapse to just this text, best first; impossible ones are left out.

    Three frames, each p(a) = 1/2, p(b) = 1/4, p(blank) = 1/4, text "a a"   ->   a blank a (1/16), and no other
    """
    partial: dict[State, list[Alignment]] = {BEFORE: [(1.0, ())]}
    for frame in range(len(frame_tables[0])):
        partial = onward(partial, frame_tables, frame, text, blank, count, merging)
    return nlargest(count, [*partial.get((len(text), False), ()), *partial.get((len(text), True), ())])


def best_beginnings(frame_tables: Heard, text: Sequence[int], blank: int, count: int, merging: bool = True) -> list[Alignment]:
    """The same of all that begin with this text (a word at least): up to the frame that begins its last word, for the
    later ones are free.

    The frames above, text "a a"   ->   a blank a (1/16)        text "a"   ->   a (1/2), blank a (1/8), ...
    """
    partial: dict[State, list[Alignment]] = {BEFORE: [(1.0, ())]}
    found: list[Alignment] = []
    for frame in range(len(frame_tables[0])):
        partial = onward(partial, frame_tables, frame, text, blank, count, merging)
        found += partial.pop((len(text), True), [])
    return nlargest(count, found)


def onward(
    partial: dict[State, list[Alignment]],
    frame_tables: Heard,
    frame: int,
    text: Sequence[int],
    blank: int,
    count: int,
    merging: bool,
) -> dict[State, list[Alignment]]:
    """One frame more: the best ways to get to every state."""
    reached: dict[State, list[Alignment]] = defaultdict(list)
    for state, here in partial.items():
        row = frame_tables[min(state[0], len(frame_tables) - 1)][frame]
        for chosen, next_state in moves(state, text, blank, merging):
            reached[next_state] += [(p * row[chosen], (*way, chosen)) for p, way in here if p * row[chosen] > 0]
    return {state: nlargest(count, found) for state, found in reached.items()}


def beginning(frame_tables: Heard, text: Sequence[int], blank: int, merging: bool = True) -> float:
    """The probability of all alignments that begin with this text: what a tree ranks its nodes by."""
    if not text:
        return 1.0
    masses, begun = {BEFORE: 1.0}, 0.0
    for frame in range(len(frame_tables[0])):
        reached: dict[State, float] = defaultdict(float)
        for state, mass in masses.items():
            row = frame_tables[min(state[0], len(frame_tables) - 1)][frame]
            for chosen, next_state in moves(state, text, blank, merging):
                reached[next_state] += mass * row[chosen]
        begun += reached.pop((len(text), True), 0.0)
        masses = dict(reached)
    return begun
