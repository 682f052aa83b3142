"""A trivial kernel, to see whether Triton's compiler works on this machine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def probe(device: torch.device) -> Tensor:
    """Build a kernel that fills a tensor with ones, and run it; raise what Triton raises where that is impossible."""
    out_N = torch.empty(16, device=device)
    probe_kernel[(1,)](out_N, N=16)
    return out_N


@triton.jit
def probe_kernel(out_N, N: tl.constexpr):
    tl.store(out_N + tl.arange(0, N), 1.0)
