"""The search over label-conditioned frames with five kernels and a topk per level, or as PyTorch operations.

Of every prefix and every block of tokens the kernels compute the largest mass of a child. The n best children of a
level are in the n pairs of a prefix and a block with the largest of these, so that only in these pairs all masses are
computed, in float64. No matrix of prefixes and tokens is stored. Without Triton, or without a logit correction, the
search is `static_conditioned_search`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ctcdraft.ctc.conditioned_search import PrefixStates, static_conditioned_search
from ctcdraft.ctc.fused_search import block, new_scratch, pad_nodes, runs_triton
from ctcdraft.ctc.prefix_search import MAX_CHILDREN, RankedNodes, select_nodes
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology

TOKENS = 64  # of a block; memory traffic of the bounds grows with fewer, the masses computed with more
RANK_AT_ONCE = 32
BLOCKS_AT_ONCE = 32
# The bounds are float32: of blocks that all but tie for the last place a few more are searched.
SPARE_PAIRS = 8


def fused_conditioned_search(
    log_probs_TC: Tensor,
    states: PrefixStates,
    nodes: int,
    stops_S: Tensor,
    depth: int,
    topology: Topology = CTC_TOPOLOGY,
    min_mass: float = 0.0,
) -> RankedNodes:
    """Return the result of `conditioned_prefix_search` with exactly `nodes` nodes, those missing with mass 0 and last.

    Of prefixes that tie for the last ranks others may be selected.
    """
    if nodes < 1 or depth < 1 or not runs_triton(log_probs_TC) or states.correction_weight() is None:
        ranked = static_conditioned_search(log_probs_TC, states, nodes, stops_S, depth, topology)
    else:
        ranked = ConditionedSearch.of(log_probs_TC, states, nodes, stops_S, topology).run(states, depth)
    return pad_nodes(ranked, nodes, min_mass)


class Level(NamedTuple):
    """The prefixes of one length; the empty prefix's tokens and masses are not read."""

    tokens_K: Tensor
    rows_K: Tensor  # of their parents, plus first_row
    mass_K: Tensor
    memory_KR: Tensor
    masses_3KT: Tensor  # before every frame, ending in a blank and either; the scale of the frames
    first_row: int  # of the level above


