"""Prefix search over frames that listen: what they say depends on the text said so far. It knows no correction.

The masses and the levels are those of `prefix.py`. Here every prefix has frames of its own, and what those cost
decides how the search goes on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.prefix_search import (
    Prefixes,
    _empty_prefix_masses,
    _run_products,
    _select_nodes,
    _top_masses,
    drop_impossible,
)
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology


class PrefixStates(Protocol):
    """K texts, and what they make of the frames."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """factor_KV and scale_KT: p_t(w | text) = p_t(w) factor scale, p_t(blank | text) = p_t(blank) scale."""

    def extend(self, words_K: Tensor, rows_K: Tensor) -> Self:
        """The texts of these rows, each with one word more."""

    def concat(self, others: Self) -> Self:
        """These texts, and behind them the others, which hear the same frames."""


def conditioned_prefix_search(
    log_probs_TC: Tensor,
    states: PrefixStates,
    nodes: int,
    stop_words: Collection[int] = (),
    depth: int | None = None,
    topology: Topology = CTC_TOPOLOGY,
) -> Prefixes:
    """The `nodes` most probable prefixes, where a frame depends on the text collapsed from the frames before it.

    states: the empty one. log_probs_TC: the frames before any text is heard, the blank last. topology: CTC's, or a
    transducer's, whose text is not collapsed and which holds no words. The two frames of
    `prefix_search`, where behind "a" only the blank may follow, surely then:

        a    1/2 + 1/8  =  5/8      b    5/16      b a    1/8      and there is no "a b"

    The frame that begins a word still listens to the text without it; a frame that holds the word or keeps silence
    behind it listens to the text with it.

    All words are looked at behind every text: one that no frame likes by itself is often the likeliest behind another
    (the 64 best words of each frame gave 2.23 tokens a pass where all 2,048 gave 2.83).
    """
    blank_T, frames = log_probs_TC[:, -1].double().exp(), len(log_probs_TC)
    stops_V = torch.zeros_like(log_probs_TC[0, :-1], dtype=torch.bool)
    stops_V[[token for token in stop_words if token < len(stops_V)]] = True  # a stop may lie beyond the head's rows
    probs_TV = log_probs_TC[:, :-1].exp()
    just_begun_TT = torch.ones_like(blank_T[1:]).diag(1)
    factor_KV, scale_KT = states.factors()
    ends_in_blank_KT, ends_in_label_KT = _empty_prefix_masses(_run_products(blank_T * scale_KT[0].double()))
    last_K, max_mass_K = stops_V.new_full((1,), -1, dtype=torch.int64), blank_T.new_ones(1)
    levels = [(last_K[:0], last_K[:0], max_mass_K[:0])]
    parent_row, rows, best_of_all_N = 0, 1, max_mass_K[:0]
    depth = frames if depth is None else min(depth, frames)
    for level in range(1, depth + 1):
        either_KT = ends_in_blank_KT + ends_in_label_KT
        bound_KV = ((either_KT * scale_KT).to(probs_TV.dtype) @ probs_TV) * factor_KV
        parent_R, token_R = select_candidates(
            bound_KV, nodes, best_of_all_N[-1] if len(best_of_all_N) == nodes else None
        )
        repeats_R1 = (token_R == last_K[parent_R])[:, None]
        opens_RT = topology.begin_mass(ends_in_blank_KT[parent_R], ends_in_label_KT[parent_R], repeats_R1)
        probs_RT = log_probs_TC[:, token_R].T.double().exp()
        begins_RT = opens_RT * probs_RT * (factor_KV[parent_R, token_R, None] * scale_KT[parent_R])
        # Rounding must not lift a child above its parent: the parent could be cut and the child kept.
        mass_R = torch.minimum(begins_RT.sum(1), max_mass_K[parent_R])
        best_K = _top_masses(mass_R, nodes)
        parent_K, token_K, mass_K = parent_R[best_K], token_R[best_K], mass_R[best_K]
        levels.append((token_K, parent_K + parent_row, mass_K))
        parent_row, rows = parent_row + rows, len(mass_K)
        if level == depth or rows == 0:
            break
        best_of_all_N = torch.cat([best_of_all_N, mass_K]).topk(min(nodes, len(best_of_all_N) + rows)).values
        if mass_K.is_cpu and len(best_of_all_N) == nodes:
            # Go on below those that can still matter; asking is free here, on a GPU it would stall every level.
            hopeful = int((mass_K > best_of_all_N[-1]).sum())
            if hopeful == 0:
                break
            best_K, parent_K, token_K, mass_K = (x[:hopeful] for x in (best_K, parent_K, token_K, mass_K))

        states = states.extend(token_K, parent_K)
        factor_KV, scale_KT = states.factors()
        repeat_KT = topology.repeat_mass(probs_RT[best_K] * factor_KV.gather(1, token_K[:, None]))
        repeat_runs_KTT, silent_KTT = _run_products(torch.stack([repeat_KT, blank_T.expand_as(repeat_KT)]) * scale_KT)
        # Held from the frame after the one that begins the word; right behind that one nothing has been held yet.
        repeat_runs_KTT = F.pad(repeat_runs_KTT[:, 1:], (0, 0, 0, 1)) + just_begun_TT
        begins_KT = begins_RT[best_K].masked_fill(stops_V[token_K][:, None], 0)
        ends_in_label_KT = torch.bmm(begins_KT[:, None], repeat_runs_KTT)[:, 0]
        ends_in_blank_KT = torch.bmm(ends_in_label_KT[:, None], silent_KTT)[:, 0]
        last_K, max_mass_K = token_K, mass_K

    tokens_R, rows_R, mass_R = (torch.cat(parts) for parts in zip(*levels, strict=True))
    return drop_impossible(_select_nodes(tokens_R, rows_R, mass_R, nodes))


def select_candidates(bound_KV: Tensor, nodes: int, least: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """Parents and words of the children that may come in, by bounds on their masses; in order of both. least: the worst
    mass of the best `nodes` texts so far; None while there are fewer.

    Bounds are as exact as the frames are (float32), except for a word that repeats the last one: there they are
    too great, by which that word may only take the place of one candidate.
    """
    if bound_KV.is_cpu and least is not None:
        return (bound_KV > least * (1 - 1e-5)).nonzero().unbind(1)  # type: ignore[return-value]
    tokens_KR = bound_KV.topk(min(nodes + 1, bound_KV.shape[1]), dim=1).indices.sort(dim=1).values
    parents_K1 = torch.arange(len(bound_KV), device=bound_KV.device)[:, None]
    return parents_K1.expand_as(tokens_KR).flatten(), tokens_KR.flatten()
