"""Slow reference implementations of what the package computes fast: Python floats and loops, no tensors.

Probabilities are lists, probs_TC[t][c], not logarithms. Everything about CTC enumerates all C ** T
alignments, so keep T and C tiny.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

Text = tuple[int, ...]
Probs = Sequence[Sequence[float]]


def all_alignments(frames: int, classes: int) -> Iterator[Text]:
    return itertools.product(range(classes), repeat=frames)


def slow_collapse(frames: Sequence[int], blank: int) -> Text:
    """Merge repeats, drop blanks. A frame of -1 counts as a blank."""
    merged = [frame for frame, _ in itertools.groupby(frames)]
    return tuple(frame for frame in merged if frame not in (blank, -1))


def slow_texts(probs_TC: Probs, blank: int) -> dict[Text, float]:
    """The probability of every collapsed text."""
    texts: defaultdict[Text, float] = defaultdict(float)
    for alignment in all_alignments(len(probs_TC), len(probs_TC[0])):
        probability = math.prod(probs_C[c] for probs_C, c in zip(probs_TC, alignment, strict=True))
        texts[slow_collapse(alignment, blank)] += probability
    return dict(texts)


def slow_log_likelihood(probs_TC: Probs, labels: Sequence[int], blank: int) -> float:
    probability = slow_texts(probs_TC, blank).get(tuple(labels), 0.0)
    return math.log(probability) if probability > 0 else -math.inf


def slow_prefix_probability(probs_TC: Probs, prefix: Sequence[int], blank: int) -> float:
    """P(the collapsed text begins with the prefix)."""
    texts = slow_texts(probs_TC, blank)
    return sum(p for text, p in texts.items() if text[: len(prefix)] == tuple(prefix))


def texts_of(prefixes: Any) -> list[Text]:
    """Each node's whole text; a parent that comes after its child is an error here."""
    texts: list[Text] = []
    for token, parent in zip(prefixes.tokens_N.tolist(), prefixes.parents_N.tolist(), strict=True):
        assert -1 <= parent < len(texts)
        texts.append((*(texts[parent] if parent >= 0 else ()), token))
    return texts


def beginnings(texts: dict[Text, float]) -> dict[Text, float]:
    """P(the text begins with it), for every non-empty prefix."""
    masses: defaultdict[Text, float] = defaultdict(float)
    for text, probability in texts.items():
        for length in range(1, len(text) + 1):
            masses[text[:length]] += probability
    return dict(masses)


def slow_best(
    masses: dict[Text, float],
    nodes: int,
    stop_token_ids: Collection[int] = (),
    depth: int | None = None,
    allowed_tokens: Collection[int] | None = None,
) -> list[tuple[Text, float]]:
    """The first `nodes` beginnings in prefix_search's order: (text, mass), best first.

    Equally probable (in 29 significant bits): shallower first, then the better parent, then the smaller id.
    """
    rank: dict[Text, int] = {(): 0}
    ranked: list[Text] = []
    for length in range(1, max(map(len, masses), default=0) + 1):
        level = [
            text for text, mass in masses.items()
            if len(text) == length and mass > 0 and not set(text[:-1]) & set(stop_token_ids)
            and (depth is None or length <= depth) and (allowed_tokens is None or set(text) <= set(allowed_tokens))
        ]  # fmt: skip
        level.sort(key=lambda text: (-significant(masses[text]), rank[text[:-1]], text[-1]))
        rank.update({text: at for at, text in enumerate(level)})
        ranked += level
    ranked.sort(key=lambda text: (-significant(masses[text]), len(text), rank[text]))
    return [(text, masses[text]) for text in ranked[:nodes]]


def slow_prefix_search(probs_TC: Probs, blank: int, nodes: int, **limits: Any) -> list[tuple[Text, float]]:
    """Rank all prefixes and take the first ones: (prefix, probability), best first. limits: those of slow_best."""
    return slow_best(beginnings(slow_texts(probs_TC, blank)), nodes, **limits)


def slow_next_label_distribution(probs_TC: Probs, blank: int, prefix: Sequence[int]) -> tuple[dict[int, float], float]:
    """For each token, and for the end: its probability given that the text begins with the prefix."""
    prefix = tuple(prefix)
    texts = slow_texts(probs_TC, blank)
    whole = slow_prefix_probability(probs_TC, prefix, blank)
    tokens = [c for c in range(len(probs_TC[0])) if c != blank]
    distribution = {token: slow_prefix_probability(probs_TC, (*prefix, token), blank) / whole for token in tokens}
    return distribution, texts.get(prefix, 0.0) / whole


def significant(value: float, bits: int = 29) -> float:
    """0.3 and 0.1 + 0.2 are the same number here."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


# --- trees and results -----------------------------------------------------------------------------------


def slow_tree_from_paths(root, paths, lengths, limit):
    """Insert path after path into a trie, node by node, until `limit` nodes are there."""
    tokens, parents, places = [root], [-1], {(): 0}
    for path, length in zip(paths, lengths, strict=True):
        for depth in range(length):
            prefix = tuple(path[: depth + 1])
            if prefix in places:
                continue
            if len(tokens) == limit:
                return tokens, parents
            places[prefix] = len(tokens)
            tokens.append(path[depth])
            parents.append(places[prefix[:-1]])
    return tokens, parents


def slow_match(tokens, parents, base_tokens):
    """Descend from the root while a child has the base's token. Returns path and bonus."""
    path = [0]
    while True:
        token = base_tokens[path[-1]]
        children = [n for n, parent in enumerate(parents) if parent == path[-1] and tokens[n] == token]
        if not children:
            return path, token
        path.append(children[0])


def slow_warp(logits, temperature, top_k, top_p):
    """One row of logits to probabilities in plain floats: temperature, then top-k, then top-p."""
    if temperature == 0:
        best = max(range(len(logits)), key=lambda token: logits[token])
        return [float(token == best) for token in range(len(logits))]
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if nucleus and mass / total >= top_p:
            break
        nucleus.append(token)
        mass += weights[token]
    return [weights[token] / mass if token in nucleus else 0.0 for token in range(len(logits))]


def slow_window(tokens, mask, anchor, label_length):
    """Root and labels of one anchor: the root and every label must be response tokens, without a gap."""
    if anchor + 1 >= len(tokens) or not mask[anchor + 1]:
        return None, []
    labels = []
    for position in range(anchor + 2, min(anchor + 2 + label_length, len(tokens))):
        if not mask[position]:
            break
        labels.append(tokens[position])
    return tokens[anchor + 1], labels
