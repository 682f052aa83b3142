"""A trivial kernel, to see whether Triton's compiler works on this machine, and functions that kernels share."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def probe(device: torch.device) -> Tensor:
    """Build a kernel that fills a tensor with ones, and run it; raise what Triton raises where that is impossible."""
    out_N = torch.empty(16, device=device)
    probe_kernel[(1,)](out_N, N=16)
    return out_N


@triton.jit
def probe_kernel(out_N, N: tl.constexpr):
    tl.store(out_N + tl.arange(0, N), 1.0)


@triton.jit
def add_product(left, right, total):
    """Return total + left @ right in float32.

    Operands of one dtype keep it: products of two bfloat16 are exact in float32, in which tensor cores add them.
    """
    if INTERPRETED or left.dtype != right.dtype:  # Triton's interpreter multiplies no bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")
