"""CUDA graphs of functions that always read and write the same memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ctcdraft.errors import InputError, first_line

Restore = Callable[[], None]


class Graphs:
    """The graphs of one decoder's functions, by keys that name what differs in their shapes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.error: str | None = None  # why a capture failed; from then on every function is run
        self.graphs: dict[Hashable, Any] = {}

    def call_of(self, key: Hashable, function: Callable[[], Any], keep: Callable[[], Restore]) -> Callable[[], Any]:
        """Return a call with the effects of `function`: the replay of its graph, which is captured if there is none.

        Where nothing can be captured, it is the function itself.

        Args:
            keep: save what the function changes and does not write anew; return a function that restores it.
        """
        if self.error is not None or not can_capture(self.device):
            return function
        if key not in self.graphs:
            try:
                self.graphs[key] = self.capture(function, keep)
            except (torch.OutOfMemoryError, InputError):
                raise
            # A base or drafter that synchronises with the host cannot be captured; and Triton has errors of its own.
            except Exception as error:
                self.error = first_line(error)
                return function
        return self.graphs[key].replay

    def capture(self, function: Callable[[], Any], keep: Callable[[], Restore]) -> Any:
        """Return the graph of a function, after the warm-up calls that kernels need.

        Where one of them or the capture fails, the state is as before.
        """
        restore = keep()
        try:
            for _ in range(2):
                function()
                restore()
            return capture_graph(function)
        except BaseException:
            restore()
            raise


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a CUDA device is the current one, whose streams graphs are captured and replayed on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def capture_graph(function: Callable[[], Any]) -> Any:
    """Return a CUDA graph of a function that was called before, as kernels need it."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def saved_tensors(tensors: Sequence[Tensor]) -> Restore:
    """Return a function that writes the present content back to the tensors."""
    saved = [(tensor, tensor.clone()) for tensor in tensors]

    def restore() -> None:
        for tensor, content in saved:
            tensor.copy_(content)

    return restore
