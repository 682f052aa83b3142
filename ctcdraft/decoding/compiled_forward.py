"""A forward pass of the base compiled by torch, once per number of nodes, for cache buffers of any capacity."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.static_cache import StaticCacheView
from ctcdraft.errors import InputError, first_line

# (tokens_N, position_ids_N, mask_NM, cache) -> hidden states_ND and logits_NV
ForwardFunction = Callable[[Tensor, Tensor, Tensor, StaticCacheView], tuple[Tensor, Tensor]]
RECOMPILE_LIMIT = 1024  # sizes and bases that one process may compile; torch's default is 8


class CompiledForward:
    """Compiles a forward pass for every number of nodes that it meets."""

    def __init__(self) -> None:
        self._run: Any = torch.compile(run_forward, dynamic=False, fullgraph=True)
        self._sizes: set[int] = set()

    def __call__(
        self,
        forward: ForwardFunction,
        tokens_N: Tensor,
        position_ids_N: Tensor,
        mask_NM: Tensor,
        cache: StaticCacheView,
    ) -> tuple[Tensor, Tensor]:
        """Run; compile first if the size is new. Raises InputError where that is impossible."""
        arguments = forward, tokens_N, position_ids_N, mask_NM, cache
        if len(tokens_N) in self._sizes:
            return self._run(*arguments)
        # The rows that attention sees stay dynamic: attention runs in a kernel that takes any number of them, and half
        # a minute of compiling for each number would gain nothing.
        torch._dynamo.maybe_mark_dynamic(mask_NM, 1)
        for buffer in (buffer for layer in cache.layer_buffers for buffer in layer):
            torch._dynamo.maybe_mark_dynamic(buffer, 2)
        try:
            # Warnings of the compiler concern torch itself; a user can do nothing about them.
            with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                warnings.simplefilter("ignore")
                outputs = self._run(*arguments)
        # No fallback to eager code: it would be measured under a wrong name.
        except torch._dynamo.exc.TorchDynamoException as error:
            raise InputError(
                f"base.compiled=true: this base cannot be compiled here ({first_line(error)}); compiling needs a C++ "
                "compiler, on a GPU also triton, and a model without control flow that depends on values; install "
                "what is missing, or set base.compiled=false"
            ) from error
        self._sizes.add(len(tokens_N))
        return outputs


def run_forward(forward: ForwardFunction, *inputs: Any) -> tuple[Tensor, Tensor]:
    return forward(*inputs)
