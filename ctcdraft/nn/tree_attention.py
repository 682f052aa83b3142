"""Attention of a token tree over the cached text, in the layers of a stock model on a CUDA device.

PyTorch's kernels that take a mask give each query head few programs, which read the whole text. With grouped queries
scaled_dot_product_attention repeats the keys for every query head, or cuDNN takes several times as long for 64 nodes as
without a mask (results/device). The kernels here (`triton_attention.py`) divide the text among programs, as flash
decoding does (Dao et al. 2023). Everything else, such as prompts and training, is computed as with `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.fused import fused, runs_triton

NAME = "tree_sdpa"  # of this attention, for `set_attn_implementation`
MAX_NODES = 256
WIDTHS = (16, 32, 64, 128)  # of a head
DTYPES = (torch.bfloat16, torch.float16)


@fused("ctcdraft.nn.triton_attention", launches=2)
def tree_attention(query: Tensor, keys: Tensor, values: Tensor, mask_NM: Tensor, scale: float) -> Tensor:
    """Return the attention [1, N, H, d] of queries [1, H, N, d] over keys and values [1, G, M, d].

    mask_NM: added to the scores; the lowest number of its dtype where a query does not see a row.
    """
    mixed = F.scaled_dot_product_attention(query, keys, values, mask_NM[None, None], scale=scale, enable_gqa=True)
    return mixed.transpose(1, 2).contiguous()


def has_kernels(on: Tensor, dtype: torch.dtype, width: int, nodes: int) -> bool:
    """Return whether the kernels compute the attention of so many queries, of heads of this width.

    on: a tensor on the device.
    """
    return on.is_cuda and runs_triton() and fits_kernels(dtype, width, nodes)


def fits_kernels(dtype: torch.dtype, width: int, nodes: int) -> bool:
    return dtype in DTYPES and width in WIDTHS and nodes <= MAX_NODES


def is_tree_read(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, more: dict[str, Any]) -> bool:
    """Return whether the kernels compute this attention of a layer. more: what else it gives to its attention."""
    if mask is None or not query.is_cuda or not fits_kernels(query.dtype, query.shape[-1], query.shape[2]):
        return False
    same_width = query.shape[-1] == keys.shape[-1] == values.shape[-1]
    whole = (1, 1, query.shape[2], keys.shape[2])
    is_additive = mask.dtype == query.dtype and mask.shape == whole and mask.stride(-1) == 1 and len(query) == 1
    has_more = more.get("dropout") or any(more.get(key) is not None for key in ("softcap", "s_aux", "position_bias"))
    return same_width and is_additive and not has_more and not torch.is_grad_enabled()


def attend(
    otherwise: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute the attention of one layer. otherwise: the attention function of transformers for all but trees."""
    if not is_tree_read(query, key, value, attention_mask, more):
        return otherwise(module, query, key, value, attention_mask, **more)
    scale = more.get("scaling") or query.shape[-1] ** -0.5
    return tree_attention(query, key, value, attention_mask[0, 0], scale), None


def use_tree_attention(lm: Any) -> None:
    """Let a model with `sdpa` attention compute trees by the kernels, where there are kernels for it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    weight = lm.get_output_embeddings().weight
    if lm.config._attn_implementation != "sdpa" or not weight.is_cuda or weight.dtype not in DTYPES:
        return
    if not runs_triton():  # without it, PyTorch's own choice of a kernel is faster than the definition
        return
    AttentionInterface.register(NAME, partial(attend, sdpa_attention_forward))
    AttentionMaskInterface.register(NAME, sdpa_mask)
    lm.set_attn_implementation(NAME)
