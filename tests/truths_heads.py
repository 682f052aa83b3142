"""Slow reference implementations for label-conditioned frames, in Python floats and loops as in truths.py.

A distribution is a function (frame, text collapsed from the frames before it) -> the probabilities of all classes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from truths import Text, all_alignments, slow_collapse

FrameDistribution = Callable[[int, Text], Sequence[float]]


def slow_transduce(frames: Text, blank: int) -> Text:
    """A transducer's reading: drop blanks, merge nothing."""
    return tuple(frame for frame in frames if frame != blank)


def independent(probs_TC) -> FrameDistribution:
    return lambda frame, text: probs_TC[frame]


def slow_conditioned_texts(
    distribution: FrameDistribution,
    frames: int,
    classes: int,
    blank: int,
    read: Callable[[Text, int], Text] = slow_collapse,
) -> dict[Text, float]:
    """The probability of every text: every alignment, each frame given what those before it say."""
    texts: defaultdict[Text, float] = defaultdict(float)
    for alignment in all_alignments(frames, classes):
        steps = (distribution(t, read(alignment[:t], blank))[token] for t, token in enumerate(alignment))
        texts[read(alignment, blank)] += math.prod(steps)
    return dict(texts)


def slow_next_tokens(masses: dict[Text, float], prefix: Text, tokens: Sequence[int]) -> list[float]:
    """P(the next token is it) for each, and of anything else or the end, given that the text begins with the prefix."""
    whole = masses[prefix] if prefix else 1.0
    listed = [masses.get((*prefix, token), 0.0) / whole for token in tokens]
    return [*listed, 1 - sum(listed)]


def slow_total_variation(p: Sequence[float], q: Sequence[float]) -> float:
    return 1 - sum(map(min, p, q))


def slow_kl(p: Sequence[float], q: Sequence[float], smallest: float) -> float:
    return sum(a * math.log(a / max(b, smallest)) for a, b in zip(p, q, strict=True))


def slow_products(distribution: FrameDistribution, frames: int, vocabulary: int) -> dict[Text, float]:
    """Frame k proposes token k: every text of 1 to `frames` tokens and the product of its tokens' probabilities."""
    masses: dict[Text, float] = {(): 1.0}
    for frame in range(frames):
        longer = {text: mass for text, mass in masses.items() if len(text) == frame}
        for text, mass in longer.items():
            probs = distribution(frame, text)
            masses |= {(*text, token): mass * probs[token] for token in range(vocabulary)}
    del masses[()]
    return masses


def slow_frame_loss(emissions, batch, decay, term):
    """The weighted mean of term(base logits, frame logits, label) over single labels; None leaves a label out."""
    own = getattr(emissions, "own", None) or emissions.head
    total = weights = 0.0
    for row, anchor in batch.lengths_BA.nonzero().tolist():
        memory = None if emissions.correction is None else emissions.start_BAR[row, anchor][None]
        for k, label in enumerate(batch.labels_BAS[row, anchor, : int(batch.lengths_BA[row, anchor])]):
            base = emissions.head.token_logits(batch.states_BLD[row, int(batch.anchors_BA[row, anchor]) + 1 + k])
            logits = own.token_logits(emissions.states_BATD[row, anchor, k])
            if memory is not None:
                logits = logits + emissions.correction(memory)[0]
                memory = emissions.correction.step(memory, label[None])
            if (value := term(base, logits, int(label))) is not None:
                total, weights = total + decay**k * value, weights + decay**k
    return total / weights
