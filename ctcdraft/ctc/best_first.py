"""Prefix search one prefix at a time, the most probable first: for few nodes on a CPU.

It gives what `prefix_search` gives. A level of that costs twenty tensor operations however small the tensors are; a few
hundred additions cost less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ctcdraft.ctc.prefix_search import check_blank
from ctcdraft.machine_code import load_kernels

# The ranking's precision: masses that agree in 29 significant bits count as equal, as in `prefix_search.py`.
VELTKAMP_FACTOR = 2.0**24 + 1
TIE_TOLERANCE = 1 + 1e-8  # larger than that rounding, so that a bound cuts nothing that could still tie

FrameMasses = Sequence[float]  # one per frame
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
    limits = nodes, tokens_per_frame
    frames, classes = log_probs_TC.shape
    best_TR = log_probs_TC.topk(min(tokens_per_frame + 1, classes), dim=1).indices
    # -2 is no token; numba needs at least one to know their type.
    stops_S, depth = np.array([*stop_token_ids, -2]), frames if depth is None else min(depth, frames)
    columns = kernels.search(log_probs_TC.detach().numpy(), best_TR.numpy(), blank, *limits, stops_S, depth, min_mass)
    tokens, parents, masses = (column_N.tolist() for column_N in columns)
    return tokens, parents, masses


def search_kernels() -> Any:
    """Return the module of compiled loops, imported by the first search; None without numba."""
    return load_kernels("ctcdraft.ctc.search_kernels")


def round_mantissa(mass: float) -> float:
    high = mass * VELTKAMP_FACTOR  # the low bits are lost in the sum (Veltkamp 1968)
    return high - (high - mass)
