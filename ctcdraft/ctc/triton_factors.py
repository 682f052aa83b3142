"""What a logit correction multiplies tokens with, for the kernels of `triton_conditioned.py`.

All products are float32, whatever the weights are: with the reduced precision of tensor cores the bounds on the masses
would be too coarse to rank by.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def factors(
    memory_KR, out_VR, token_V, row_K, token_stride, rank_stride, vocabulary, rank, rows, K: tl.constexpr, V:
    tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Return what the correction multiplies the tokens with, 0 for rows and tokens that are none."""
    logits_KV = tl.zeros([K, V], tl.float32)
    for start in range(0, rank, R):
        index_R = start + tl.arange(0, R)
        real_KR = (row_K[:, None] < rows) & (index_R[None, :] < rank)
        real_RV = (index_R[:, None] < rank) & (token_V[None, :] < vocabulary)
        memory = tl.load(memory_KR + row_K[:, None] * rank + index_R[None, :], mask=real_KR, other=0)
        place_RV = index_R[:, None] * rank_stride + token_V[None, :] * token_stride
        out = tl.load(out_VR + place_RV, mask=real_RV, other=0)
        logits_KV = tl.dot(memory.to(tl.float32), out.to(tl.float32), logits_KV, input_precision="ieee")
    return as_factor(logits_KV)


@triton.jit
def as_factor(logits):
    """Return the exponential, within the range of `fused_conditioned.LOGIT_RANGE`."""
    return tl.exp(tl.minimum(tl.maximum(logits, -80.0), 80.0))


@triton.jit
def factor_of_one(memory_R, out_VR, token, token_stride, rank_stride, rank, R: tl.constexpr):
    """Return what the correction after one prefix multiplies one token with."""
    logit_R = tl.zeros([R], tl.float32)
    for start in range(0, rank, R):
        index_R = start + tl.arange(0, R)
        memory = tl.load(memory_R + index_R, mask=index_R < rank, other=0).to(tl.float32)
        out = tl.load(out_VR + token * token_stride + index_R * rank_stride, mask=index_R < rank, other=0)
        logit_R += memory * out.to(tl.float32)
    return as_factor(tl.sum(logit_R, 0)).to(tl.float64)


@triton.jit
def token_probs(log_probs_TC, token_V, frame_T, row_stride, frames, vocabulary):
    place_TV = frame_T[:, None] * row_stride + token_V[None, :]
    real_TV = (frame_T[:, None] < frames) & (token_V[None, :] < vocabulary)
    return tl.exp(tl.load(log_probs_TC + place_TV, mask=real_TV, other=-float("inf")).to(tl.float32))
