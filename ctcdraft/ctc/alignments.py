"""The likeliest ways to say one text, frame by frame. For the eye: laws and searches sum over all of them instead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import nlargest

Alignment = tuple[float, tuple[int, ...]]  # its probability, and the class of every frame
Table = Sequence[Sequence[float]]  # probabilities by frame and class


def best_alignments(
    heard: Sequence[Table], text: Sequence[int], blank: int, count: int, merging: bool = True
) -> list[Alignment]:
    """The `count` most probable alignments that collapse to just this text, best first; impossible ones are left out.

    heard[k]: the frames once k words are said; the last table also serves for more, so that one is enough where
    frames do not listen. merging: equal neighbours are one word, as in CTC; a transducer has none.

    Three frames, each p(a) = 1/2, p(b) = 1/4, p(blank) = 1/4, text "a a"   ->   a blank a (1/16), and no other
    """
    # By how many words are said, and whether the last frame said the last of them: the best ways to get there.
    ways: dict[tuple[int, bool], list[Alignment]] = {(0, False): [(1.0, ())]}
    for frame in range(len(heard[0])):
        onward: dict[tuple[int, bool], list[Alignment]] = defaultdict(list)
        for (said, holds), here in ways.items():
            row = heard[min(said, len(heard) - 1)][frame]
            steps = [(blank, (said, False))]
            if holds and merging:
                steps.append((text[said - 1], (said, True)))
            if said < len(text) and not (holds and merging and text[said] == text[said - 1]):
                steps.append((text[said], (said + 1, True)))
            for chosen, there in steps:
                onward[there] += [(p * row[chosen], (*way, chosen)) for p, way in here if p * row[chosen] > 0]
        ways = {state: nlargest(count, found) for state, found in onward.items()}
    return nlargest(count, [*ways.get((len(text), False), ()), *ways.get((len(text), True), ())])
