"""Operations of a decoding step, each with its definition in PyTorch and, for CUDA, few kernels in its place.

    @fused("ctcdraft.nn.triton_block", launches=1)
    def silu_gated(gate_up: Tensor) -> Tensor:
        ...the definition, which runs on other devices, and on CUDA without Triton

The function of the same name in the module launches the kernels. As operations of torch they are counted and captured
as one call; a test counts the kernels of each under Triton's interpreter and compares their results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ctcdraft.errors import first_line

LIBRARY = torch.library.Library("ctcdraft", "DEF")
OPERATIONS: dict[str, Operation] = {}


@dataclass(frozen=True)
class Operation:
    """One operation. launches: kernels, a library's topk or product counted as one."""

    definition: Callable[..., Any]
    module: str
    launches: int

    def __call__(self, *args: Any) -> Any:
        return getattr(torch.ops.ctcdraft, self.definition.__name__).default(*args)

    def launch(self, *args: Any) -> Any:
        """Run the kernels, on the device of the first tensor: Triton takes the current one."""
        with torch.cuda.device_of(next(one for one in args if isinstance(one, Tensor))):
            return getattr(import_module(self.module), self.definition.__name__)(*args)

    def on_cuda(self, *args: Any) -> Any:
        return (self.launch if runs_triton() else self.definition)(*args)


def fused(module: str, launches: int, writes: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Operation]:
    """Make the decorated function an operation. writes: its arguments that it writes to."""

    def register(definition: Callable[..., Any]) -> Operation:
        name, operation = definition.__name__, Operation(definition, module, launches)
        LIBRARY.define(name + torch.library.infer_schema(definition, mutates_args=writes))
        for backend in ("CPU", "MPS", "XPU", "Meta"):
            LIBRARY.impl(name, definition, backend)
        LIBRARY.impl(name, operation.on_cuda, "CUDA")
        OPERATIONS[name] = operation
        return operation

    return register


@cache
def has_triton() -> bool:
    # It comes with CUDA builds of torch only, so its kernels are imported at their first use.
    return find_spec("triton") is not None


@cache
def runs_triton() -> bool:
    """Return whether kernels of Triton can be built and run here: that takes a C compiler, too."""
    if not has_triton():
        return False
    try:
        import_module("ctcdraft.triton_parts").probe(torch.device("cuda"))
    except Exception as error:  # of many kinds, by what is missing
        warnings.warn(f"no kernels of Triton here ({first_line(error)}): PyTorch runs in their place", stacklevel=2)
        return False
    return True


def block(count: int, smallest: int = 16) -> int:
    """Return the length of the block that holds so many elements: a power of two."""
    return max(smallest, 1 << (count - 1).bit_length())
