"""Suffix decoding: what most often followed the newest tokens, in the text and in past responses, as a token tree.

Of the n occurrences of a run of newest tokens, a continuation follows some: their number divided by n is its path
probability. The run at the end of the text is one of the n, without a continuation, so that what followed a run that
occurred once before has the probability 1/2. Every length m of a run gives a tree of its at most `factor` m + `offset`
most probable draft tokens; of all lengths the tree with the largest sum of probabilities, which estimates how many
tokens are accepted, is drafted.

The counts are those of a suffix tree. But a suffix tree of the prompt would have to be built first, token by token,
while the occurrences in a text of usual length are found by a few comparisons of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from heapq import heappop, heappush
from itertools import count
from typing import Any, Self

import numpy as np
import torch

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.prompt_lookup import matching_runs
from ctcdraft.errors import check_float, check_int
from ctcdraft.models.base_model import BaseLM

SEPARATOR = -1  # between past responses, and where a text ends
MOST_OCCURRENCES = 128  # of a run: counting all those of a frequent token would cost milliseconds

Rows = list[list[int]]  # the tokens that follow each occurrence of a run, SEPARATOR after the end


class SuffixDecoding:
    """Drafts the most frequent continuations (Oliaro et al. 2024).

    Args:
        ngram: longest run of newest tokens that is looked up.
        min_prob: path probability below which nothing is drafted.
        responses: called with the base, returns past responses, the newest first.
        most_tokens: limit of what is kept of `responses`, and of remembered ones.
        remember: also keep what this object decodes. Then a draft depends on the texts before, so that questions must
            be asked in one order and by one process; the output does not depend on it.
    """

    uses_hidden_states = False
    why_not_captured = "its drafts need the host"
    has_nested_trees = False  # the number of nodes decides which length of run is the best

    def __init__(
        self,
        base: BaseLM,
        ngram: int,
        factor: float,
        offset: float,
        min_prob: float,
        responses: Callable[[BaseLM], Iterable[np.ndarray]],
        most_tokens: int,
        remember: bool,
    ) -> None:
        self.ngram = check_int(ngram, "suffix.ngram")
        self.factor = check_float(factor, "suffix.factor", least=0)
        self.offset = check_float(offset, "suffix.offset", least=0)
        self.min_prob = check_float(min_prob, "suffix.min_prob", above=0, most=1)
        self.most_tokens = check_int(most_tokens, "suffix.most_tokens")
        self.past = PastResponses.of(responses(base), self.most_tokens)
        self.content_hash = self.past.content_hash  # part of the identity of a contestant
        self.remembers_responses = remember
        self.decoded: dict[bytes, np.ndarray] = {}  # responses by prompt, the newest one last

    def draft(
        self, context: Context, memory: SuffixMemory | None, rng: torch.Generator
    ) -> tuple[TokenTree, SuffixMemory]:
        text_L = context.tokens_L.numpy(force=True)
        memory = memory or self.begin(text_L[:-1])
        if self.remembers_responses:
            self.decoded[memory.key] = text_L[memory.prompt :].copy()
        drafts = [self.best_draft(text_L, past, memory.prompt, context) for past in memory.sources]
        best = max(drafts, key=lambda draft: draft.score)  # the first one of equals
        return TokenTree.from_lists(context.root, best.tokens, best.parents, best.probs), memory

    def begin(self, prompt_L: np.ndarray) -> SuffixMemory:
        """Return the memory of a text, with what was decoded for other prompts before."""
        key, sources = prompt_L.tobytes(), [None, self.past]
        if self.remembers_responses:
            while sum(map(len, self.decoded.values())) > self.most_tokens:
                del self.decoded[next(iter(self.decoded))]
            # Not for this prompt: decoded again, as for a profile, it would be copied from its own response.
            others = [response_L for prompt, response_L in reversed(self.decoded.items()) if prompt != key]
            sources.append(PastResponses.of(others, self.most_tokens))
        return SuffixMemory(key, len(prompt_L), sources)

    def best_draft(
        self, text_L: np.ndarray, past: PastResponses | None, prompt: int, context: Context
    ) -> Continuations:
        """Return the draft with the largest sum of probabilities, that of the longest run if there are several."""
        best, least = Continuations([], [], [], 0.0), max(self.min_prob, context.min_path_prob)
        span, ended_L = max(context.depth, 0), np.append(text_L, SEPARATOR)
        for size, own_G, other_G, at_end in runs(text_L, past, prompt, self.ngram):
            budget = min(int(self.factor * size + self.offset + 1e-6), context.nodes - 1)
            if budget <= best.score:
                break  # nor can shorter runs be better
            rows = continuations(ended_L, own_G, span)
            if past is not None:
                rows += continuations(past.tokens_L, other_G, span)
            draft = frequent_continuations(rows, len(rows) + at_end, budget, least)
            best = draft if draft.score > best.score else best
        return best


@dataclass(frozen=True)
class PastResponses:
    """Past responses and the places of every pair of tokens in them."""

    tokens_L: np.ndarray  # the newest response first, a SEPARATOR before each and at the end
    order: np.ndarray  # positions, sorted by their token and the one before
    pairs_L: np.ndarray  # these two at the sorted positions, as one number
    content_hash: str

    @classmethod
    def of(cls, responses: Iterable[np.ndarray], most_tokens: int) -> Self:
        """Return the first of these responses, up to the one that makes them most_tokens tokens or more."""
        parts, size = [np.array([SEPARATOR])], 0
        for response_L in responses:
            parts += [response_L, parts[0]]
            size += len(response_L)
            if size >= most_tokens:
                break
        tokens_L = np.concatenate(parts).astype(np.int32)
        pairs_L = pair_number(np.roll(tokens_L, 1), tokens_L)
        order = np.argsort(pairs_L, kind="stable")
        return cls(tokens_L, order, pairs_L[order], sha256(tokens_L.tobytes()).hexdigest()[:16] if size else "")

    def runs(self, newest_L: np.ndarray, longest: int) -> dict[int, np.ndarray]:
        """Return where runs of newest tokens end, by their length; of the newest token alone some of many places."""
        before, token = int(newest_L[-2]), int(newest_L[-1])
        numbers = [pair_number(SEPARATOR, token), pair_number(SEPARATOR, token + 1)]
        numbers += [pair_number(before, token), pair_number(before, token) + 1]
        first, end, first_pair, end_pair = np.searchsorted(self.pairs_L, numbers)
        if first == end:
            return {}
        # All places of a frequent token are too many to go through; those of a pair are far fewer.
        alone_G = self.order[first : end : max(1, (end - first) // MOST_OCCURRENCES)]
        pair_G = self.order[first_pair:end_pair]
        return {1: alone_G} | dict(matching_runs(self.tokens_L, pair_G, newest_L, longest, known=2))


@dataclass(frozen=True)
class SuffixMemory:
    """The prompt of a text, and where runs are looked for: in the text alone, None, and beside each of the others."""

    key: bytes
    prompt: int  # length
    sources: list[PastResponses | None]


@dataclass(frozen=True)
class Continuations:
    """Draft tokens, parents before their children, their path probabilities, and the sum of these."""

    tokens: list[int]
    parents: list[int]
    probs: list[float]
    score: float


def runs(
    text_L: np.ndarray, past: PastResponses | None, prompt: int, ngram: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray, bool]]:
    """Yield runs of newest tokens from the longest to the shortest: the length, where they end, and whether at the end.

    Of runs with the same occurrences it yields the longest one alone, which may draft the most tokens.

    Args:
        past: None for the text alone. Beside past responses, even if there are none, the response so far counts, but
            not its prompt: this is the global tree of the authors' code.
    """
    start, longest = 0 if past is None else prompt, min(ngram, len(text_L) - 1)
    own_G = start + np.flatnonzero(text_L[start:-1] == text_L[-1])
    none_G, own = own_G[:0], dict(matching_runs(text_L, own_G, text_L, longest, start))
    others = {} if past is None else past.runs(text_L, longest)
    longer = 0, 0, False
    for size in range(max(len(own), len(others)), 0, -1):
        own_G, other_G, at_end = own.get(size, none_G), others.get(size, none_G), size <= len(text_L) - start
        if longer != (longer := (len(own_G), len(other_G), at_end)):
            yield size, own_G[: -MOST_OCCURRENCES - 1 : -1], other_G[:MOST_OCCURRENCES], at_end


def pair_number(before: Any, token: Any) -> Any:
    """Return a number for two neighbouring tokens, by which pairs are sorted by the second and then the first."""
    return np.int64(2**32) * token + before


def continuations(tokens_L: np.ndarray, ends_G: np.ndarray, span: int) -> Rows:
    return tokens_L.take(ends_G[:, None] + np.arange(1, span + 1), mode="clip").tolist()


def frequent_continuations(rows: Rows, total: int, budget: int, least: float) -> Continuations:
    """Return the `budget` most probable continuations of a run that occurs `total` times.

    After three of four occurrences follow 7 8, 7 9, 7 8   ->   7 (3/4), below it 8 (2/4) and 9 (1/4)

    Args:
        least: path probability below which there are none.
    """
    tokens, parents, probs = list[int](), list[int](), list[float]()
    waiting, numbers = list[Any](), count()  # numbers keep equals in the order of their newest occurrences

    def add_children(rows: Rows, depth: int, parent: int) -> None:
        after: dict[int, Rows] = {}
        for row in rows:
            if depth < len(row) and row[depth] != SEPARATOR:
                after.setdefault(row[depth], []).append(row)
        for token, following in after.items():
            if (prob := len(following) / total) >= least:
                heappush(waiting, (-prob, next(numbers), token, parent, depth, following))

    add_children(rows, 0, -1)
    while waiting and len(tokens) < budget:
        prob, _, token, parent, depth, following = heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        probs.append(-prob)
        add_children(following, depth + 1, len(tokens) - 1)
    return Continuations(tokens, parents, probs, sum(probs))