@dataclass(frozen=True)
class ConditionedSearch:
    """The tensors that all levels read."""

    log_probs_TC: Tensor
    out_VR: Tensor
    stops_S: Tensor
    nodes: int
    merges: bool
    kernels: Any

    @classmethod
    def of(
        cls, log_probs_TC: Tensor, states: PrefixStates, nodes: int, stops_S: Tensor, topology: Topology
    ) -> ConditionedSearch:
        out_VR = cast(Tensor, states.correction_weight())
        classes = log_probs_TC.shape[1]
        if max(classes, nodes * block_count(classes - 1)) > MAX_CHILDREN:
            raise ValueError(
                f"{nodes} nodes and {classes} classes are more than the kernels can rank, which is {MAX_CHILDREN} "
                f"classes and as many blocks of {TOKENS} of them after all nodes; lower nodes"
            )
        kernels = import_module("ctcdraft.ctc.triton_conditioned")
        return cls(log_probs_TC, out_VR, stops_S, nodes, topology.merges_repeats, kernels)

    def run(self, states: Any, depth: int) -> RankedNodes:
        depth = min(depth, len(self.log_probs_TC))
        reals, ids = new_scratch(self.log_probs_TC, torch.float64), new_scratch(self.log_probs_TC, torch.int64)
        tokens_LN, rows_LN, masses_LN = ids(depth, self.nodes), ids(depth, self.nodes), reals(depth, self.nodes)
        # Row 0 is the empty prefix; the prefixes of each level follow those of the level above.
        level, next_row = self.expand(None, (tokens_LN[0], rows_LN[0], masses_LN[0]), states.memory_KR, 0), 0
        for number, found in enumerate(zip(tokens_LN, rows_LN, masses_LN, strict=True)):
            self.select(level, number == 0, found, next_row)
            if number + 1 == depth:
                break
            states = states.extend(found[0], found[1] - next_row if next_row else found[1])
            level, next_row = self.expand(level, found, states.memory_KR, next_row), next_row + rows_of(level)
        return select_nodes(tokens_LN.flatten(), rows_LN.flatten(), masses_LN.flatten(), self.nodes)

    def expand(self, above: Level | None, found: RankedNodes, memory_KR: Tensor, first_row: int) -> Level:
        """Return the level of these prefixes with the masses before every frame."""
        memory_KR, frames, rows = memory_KR.contiguous(), len(self.log_probs_TC), len(memory_KR)
        partial_BKT = self.log_probs_TC.new_empty((self.blocks, rows, frames), dtype=torch.float32)
        self.kernels.normaliser_kernel[(self.blocks,)](
            self.log_probs_TC, memory_KR, self.out_VR, partial_BKT, *self.sizes(rows), **self.shapes(rows)
        )
        reals = new_scratch(self.log_probs_TC, torch.float64)
        level = Level(*found, memory_KR, reals(3, rows, frames), first_row)
        upper = level if above is None else above
        self.kernels.expand_kernel[(rows,)](
            self.log_probs_TC,
            self.stops_S,
            *level[:4],
            self.out_VR,
            partial_BKT,
            upper.tokens_K,
            upper.memory_KR,
            upper.masses_3KT,
            level.masses_3KT,
            reals(rows, 3, frames),
            *self.sizes(rows),
            rows_of(upper),
            first_row,
            self.blocks,
            len(self.stops_S),
            is_empty=above is None,
            follows_empty=first_row == 0,
            merges=self.merges,
            T=block(frames),
            S=block(len(self.stops_S)),
            B=BLOCKS_AT_ONCE,
            R=RANK_AT_ONCE,
            num_warps=1,
        )
        return level

    def select(self, level: Level, is_empty: bool, found: RankedNodes, first_row: int) -> None:
        """Write the best children of a level."""
        rows, merges = rows_of(level), self.merges and not is_empty
        bounds_KB = self.log_probs_TC.new_empty((rows, self.blocks), dtype=torch.float32)
        shared = self.log_probs_TC, level.memory_KR, self.out_VR, level.tokens_K
        self.kernels.bound_kernel[(self.blocks,)](
            *shared, level.masses_3KT, bounds_KB, *self.sizes(rows), self.blocks, merges=merges, **self.shapes(rows)
        )
        pairs = min(self.nodes + SPARE_PAIRS, bounds_KB.numel())
        chosen_P = bounds_KB.view(-1).topk(pairs).indices
        keys_PV = self.log_probs_TC.new_empty((pairs, TOKENS), dtype=torch.int64)
        masses_PV = self.log_probs_TC.new_empty((pairs, TOKENS), dtype=torch.float64)
        self.kernels.mass_kernel[(pairs,)](
            *shared,
            level.mass_K,
            level.masses_3KT,
            chosen_P,
            keys_PV,
            masses_PV,
            *self.sizes(rows),
            self.blocks,
            is_empty=is_empty,
            merges=merges,
            V=TOKENS,
            R=RANK_AT_ONCE,
        )
        ranked = chosen_P, keys_PV, masses_PV, *found
        sizes = pairs, self.blocks, self.nodes, first_row
        self.kernels.select_kernel[(1,)](*ranked, *sizes, P=block(pairs), V=TOKENS, num_warps=8)

    @property
    def blocks(self) -> int:
        return block_count(self.log_probs_TC.shape[1] - 1)

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Return what every kernel takes after its tensors."""
        frames, classes = self.log_probs_TC.shape
        strides = self.log_probs_TC.stride(0), *self.out_VR.stride()
        return *strides, frames, classes - 1, self.out_VR.shape[1], rows

    def shapes(self, rows: int) -> dict[str, int]:
        return {"T": block(len(self.log_probs_TC)), "K": block(rows), "V": TOKENS, "R": RANK_AT_ONCE}


def block_count(vocabulary: int) -> int:
    return -(-vocabulary // TOKENS)


def rows_of(level: Level) -> int:
    return len(level.memory_KR)
