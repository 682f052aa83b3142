"""Prefix search over frames that listen: what they say depends on the text said so far. It knows no correction.

The masses and the levels are those of `prefix.py`. Here every prefix has frames of its own, and what those cost
decides how the search goes on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.prefix import PLACES, Prefixes, _choose_words, _empty_prefix, _runs


class Texts(Protocol):
    """K texts, and what they make of the frames."""

    def shares(self, words_W: Tensor) -> tuple[Tensor, Tensor]:
        """factor_KW, scale_KT in float64: p_t(w | text) = p_t(w) factor scale, p_t(blank | text) = p_t(blank) scale."""

    def say(self, words_K: Tensor, rows_K: Tensor) -> Texts:
        """The texts of these rows, each with one word more."""


def listening_search(
    log_probs_TC: Tensor,
    texts: Texts,
    nodes: int,
    words_per_frame: int,
    stop_words: Collection[int] = (),
    depth: int | None = None,
) -> Prefixes:
    """The `nodes` most probable prefixes, where a frame depends on the text collapsed from the frames before it.

    texts: the empty one. log_probs_TC: the frames before any text is heard, the blank last; the words considered
    are their best. The two frames of `prefix_search`, where behind "a" only the blank may follow, surely then:

        a    1/2 + 1/8  =  5/8      b    5/16      b a    1/8      and there is no "a b"

    The frame that begins a word still listens to the text without it; a frame that holds the word or keeps silence
    behind it listens to the text with it.
    """
    blank = log_probs_TC.shape[1] - 1
    words_W = _choose_words(log_probs_TC, blank, words_per_frame)
    words = len(words_W)
    probs_WT, blank_T = log_probs_TC[:, words_W].T.double().exp(), log_probs_TC[:, blank].double().exp()
    stops_W = torch.isin(words_W, words_W.new_tensor(list(stop_words)))
    factor_KW, scale_KT = texts.shares(words_W)
    blanked_KT, said_KT = _empty_prefix(_runs(blank_T * scale_KT[0]))
    last_K, room_K = words_W.new_zeros(1), blank_T.new_ones(1)
    levels = [(words_W[:0], words_W[:0], room_K[:0])]
    parent_row, rows, best_of_all_N = 0, 1, room_K[:0]
    depth = len(log_probs_TC) if depth is None else min(depth, len(log_probs_TC))
    for level in range(1, depth + 1):
        either_KT = blanked_KT + said_KT
        children_KW = (either_KT * scale_KT) @ probs_WT.T
        again_K = (blanked_KT * scale_KT * probs_WT[last_K]).sum(1)
        children_KW = children_KW.scatter_(1, last_K[:, None], again_K[:, None]) * factor_KW
        children_R = torch.minimum(children_KW, room_K[:, None]).flatten()
        best_K = first(children_R, nodes)
        parent_K, word_K, mass_K = best_K // words, best_K % words, children_R[best_K]
        levels.append((words_W[word_K], parent_K + parent_row, mass_K))
        parent_row, rows = parent_row + rows, len(mass_K)
        if level == depth:
            break
        best_of_all_N = torch.cat([best_of_all_N, mass_K]).topk(min(nodes, len(best_of_all_N) + rows)).values
        if mass_K.is_cpu and len(best_of_all_N) == nodes:
            # What a text makes of the frames costs a pass over all words: go on below those that can still matter.
            hopeful = int((mass_K > best_of_all_N[-1]).sum())
            if hopeful == 0:
                break
            parent_K, word_K, mass_K = parent_K[:hopeful], word_K[:hopeful], mass_K[:hopeful]

        repeats_K1 = (word_K == last_K[parent_K])[:, None]
        opens_KT = torch.where(repeats_K1, blanked_KT[parent_K], either_KT[parent_K])
        begins_KT = opens_KT * probs_WT[word_K] * (factor_KW[parent_K, word_K, None] * scale_KT[parent_K])
        texts = texts.say(words_W[word_K], parent_K)
        factor_KW, scale_KT = texts.shares(words_W)
        held_KT = probs_WT[word_K] * (factor_KW.gather(1, word_K[:, None]) * scale_KT)
        blanked_KT, said_KT = begun(begins_KT, held_KT, blank_T * scale_KT)
        last_K, room_K = word_K, mass_K.masked_fill(stops_W[word_K], 0)

    tokens_R, rows_R, mass_R = (torch.cat(parts) for parts in zip(*levels, strict=True))
    best_N = first(mass_R, nodes)
    best_N = best_N[mass_R[best_N] > 0]
    node_R = tokens_R.new_full((len(tokens_R) + 1,), -1)  # row 0 is the empty prefix, row r + 1 is entry r
    node_R[best_N + 1] = torch.arange(len(best_N), device=best_N.device)
    return Prefixes(tokens_R[best_N], node_R[rows_R[best_N]], mass_R[best_N].log())


def begun(begins_KT: Tensor, held_KT: Tensor, blank_KT: Tensor) -> tuple[Tensor, Tensor]:
    """Masses before each frame once a word is begun in frame t with begins[t]: the last frame is a blank / the word."""
    # Held from the frame after the one that begins the word; right behind that one nothing has been held yet.
    after_KTT = F.pad(_runs(held_KT)[:, 1:], (0, 0, 0, 1)) + torch.ones_like(held_KT[0, 1:]).diag(1)
    said_KT = torch.bmm(begins_KT[:, None], after_KTT)[:, 0]
    return torch.bmm(said_KT[:, None], _runs(blank_KT))[:, 0], said_KT


def first(mass_R: Tensor, count: int) -> Tensor:
    """Indices of the largest, in order; the earlier one wins where 29 significant bits are equal."""
    places_R = torch.arange(PLACES - 1, PLACES - 1 - len(mass_R), -1, device=mass_R.device)
    rounded_R = (mass_R.view(torch.int64) + PLACES // 2) & -PLACES
    return (rounded_R | places_R).topk(min(count, len(mass_R))).indices
