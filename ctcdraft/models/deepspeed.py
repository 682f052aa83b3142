"""DeepSpeed: its import and initialisation, and a frozen base that its ZeRO-3 shards over the processes of torchrun.

A sharded base is for training only. Every layer is gathered for its part of the forward pass and released again,
collectively: work of a single process, such as validation by decoding or generating responses, would wait forever for
the others and is refused elsewhere. No other module imports deepspeed.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.distributed import shut_down_gloo
from ctcdraft.errors import InputError

SINGLE_PROCESS_ENV = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}
# By default DeepSpeed does not shard small weights; threshold 0 shards all, so that tests cover what large bases do.
ZERO3_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def load_deepspeed(device: str) -> Any:
    """Return the deepspeed module with its process group initialised; without torchrun the group has one process."""
    deepspeed = import_deepspeed(device)
    backend = "gloo" if device == "cpu" else "nccl"
    deepspeed.init_distributed(backend, verbose=False)
    atexit.register(shut_down_gloo)
    return deepspeed


def import_deepspeed(device: str) -> Any:
    """Import deepspeed with the environment variables and switches that this device needs."""
    if importlib.util.find_spec("deepspeed") is None:  # before the environment of a sweep's next job is changed
        raise InputError("engine=deepspeed needs deepspeed, which is not installed; pip install deepspeed")
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in SINGLE_PROCESS_ENV.items():
        os.environ.setdefault(name, value)
    # Its loaders unpickle with weights_only=False, which executes a hostile file; this switch of torch overrides them.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    import deepspeed  # here and not above, as it takes seconds

    if device == "cpu":
        # Otherwise it compiles an operator for half a minute, and fails where there is no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def gather(weights: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which these sharded weights are complete in every process; a collective call."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(weights))


def is_sharded(value: Any) -> bool:
    return hasattr(value, "ds_id")


def gather_copy(parameter: Tensor) -> Tensor:
    """Return a complete copy of a sharded parameter; a collective call."""
    with gather([parameter]):
        return parameter.detach().clone()


@contextmanager
def sharded_loading() -> Iterator[None]:
    """Return a context in which transformers loads only the shard of this process, and at most one complete layer."""
    from transformers.integrations import HfDeepSpeedConfig

    switch = HfDeepSpeedConfig(ZERO3_CONFIG)  # transformers has a weak reference to it and shards while it exists
    try:
        yield
    finally:
        del switch


def install_gathering(lm: Any, deepspeed: Any) -> nn.Module:
    """Have each layer gathered when it runs; return the embedding, which like the lm_head becomes a complete copy."""
    # Drafters share both, and read single rows of them outside the forward pass of the base.
    embedding, head = unsharded_embeddings(lm)
    lm.set_output_embeddings(head)
    lm.eval().requires_grad_(False)
    deepspeed.initialize(model=lm.base_model, config=ZERO3_CONFIG, dist_init_required=False)
    lm.base_model.eval()
    return embedding


def unsharded_embeddings(lm: Any) -> tuple[nn.Module, nn.Module]:
    """Return complete copies of the embedding and the lm_head, sharing one matrix where they were tied.

    Raises InputError where the embedding is more than a lookup (Gemma scales it): a draft head would be trained on
    other inputs than it drafts from.
    """
    inner, outer = lm.get_input_embeddings(), lm.get_output_embeddings()
    tied = inner.weight is outer.weight
    with gather([inner.weight] if tied else [inner.weight, outer.weight]):
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
