"""Prefix search over label-conditioned frames, whose distribution depends on the text emitted so far.

Masses and levels are those of `prefix_search.py`. Here every prefix has frames of its own, whose cost decides how the
search proceeds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.prefix_search import (
    Prefixes,
    drop_impossible,
    empty_prefix_masses,
    run_products,
    select_nodes,
    top_masses,
)
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology


class PrefixStates(Protocol):
    """The conditioning states of K prefixes."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return factor_KV, scale_KT: p_t(v | text) = p_t(v) factor scale, p_t(blank | text) = p_t(blank) scale."""

    def extend(self, tokens_K: Tensor, rows_K: Tensor) -> Self:
        """Return the prefixes of these rows, each with one more token."""

    def concat(self, others: Self) -> Self:
        """Return these prefixes followed by the others, which belong to the same frames."""


def conditioned_prefix_search(
    log_probs_TC: Tensor,
    states: PrefixStates,
    nodes: int,
    stop_token_ids: Collection[int] = (),
    depth: int | None = None,
    topology: Topology = CTC_TOPOLOGY,
) -> Prefixes:
    """Return the `nodes` most probable prefixes where a frame depends on the text collapsed from earlier frames.

    The two frames of `prefix_search`, if after "a" only the blank is possible:

        a    1/2 + 1/8  =  5/8      b    5/16      b a    1/8      and there is no "a b"

    The frame that begins a token is still conditioned on the text without it; a frame that repeats the token, or is a
    blank after it, on the text with it. All tokens are candidates after every prefix: one that is improbable in every
    frame alone is often the most probable after another token (with the 64 best tokens of each frame, 2.23 tokens per
    forward pass; with all 2,048, 2.83).

    Args:
        log_probs_TC: the unconditioned frames, the blank last.
        states: of the empty prefix.
        topology: CTC's, or a transducer's.
    """
    blank_T, frames = log_probs_TC[:, -1].double().exp(), len(log_probs_TC)
    stops_V = torch.zeros_like(log_probs_TC[0, :-1], dtype=torch.bool)
    stops_V[[token for token in stop_token_ids if token < len(stops_V)]] = True  # a stop id may exceed the lm_head
    probs_TV = log_probs_TC[:, :-1].exp()
    factor_KV, scale_KT = states.factors()
    ends_in_blank_KT, ends_in_label_KT = empty_prefix_masses(run_products(blank_T * scale_KT[0].double()))
    last_K, max_mass_K = stops_V.new_full((1,), -1, dtype=torch.int64), blank_T.new_ones(1)
    levels = [(last_K[:0], last_K[:0], max_mass_K[:0])]
    parent_row, rows, best_of_all_N = 0, 1, max_mass_K[:0]
    depth = frames if depth is None else min(depth, frames)
    for level in range(1, depth + 1):
        bound_KV = (((ends_in_blank_KT + ends_in_label_KT) * scale_KT).to(probs_TV.dtype) @ probs_TV) * factor_KV
        least = best_of_all_N[-1] if len(best_of_all_N) == nodes else None
        parent_R, token_R = select_candidates(bound_KV, nodes, least)
        repeats_R1 = (token_R == last_K[parent_R])[:, None]
        begin_RT = topology.begin_mass(ends_in_blank_KT[parent_R], ends_in_label_KT[parent_R], repeats_R1)
        probs_RT = log_probs_TC[:, token_R].T.double().exp()
        begins_RT = begin_RT * probs_RT * (factor_KV[parent_R, token_R, None] * scale_KT[parent_R])
        # Rounding must not lift a child above its parent: the parent could be cut and the child kept.
        mass_R = torch.minimum(begins_RT.sum(1), max_mass_K[parent_R])
        best_K = top_masses(mass_R, nodes)
        parent_K, token_K, mass_K = parent_R[best_K], token_R[best_K], mass_R[best_K]
        levels.append((token_K, parent_K + parent_row, mass_K))
        parent_row, rows = parent_row + rows, len(mass_K)
        if level == depth or rows == 0:
            break
        best_of_all_N = torch.cat([best_of_all_N, mass_K]).topk(min(nodes, len(best_of_all_N) + rows)).values
        if mass_K.is_cpu and len(best_of_all_N) == nodes:
            # Expand only nodes whose children can still be among the best; on a GPU asking would stall every level.
            expandable = int((mass_K > best_of_all_N[-1]).sum())
            if expandable == 0:
                break
            best_K, parent_K, token_K, mass_K = (x[:expandable] for x in (best_K, parent_K, token_K, mass_K))

        states = states.extend(token_K, parent_K)
        factor_KV, scale_KT = states.factors()
        begins_KT = begins_RT[best_K].masked_fill(stops_V[token_K][:, None], 0)
        repeat_KT = topology.repeat_mass(probs_RT[best_K] * factor_KV.gather(1, token_K[:, None]))
        ends_in_blank_KT, ends_in_label_KT = continue_prefixes(begins_KT, repeat_KT * scale_KT, blank_T * scale_KT)
        last_K, max_mass_K = token_K, mass_K

    tokens_R, rows_R, mass_R = (torch.cat(parts) for parts in zip(*levels, strict=True))
    return drop_impossible(select_nodes(tokens_R, rows_R, mass_R, nodes))


def continue_prefixes(begins_KT: Tensor, repeat_KT: Tensor, blank_KT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masses before each frame of prefixes that end in a blank, and in their last token.

    Args:
        begins_KT: mass with which each frame begins the last token.
        repeat_KT, blank_KT: probability that a frame repeats it / is a blank.
    """
    repeat_runs_KTT, blank_runs_KTT = run_products(torch.stack([repeat_KT, blank_KT]))
    # Repeats start in the frame after the one that begins the token; right after that one there are none yet.
    no_repeat_TT = torch.ones_like(begins_KT[0, 1:]).diag(1)
    repeat_runs_KTT = F.pad(repeat_runs_KTT[:, 1:], (0, 0, 0, 1)) + no_repeat_TT
    ends_in_label_KT = torch.bmm(begins_KT[:, None], repeat_runs_KTT)[:, 0]
    ends_in_blank_KT = torch.bmm(ends_in_label_KT[:, None], blank_runs_KTT)[:, 0]
    return ends_in_blank_KT, ends_in_label_KT


def select_candidates(bound_KV: Tensor, nodes: int, least: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """Return parents_R and tokens_R, in order of both, of the children that may be among the best `nodes`.

    Args:
        bound_KV: upper bounds on the children's masses, as exact as the frames are (float32), except for a token that
            repeats the last one: its bound is too large, so that it may take the place of one candidate.
        least: the smallest mass among the best `nodes` prefixes so far; None while there are fewer.
    """
    if bound_KV.is_cpu and least is not None:
        return (bound_KV > least * (1 - 1e-5)).nonzero().unbind(1)  # type: ignore[return-value]
    tokens_KR = bound_KV.topk(min(nodes + 1, bound_KV.shape[1]), dim=1).indices.sort(dim=1).values
    parents_K1 = torch.arange(len(bound_KV), device=bound_KV.device)[:, None]
    return parents_K1.expand_as(tokens_KR).flatten(), tokens_KR.flatten()
