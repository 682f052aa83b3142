"""Prefix search over label-conditioned frames, whose distribution depends on the text emitted so far.

Masses and levels are those of `prefix_search.py`. Here every prefix has frames of its own, whose cost decides how the
search proceeds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.prefix_search import (
    Prefixes,
    RankedNodes,
    drop_improbable,
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

    def arrays(self) -> Sequence[Any] | None:
        """Return the token probabilities probs_TV, the memory_R of the one prefix, and the fields of
        `conditioned_kernels.Correction`, as contiguous float32 arrays; None where that is not possible."""

    @property
    def memory_KR(self) -> Tensor: ...

    def correction_weight(self) -> Tensor:
        """Return out_VR of the logit correction whose memories are `memory_KR`."""


def conditioned_prefix_search(
    log_probs_TC: Tensor,
    states: PrefixStates,
    nodes: int,
    stop_token_ids: Collection[int] = (),
    depth: int | None = None,
    topology: Topology = CTC_TOPOLOGY,
    min_mass: float = 0.0,
) -> Prefixes:
    """Return the `nodes` most probable prefixes where a frame depends on the text collapsed from earlier frames.

    The two frames of `prefix_search`, if after "a" only the blank is possible:

        a    1/2 + 1/8  =  5/8      b    5/16      b a    1/8      and there is no "a b"

    The frame that begins a token is still conditioned on the text without it; a frame that repeats the token, or is a
    blank after it, on the text with it. All tokens are candidates after every prefix: one that is improbable in every
    frame alone is often the most probable after another token (with the 64 best tokens of each frame, 2.23 tokens per
    forward pass; with all 2,048, 2.83).

    log_probs_TC: the unconditioned frames, the blank last. states: of the empty prefix.
    """
    stops_S = torch.tensor(list(stop_token_ids), dtype=torch.int64, device=log_probs_TC.device)
    depth = len(log_probs_TC) if depth is None else depth
    frames = Frames.of(log_probs_TC, stops_S, topology)
    return drop_improbable(_search_levels(frames, states, nodes, depth, cuts_levels=log_probs_TC.is_cpu), min_mass)


def _search_levels(frames: Frames, states: PrefixStates, nodes: int, depth: int, cuts_levels: bool) -> RankedNodes:
    """Search level by level.

    cuts_levels: expand only nodes whose children can still be among the best; on a GPU asking would stall every level.
    """
    depth = min(depth, len(frames.blank_T))
    level = Level.empty(frames, states)
    best_of_all_N = level.max_mass_K[:0]
    # Row 0 is the empty prefix; the prefixes of each level follow those of the level above.
    parent_row, next_row, ranked = 0, 1, [(level.last_K[:0], level.last_K[:0], best_of_all_N)]
    for number in range(1, depth + 1):
        children = level.children(frames, nodes, best_of_all_N[-1] if 0 < nodes == len(best_of_all_N) else None)
        children = children.rows(top_masses(children.mass_R, nodes))
        ranked.append((children.token_R, children.parent_R + parent_row, children.mass_R))
        count = len(children.mass_R)
        parent_row, next_row = next_row, next_row + count
        if number == depth or count == 0:
            break
        if cuts_levels:
            best_of_all_N = torch.cat([best_of_all_N, children.mass_R])
            best_of_all_N = best_of_all_N.topk(min(nodes, len(best_of_all_N))).values
            if len(best_of_all_N) == nodes:
                expandable = int((children.mass_R > best_of_all_N[-1]).sum())
                if expandable == 0:
                    break
                children = children.rows(slice(expandable))
        level = level.expand(frames, children)
    tokens_R, rows_R, mass_R = (torch.cat(parts) for parts in zip(*ranked, strict=True))
    return select_nodes(tokens_R, rows_R, mass_R, nodes)


@dataclass(frozen=True)
class Frames:
    """The unconditioned frames of a search, and how they continue a text."""

    log_probs_TC: Tensor
    probs_TV: Tensor  # in the precision of the frames, for bounds
    blank_T: Tensor  # float64
    stops_S: Tensor
    topology: Topology

    @classmethod
    def of(cls, log_probs_TC: Tensor, stops_S: Tensor, topology: Topology) -> Self:
        probs_TV, blank_T = log_probs_TC[:, :-1].exp(), log_probs_TC[:, -1].double().exp()
        return cls(log_probs_TC, probs_TV, blank_T, stops_S, topology)


@dataclass(frozen=True)
class Children:
    """R prefixes, each one token longer than a prefix of the level."""

    parent_R: Tensor  # row in the level
    token_R: Tensor
    mass_R: Tensor  # probability as a prefix
    begins_RT: Tensor  # mass with which each frame begins the token
    probs_RT: Tensor  # unconditioned probability of the token

    def rows(self, index: Tensor | slice) -> Children:
        return Children(*(tensor[index] for tensor in vars(self).values()))


@dataclass(frozen=True)
class Level:
    """K prefixes of one length, expanded: their conditioning states, and their masses before each frame."""

    states: PrefixStates
    factor_KV: Tensor  # this and the next: see PrefixStates.factors
    scale_KT: Tensor
    ends_in_blank_KT: Tensor
    ends_in_label_KT: Tensor
    last_K: Tensor  # the last token; -1 after the empty prefix
    max_mass_K: Tensor  # probability as a prefix

    @classmethod
    def empty(cls, frames: Frames, states: PrefixStates) -> Self:
        factor_KV, scale_KT = states.factors()
        blank_KT, label_KT = empty_prefix_masses(run_products(frames.blank_T * scale_KT[0].double()))
        last_K, max_mass_K = torch.full_like(blank_KT[:, 0], -1, dtype=torch.int64), torch.ones_like(blank_KT[:, 0])
        return cls(states, factor_KV, scale_KT, blank_KT, label_KT, last_K, max_mass_K)

    def children(self, frames: Frames, nodes: int, least: Tensor | None) -> Children:
        """Return the children that may be among the best `nodes`; least: see `select_candidates`."""
        bound_KT = (self.ends_in_blank_KT + self.ends_in_label_KT) * self.scale_KT
        bound_KV = (bound_KT.to(frames.probs_TV.dtype) @ frames.probs_TV) * self.factor_KV
        parent_R, token_R = select_candidates(bound_KV, nodes, least)
        # The exact masses, in float64, of these candidates only.
        ends_in_blank_RT, ends_in_label_RT = self.ends_in_blank_KT[parent_R], self.ends_in_label_KT[parent_R]
        repeats_R1 = (token_R == self.last_K[parent_R])[:, None]
        begin_RT = frames.topology.begin_mass(ends_in_blank_RT, ends_in_label_RT, repeats_R1)
        probs_RT = frames.log_probs_TC[:, token_R].T.double().exp()
        begins_RT = begin_RT * probs_RT * (self.factor_KV[parent_R, token_R, None] * self.scale_KT[parent_R])
        # Rounding must not lift a child above its parent: the parent could be cut and the child kept.
        mass_R = torch.minimum(begins_RT.sum(1), self.max_mass_K[parent_R])
        return Children(parent_R, token_R, mass_R, begins_RT, probs_RT)

    def expand(self, frames: Frames, children: Children) -> Level:
        """Return the next level: the frames of these children, and their masses."""
        states, token_K = self.states.extend(children.token_R, children.parent_R), children.token_R
        factor_KV, scale_KT = states.factors()
        stops_K1 = (token_K[:, None] == frames.stops_S).any(1, keepdim=True)
        begins_KT = children.begins_RT.masked_fill(stops_K1, 0)  # nothing follows a stop token
        repeat_KT = frames.topology.repeat_mass(children.probs_RT * factor_KV.gather(1, token_K[:, None]))
        blank_KT, label_KT = continue_prefixes(begins_KT, repeat_KT * scale_KT, frames.blank_T * scale_KT)
        return Level(states, factor_KV, scale_KT, blank_KT, label_KT, token_K, children.mass_R)


def continue_prefixes(begins_KT: Tensor, repeat_KT: Tensor, blank_KT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masses before each frame of prefixes that end in a blank, and in their last token.

    begins_KT: mass with which each frame begins that token. repeat_KT, blank_KT: probability that a frame repeats it,
    or is a blank.
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

    bound_KV: upper bounds on the children's masses. least: the smallest mass among the best `nodes` prefixes so far;
    None while there are fewer.
    """
    if least is not None:
        # The bounds are as exact as the frames are (float32).
        return (bound_KV > least * (1 - 1e-5)).nonzero().unbind(1)  # type: ignore[return-value]
    # One more than `nodes`: the bound of a token that repeats the last one is too large, so that it may take the place
    # of another candidate.
    tokens_KR = bound_KV.topk(min(nodes + 1, bound_KV.shape[1]), dim=1).indices.sort(dim=1).values
    parents_K1 = torch.arange(len(bound_KV), device=bound_KV.device)[:, None]
    return parents_K1.expand_as(tokens_KR).flatten(), tokens_KR.flatten()
