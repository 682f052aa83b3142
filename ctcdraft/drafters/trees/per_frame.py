"""Trees from frames in which frame k is draft token k: no blank, nothing to collapse (Medusa, blockwise decoding)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctcdraft.ctc.best_first import (
    MAX_BEST_FIRST_NODES,
    PrefixLists,
    conditioned_kernels,
    stop_ids_array,
    to_lists,
)
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.trees.dynamic import DynamicTree, build_dynamic_tree
from ctcdraft.drafters.trees.request import Conditioned, StepTreeBuilder, TreeRequest
from ctcdraft.drafters.trees.static import Choice, StaticTree, cheapest
from ctcdraft.errors import InputError
from ctcdraft.machine_code import load_kernels

KERNELS = "ctcdraft.drafters.trees.per_frame_kernels"


class PerFrameTree:
    """The most probable texts, best first: a text's probability is the product of its tokens' in their frames.

    The probability of a frame's blank is shared out to the tokens. children: those of one node; None for no limit, 1
    for a chain.
    """

    fixed_shapes = True
    interprets_as = "tokens"
    exact = False  # whether the tree holds exactly the most probable texts

    def __init__(self, children: int | None) -> None:
        self.step_tree: StepTreeBuilder = DynamicTree(None, children)
        self.exact = children is None

    def __call__(self, log_probs_TC: Tensor, request: TreeRequest, conditioned: Conditioned = None) -> TokenTree:
        request = request.limit_depth(len(log_probs_TC))
        if self.exact and (found := compiled_per_frame_search(log_probs_TC, conditioned, request)) is not None:
            return TokenTree.from_lists(request.root, *found)
        step_function = PerFrameStepFunction(log_probs_TC, conditioned)
        if self.exact:
            return build_dynamic_tree(step_function, request, request.nodes, request.nodes)
        return self.step_tree(step_function, request)


class StaticPerFrameTree(PerFrameTree):
    """Medusa's tree (Cai et al. 2024, section 2.3.3): a fixed list of choices, see StaticTree."""

    has_nested_trees = StaticTree.has_nested_trees

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self.step_tree = StaticTree(choices)


class PerFrameStepFunction:
    """Frames as a step function: level k is the distribution of frame k."""

    def __init__(self, log_probs_TC: Tensor, conditioned: Conditioned) -> None:
        self.conditioned = conditioned
        if conditioned is None:  # conditioned frames are normalised after every prefix instead
            self.token_log_probs_TV = log_probs_TC[:, :-1].log_softmax(dim=-1)
        self.frame = -1

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        self.frame += 1
        if self.conditioned is None:
            return self.token_log_probs_TV[self.frame].expand(len(tokens_K), -1)
        if self.frame > 0:  # the first call has the root, which is in the correction's initial state
            self.conditioned = self.conditioned.extend(tokens_K, rows_K)
        return self.conditioned.token_log_probs(self.frame)


def compiled_per_frame_search(
    log_probs_TC: Tensor, conditioned: Conditioned, request: TreeRequest
) -> PrefixLists | None:
    """Return the most probable texts as `build_dynamic_tree` gives them, by machine code; None where not possible.

    Texts below `request.min_path_prob` are left out, and with a correction tokens less probable than e^-80 times their
    frame's blank. Of equals others may be selected.
    """
    few = log_probs_TC.is_cpu and log_probs_TC.dtype == torch.float32 and request.nodes <= MAX_BEST_FIRST_NODES
    if not few or request.padded or (kernels := load_kernels(KERNELS)) is None:
        return None
    if request.nodes < 2 or request.depth < 1:
        return [], [], []
    if (inputs := search_inputs(log_probs_TC, conditioned)) is None:
        return None
    probs_TV, arrays, frames, memory_M = inputs
    given = conditioned_kernels().Correction(*arrays), kernels.FrameFeatures(*frames), memory_M
    # Machine code does not check bounds.
    depth = min(request.depth, len(probs_TV))
    limits = request.nodes - 1, stop_ids_array(request.stop_ids), depth, request.min_path_prob
    return to_lists(kernels.search(probs_TV, *given, *limits))


def search_inputs(log_probs_TC: Tensor, conditioned: Conditioned) -> tuple[Any, ...] | None:
    """Return the frames without correction, and as arrays the correction, the frames that it reads and its memory.

    The last three are empty where there is nothing of the kind. None for corrections that have no arrays.
    """
    none_RV = np.empty((0, log_probs_TC.shape[1] - 1), np.float32)
    no_frames = none_RV, none_RV[:, 0], none_RV
    if conditioned is None:
        return log_probs_TC[:, :-1].detach().softmax(dim=-1).numpy(), (none_RV, *no_frames), no_frames, none_RV[:, 0]
    arrays = conditioned.correction.arrays() if conditioned.is_float32() else None
    if arrays is None:
        return None
    memory_M, frames = conditioned.correction.frame_arrays(conditioned.memory_KR[0])
    return conditioned.token_probs_TV.numpy(), arrays, frames or no_frames, memory_M


def likely_choices(
    count: int, frames: int, ranks: int, first: float, rank_decay: float, frame_decay: float
) -> list[list[int]]:
    """Return the `count` choices of greatest probability, best first, a choice after the one it continues.

    The probability that rank r of frame t (both from 0) is right is taken as first * rank_decay^r * frame_decay^t.

    first 0.6, rank_decay 0.35, frame_decay 0.9:   [0] .6   [0, 0] .324   [1] .21   [0, 0, 0] .157   [0, 1] .113
    """
    if not (0 < first < 1 and 0 < rank_decay <= 1 and 0 < frame_decay <= 1):
        raise InputError(
            "drafter.tree.choices must have 0 < first < 1, 0 < rank_decay <= 1 and 0 < frame_decay <= 1, got "
            f"first={first}, rank_decay={rank_decay} and frame_decay={frame_decay}"
        )

    def cost(choice: Choice) -> float:
        return -sum(log(first) + rank * log(rank_decay) + frame * log(frame_decay) for frame, rank in enumerate(choice))

    def successors(choice: Choice) -> Iterator[Choice]:
        if choice[-1] + 1 < ranks:
            yield (*choice[:-1], choice[-1] + 1)
        if len(choice) < frames:
            yield (*choice, 0)

    return [list(choice) for choice in cheapest((0,), cost, successors, count)]
