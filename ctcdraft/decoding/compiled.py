"""A read that torch compiles once for every number of nodes. It knows the sizes of tensors, no model and no tree."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ctcdraft.errors import InputError, first_line

if TYPE_CHECKING:
    from ctcdraft.decoding.fixed import Forward, Inputs
    from ctcdraft.decoding.kv_cache import Written

MANY = 1024  # sizes and bases that one process may meet; torch gives up at eight


class Compiled:
    """`run` as one piece of compiled code for every number of nodes. How many rows the cache's buffers have stays
    open: attention is a kernel that takes any number, and half a minute of compiling buys nothing there."""

    def __init__(self, run: Callable[[Forward, Inputs, Written], tuple[Tensor, Tensor]]) -> None:
        self._run: Any = torch.compile(run, dynamic=False, fullgraph=True)
        self._sizes: set[int] = set()

    def __call__(self, forward: Forward, inputs: Inputs, cache: Written) -> tuple[Tensor, Tensor]:
        size = len(inputs.tokens_N)
        if size in self._sizes:
            return self._run(forward, inputs, cache)
        outputs = self._compile(forward, inputs, cache)
        self._sizes.add(size)
        return outputs

    def _compile(self, forward: Forward, inputs: Inputs, cache: Written) -> tuple[Tensor, Tensor]:
        """Compile this size and read. InputError where that is impossible: a read that would quietly be an eager one
        were a figure under a wrong name."""
        torch._dynamo.maybe_mark_dynamic(inputs.mask_NM, 1)
        for buffer in (buffer for layer in cache.layer_buffers for buffer in layer):
            torch._dynamo.maybe_mark_dynamic(buffer, 2)
        try:
            # What torch has to say of itself while it compiles is nothing that a user could mend.
            with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=MANY):
                warnings.simplefilter("ignore")
                return self._run(forward, inputs, cache)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise InputError(
                f"base.compiled=true: this base cannot be compiled here ({first_line(error)}); it takes a C++ "
                "compiler, on a GPU also triton, and a model without turns that depend on its values; install what "
                "is missing, or leave base.compiled=false"
            ) from error
