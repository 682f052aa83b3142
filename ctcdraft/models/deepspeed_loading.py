"""The one way in to DeepSpeed: the package, loaded when it is wanted, and the weights it holds in shards, made whole.

It knows no base, no head and no run. Loading it is slow, so nothing of it is imported before it is asked for.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ctcdraft.distributed import shut_down_gloo_at_exit
from ctcdraft.errors import InputError

SINGLE_PROCESS_ENV = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}

NOT_INSTALLED = "engine=deepspeed needs deepspeed, which is not installed; pip install deepspeed"


def refuse_missing_deepspeed() -> None:
    """InputError where the package is not installed, without loading it."""
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError(NOT_INSTALLED)


def load_deepspeed(device: str) -> Any:
    """The package, which has met the other processes; alone it believes to be one of one."""
    deepspeed, backend = import_deepspeed(device), "gloo" if device == "cpu" else "nccl"
    deepspeed.init_distributed(backend, verbose=False)
    shut_down_gloo_at_exit(backend)
    return deepspeed


def import_deepspeed(device: str) -> Any:
    """The package, told what this machine is."""
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in SINGLE_PROCESS_ENV.items():
        os.environ.setdefault(name, value)
    # Its loaders unpickle with weights_only=False, which executes a hostile file; this switch of torch overrules them.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        import deepspeed
    except ImportError as error:
        raise InputError(NOT_INSTALLED) from error
    if device == "cpu":
        # Else it builds an operator for half a minute, and fails where there is no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def gathered_parameters(weights: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Within, these are whole in every process: a call that all processes make together."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(weights))


def is_sharded(value: Any) -> bool:
    return hasattr(value, "ds_id")


def gather_copy(shard: Tensor) -> Tensor:
    """A copy of all its values: a call that all processes make together."""
    with gathered_parameters([shard]):
        return shard.detach().clone()
