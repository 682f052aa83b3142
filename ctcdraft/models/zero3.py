"""A frozen base sharded over the processes of torchrun with DeepSpeed ZeRO-3, for training only.

Every layer is gathered for its part of the forward pass and released again, collectively: work of a single process,
such as validation by decoding or generating responses, would wait forever for the others and is refused elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.checkpoints import load_pretrained
from ctcdraft.models.compatibility import refuse_inexact_tree_attention
from ctcdraft.models.deepspeed_loading import gathered_parameters, load_deepspeed

# By default DeepSpeed does not shard small weights; threshold 0 shards all, so that tests cover what large bases do.
ZERO3_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class ShardedBase(BaseLM):
    """A BaseLM with sharded layers; the embedding and the lm_head, which drafters share, are complete everywhere."""

    def gathered_parameters(self) -> AbstractContextManager[Any]:
        """Return a context in which the last layer and the final norm, which drafters copy, are complete."""
        inner = self.lm.base_model
        modules = [each for each in (getattr(inner, "norm", None), *list(getattr(inner, "layers", []))[-1:]) if each]
        return gathered_parameters(value for module in modules for value in module.parameters())


def load_sharded(path: str, dtype: str, device: str, attention: str, identity: Mapping[str, Any]) -> ShardedBase:
    """Load a sharded base under torchrun; a process holds at most its shard and one complete layer.

    Args:
        identity: the remaining arguments of BaseLM: name, revision, context_length, chat_template, aux_layers.
    """
    from transformers.integrations import HfDeepSpeedConfig

    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        raise InputError(
            "base.zero3=true needs several processes of torchrun, and this is one; use base.device_map=auto"
        )
    deepspeed = load_deepspeed(device.partition(":")[0])
    deepspeed_config = HfDeepSpeedConfig(ZERO3_CONFIG)  # while it exists, transformers loads in shards
    try:
        lm, tokenizer = load_pretrained(
            path, identity["revision"], attention, {"dtype": getattr(torch, dtype)}, dequantises=False
        )
    finally:
        del deepspeed_config
    embedding, head = unsharded_embeddings(lm)
    lm.set_output_embeddings(head)
    lm.eval().requires_grad_(False)
    deepspeed.initialize(model=lm.base_model, config=ZERO3_CONFIG, dist_init_required=False)  # installs its hooks
    lm.base_model.eval()
    base = ShardedBase(lm, tokenizer, **identity)
    base.embedding = embedding
    refuse_inexact_tree_attention(base)
    return base


def unsharded_embeddings(lm: Any) -> tuple[nn.Module, nn.Module]:
    """Return complete copies of the embedding and the lm_head, sharing one matrix where they were tied.

    Raises InputError where the embedding is more than a lookup (Gemma scales it): a draft head would be trained on
    other inputs than it drafts from.
    """
    inner, outer = lm.get_input_embeddings(), lm.get_output_embeddings()
    tied = inner.weight is outer.weight
    with gathered_parameters([inner.weight] if tied else [inner.weight, outer.weight]):
        embedding = nn.Embedding.from_pretrained(inner.weight.detach().clone())
        rows = torch.arange(min(8, len(embedding.weight)), device=embedding.weight.device)
        if not torch.equal(embedding(rows), inner(rows)):
            raise InputError(
                f"base.zero3=true supports plain embeddings, and {type(inner).__name__} scales them; leave out "
                "base.zero3, or distribute the base with base.device_map=auto"
            )
        lm_head_weight = embedding.weight if tied else nn.Parameter(outer.weight.detach().clone(), requires_grad=False)
    head = nn.Linear(lm_head_weight.shape[1], lm_head_weight.shape[0], bias=False, device="meta")
    head.weight = lm_head_weight
    return embedding, head
