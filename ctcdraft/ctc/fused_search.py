"""Prefix searches of fixed shapes for a device: fused into few kernels by Triton, or as PyTorch operations without it.

They ask the host for nothing, so that a CUDA graph can hold them; `drop_improbable` then counts the nodes. Triton comes
with CUDA builds of torch only, so this module imports its kernels at their first use.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.prefix_search import MAX_CHILDREN, RankedNodes, check_blank, static_prefix_search

SMALLEST_BLOCK = 16  # elements


def fused_prefix_search(
    log_probs_TC: Tensor,
    blank: int,
    nodes: int,
    tokens_per_frame: int,
    stops_S: Tensor,
    depth: int,
    min_mass: float = 0.0,
) -> RankedNodes:
    """Return the result of `prefix_search` with exactly `nodes` nodes, those that are missing with mass 0 and last.

    stops_S: int64, on the device of the frames.
    """
    if not runs_triton(log_probs_TC):
        ranked = static_prefix_search(log_probs_TC, blank, nodes, tokens_per_frame, stops_S, depth)
        return pad_nodes(ranked, nodes, min_mass)
    return launch_prefix_search(log_probs_TC, blank, nodes, tokens_per_frame, stops_S, depth, min_mass)


def launch_prefix_search(
    log_probs_TC: Tensor,
    blank: int,
    nodes: int,
    tokens_per_frame: int,
    stops_S: Tensor,
    depth: int,
    min_mass: float,
) -> RankedNodes:
    """Do the search as one kernel after a topk."""
    check_blank(log_probs_TC, blank)
    frames, classes = log_probs_TC.shape
    if tokens_per_frame < 1:
        raise ValueError(f"tokens_per_frame must be >= 1, got {tokens_per_frame}")
    few = min(tokens_per_frame, classes - 1)
    rows, width = block(nodes + 1), block(frames * few)
    if max(classes, rows * block(depth + 1)) > MAX_CHILDREN:
        raise ValueError(
            f"{classes} classes or {nodes} nodes of {depth} levels are more than {MAX_CHILDREN}, the most the kernel "
            "can rank; lower nodes"
        )
    best_TR = log_probs_TC.topk(few + 1, dim=1).indices
    reals, ids = new_scratch(log_probs_TC, torch.float64), new_scratch(log_probs_TC, torch.int64)
    ranked = ids(nodes), ids(nodes), reals(nodes)
    prefix_kernels().prefix_search_kernel[(1,)](
        log_probs_TC,
        best_TR,
        stops_S,
        reals(frames, width),
        reals(nodes + 1, frames),
        reals(nodes + 1, frames),
        reals(frames),
        reals(frames),
        ids(nodes + 1, width),
        *ranked,
        log_probs_TC.stride(0),
        frames,
        few,
        few + 1,
        len(stops_S),
        blank,
        nodes,
        depth,
        min_mass=min_mass,
        T=block(frames),
        W=width,
        S=block(len(stops_S)),
        R=rows,
        num_warps=4 if width <= 1024 else 8,
    )
    return ranked


def pad_nodes(ranked: RankedNodes, nodes: int, min_mass: float) -> RankedNodes:
    """Return exactly `nodes` nodes, those below min_mass with mass 0."""
    tokens_N, parents_N, masses_N = ranked
    if (missing := nodes - len(tokens_N)) > 0:
        tokens_N, parents_N = F.pad(tokens_N, (0, missing)), F.pad(parents_N, (0, missing), value=-1)
        masses_N = F.pad(masses_N, (0, missing))
    return tokens_N, parents_N, masses_N if min_mass == 0 else masses_N.masked_fill(masses_N < min_mass, 0)


def runs_triton(tensor: Tensor) -> bool:
    """Return whether kernels of Triton can read this tensor."""
    return has_triton() and (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def prefix_kernels() -> Any:
    return import_module("ctcdraft.ctc.triton_prefix")


def block(count: int) -> int:
    """Return the length of the block that holds so many elements: a power of two."""
    return max(SMALLEST_BLOCK, 1 << (count - 1).bit_length())


def new_scratch(like: Tensor, dtype: torch.dtype) -> Any:
    """Return a function that allocates tensors of this type on the device of `like`."""
    return lambda *shape: like.new_empty(shape, dtype=dtype)
