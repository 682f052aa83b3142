"""Import and initialisation of DeepSpeed, and gathering of weights that its ZeRO-3 keeps in shards.

No other module imports deepspeed. It is imported inside functions because that takes seconds.
"""

from __future__ import annotations

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


def load_deepspeed(device: str) -> Any:
    """Return the deepspeed module with its process group initialised; without torchrun the group has one process."""
    deepspeed = import_deepspeed(device)
    backend = "gloo" if device == "cpu" else "nccl"
    deepspeed.init_distributed(backend, verbose=False)
    shut_down_gloo_at_exit(backend)
    return deepspeed


def import_deepspeed(device: str) -> Any:
    """Import deepspeed with the environment variables and switches that this device needs."""
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in SINGLE_PROCESS_ENV.items():
        os.environ.setdefault(name, value)
    # Its loaders unpickle with weights_only=False, which executes a hostile file; this switch of torch overrides them.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        import deepspeed
    except ImportError as error:
        raise InputError("engine=deepspeed needs deepspeed, which is not installed; pip install deepspeed") from error
    if device == "cpu":
        # Otherwise it compiles an operator for half a minute, and fails where there is no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def gathered_parameters(weights: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which these sharded weights are complete in every process; a collective call."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(weights))


def is_sharded(value: Any) -> bool:
    return hasattr(value, "ds_id")


def gather_copy(parameter: Tensor) -> Tensor:
    """Return a complete copy of a sharded parameter; a collective call."""
    with gathered_parameters([parameter]):
        return parameter.detach().clone()
