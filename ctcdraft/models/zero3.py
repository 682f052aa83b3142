"""A base whose weights lie in shards over the processes of torchrun (DeepSpeed's ZeRO-3), for training alone.

Every layer is gathered when it is read and let go again, by all processes together: what one of them does alone, such
as probing or answering a corpus, would wait for the others for ever, and is refused. It knows no drafts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.checkpoints import load_pretrained
from ctcdraft.models.compatibility import refuse_inexact_tree_attention
from ctcdraft.models.deepspeed_loading import gathered_parameters, load_deepspeed
from ctcdraft.models.values import read_chat_template

# DeepSpeed keeps small weights whole; here nothing is, so that what works on a test's base works on a large one.
ZERO3_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class ShardedBase(BaseLM):
    """As BaseLM. Embedding and head, which drafters share, are whole in every process."""

    def gathered_parameters(self) -> AbstractContextManager[Any]:
        """Within, the last layer and the norm are whole too: drafters begin with copies of them."""
        inner = self.lm.base_model
        parts = [part for part in (getattr(inner, "norm", None), *list(getattr(inner, "layers", []))[-1:]) if part]
        return gathered_parameters(value for part in parts for value in part.parameters())


def load_sharded(
    path: str,
    dtype: str,
    device: str,
    name: str,
    revision: str | None,
    attention: str,
    context_length: int | None,
    chat_template_file: str | None,
    taps: Sequence[str | int],
) -> ShardedBase:
    """The values of `load_base`, under torchrun. No process ever holds more than its shard and a layer."""
    from transformers.integrations import HfDeepSpeedConfig

    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        raise InputError(
            "base.zero3=true is for the processes of torchrun, and this is one alone; base.device_map=auto"
        )
    deepspeed = load_deepspeed(device.partition(":")[0])
    deepspeed_config = HfDeepSpeedConfig(ZERO3_CONFIG)  # as long as it lives, transformers loads in shards
    try:
        lm, tokenizer = load_pretrained(path, revision, attention, {"dtype": getattr(torch, dtype)}, dequantises=False)
    finally:
        del deepspeed_config
    embedding, head = unsharded_embeddings(lm)
    lm.set_output_embeddings(head)
    lm.eval().requires_grad_(False)
    deepspeed.initialize(model=lm.base_model, config=ZERO3_CONFIG, dist_init_required=False)  # leaves its hooks there
    lm.base_model.eval()
    template = read_chat_template(chat_template_file) if chat_template_file else None
    base = ShardedBase(lm, tokenizer, name, revision, context_length, template, taps)
    base.embedding = embedding
    refuse_inexact_tree_attention(base)
    return base


def unsharded_embeddings(lm: Any) -> tuple[nn.Module, nn.Module]:
    """The embedding and the head by themselves, whole, and one matrix still where they were.

    Raises InputError where the embedding is more than a look-up (Gemma's multiplies): a head would learn from other
    inputs than it drafts from.
    """
    inner, outer = lm.get_input_embeddings(), lm.get_output_embeddings()
    tied = inner.weight is outer.weight
    with gathered_parameters([inner.weight] if tied else [inner.weight, outer.weight]):
        embedding = nn.Embedding.from_pretrained(inner.weight.detach().clone())
        rows = torch.arange(min(8, len(embedding.weight)), device=embedding.weight.device)
        if not torch.equal(embedding(rows), inner(rows)):
            raise InputError(
                f"base.zero3=true looks embeddings up as they are, and {type(inner).__name__} changes them; leave out "
                "base.zero3, or spread the base with base.device_map=auto"
            )
        lm_head_weight = embedding.weight if tied else nn.Parameter(outer.weight.detach().clone(), requires_grad=False)
    head = nn.Linear(lm_head_weight.shape[1], lm_head_weight.shape[0], bias=False, device="meta")
    head.weight = lm_head_weight
    return embedding, head
