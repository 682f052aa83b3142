"""Prefix search one prefix at a time, the most probable first, compiled by numba: for few nodes on a CPU.

It gives what `prefix_search` and `conditioned_prefix_search` give. A level of these costs twenty tensor operations
however small the tensors are; a few hundred additions cost less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctcdraft.ctc.conditioned_search import PrefixStates
from ctcdraft.ctc.prefix_search import check_blank
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology
from ctcdraft.machine_code import load_kernels

# The ranking's precision: masses that agree in 29 significant bits count as equal, as in `prefix_search.py`.
VELTKAMP_FACTOR = 2.0**24 + 1
TIE_TOLERANCE = 1 + 1e-8  # larger than that rounding, so that a bound cuts nothing that could still tie
# Up to this many nodes the search of one prefix at a time is faster on a CPU. Measured before it was compiled, by
# benchmarks/decoding.py with 8 frames of 32,001 classes, one thread, sharpness 3: 0.6 ms against 1.1 at 16 nodes, 1.27
# against 1.45 at 64, 1.67 against 1.61 at 96; with sharper and with flatter frames it is no slower even at 128. Trees
# of 64 nodes from frames that are draft tokens take, compiled, at most about half of the time by levels.
MAX_BEST_FIRST_NODES = 64

PrefixLists = tuple[list[int], list[int], list[float]]  # tokens, parents with -1 for the empty prefix, and masses


def compiled_search(
    log_probs_TC: Tensor,
    blank: int,
    nodes: int,
    tokens_per_frame: int,
    stop_token_ids: Collection[int] = (),
    depth: int | None = None,
    min_mass: float = 0.0,
) -> PrefixLists | None:
    """Return the result of `prefix_search`, ties included, as lists; None without numba.

    No prefix is more probable than its parent, so the next best of all is always a child of one expanded already:

        frames a 1/2 b 1/4 blank 1/4, twice       candidates            taken
                                                  a 5/8    b 5/16       a
                                                  b 5/16   a b 1/8      b
                                                  a b 1/8  b a 1/8      a b
    """
    check_blank(log_probs_TC, blank)
    if (kernels := search_kernels()) is None:
        return None
    frames, classes = log_probs_TC.shape
    best_TR = log_probs_TC.topk(min(tokens_per_frame + 1, classes), dim=1).indices
    frames_TC, depth = log_probs_TC.detach().numpy(), frames if depth is None else min(depth, frames)
    stops_S = stop_ids_array(stop_token_ids)
    return to_lists(
        kernels.search(frames_TC, best_TR.numpy(), blank, nodes, tokens_per_frame, stops_S, depth, min_mass)
    )


def compiled_conditioned_search(
    log_probs_TC: Tensor,
    states: PrefixStates,
    nodes: int,
    stop_token_ids: Collection[int] = (),
    depth: int | None = None,
    topology: Topology = CTC_TOPOLOGY,
    min_mass: float = 0.0,
) -> PrefixLists | None:
    """Return the result of `conditioned_prefix_search` as lists; None without numba or where states are no arrays.

    A prefix exactly as probable as the worst of the best is not expanded: of several that tie for the last ranks others
    may be selected.
    """
    if (kernels := conditioned_kernels()) is None or (arrays := states.arrays()) is None:
        return None
    probs_TV, memory_R, *correction = arrays
    blank_T, stops_S = log_probs_TC[:, -1].double().exp().numpy(), stop_ids_array(stop_token_ids)
    depth = len(log_probs_TC) if depth is None else min(depth, len(log_probs_TC))
    frames = kernels.Frames(log_probs_TC.numpy(), probs_TV, blank_T)
    limits = nodes, stops_S, depth, topology.merges_repeats, min_mass
    return to_lists(kernels.search(frames, kernels.Correction(*correction), memory_R, *limits))


def compiled_conditioned_chains(
    logits_QTC: Tensor, correction: Any, memory_QR: Tensor, depth: int, stop_ids_S: Tensor, merges: bool
) -> tuple[Tensor, Tensor] | None:
    """Return tokens_QK and masses_QK of the chains whose every token makes the most probable prefix.

    Masses are 0 below a stop token. None without numba, where the correction has no arrays, or not in float32.

    Args:
        merges: whether equal labels of adjacent frames are one token.
    """
    ready = all(one.is_cpu and one.dtype == torch.float32 for one in (logits_QTC, memory_QR))
    if not ready or (kernels := conditioned_kernels()) is None or (arrays := correction.alignment_arrays()) is None:
        return None
    given = logits_QTC.contiguous().numpy(), kernels.Correction(*arrays), memory_QR.contiguous().numpy()
    limits = stop_ids_array(stop_ids_S.tolist()), min(depth, logits_QTC.shape[1]), merges
    tokens_QK, masses_QK = kernels.best_chains(*given, *limits)
    return torch.from_numpy(tokens_QK), torch.from_numpy(masses_QK)


def search_kernels() -> Any:
    """Return the module of compiled loops, imported by the first search; None without numba."""
    return load_kernels("ctcdraft.ctc.search_kernels")


def conditioned_kernels() -> Any:
    return load_kernels("ctcdraft.ctc.conditioned_kernels")


def stop_ids_array(stop_token_ids: Collection[int]) -> np.ndarray:
    return np.array([*stop_token_ids, -2])  # -2 is no token; numba needs at least one to know their type


def to_lists(columns: Sequence[np.ndarray]) -> PrefixLists:
    tokens, parents, masses = (column_N.tolist() for column_N in columns)
    return tokens, parents, masses
