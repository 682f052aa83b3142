"""Graphs of the simulated accelerator: the operations of a block, recorded once and repeated on the same memory.

    with capture() as graph:
        output = step(inputs)
    inputs.copy_(new_inputs)
    graph.replay()

A block that can be a CUDA graph runs here, and no other: a host synchronisation, a shape that depends on values, an
operand on the host and a copy from it raise CaptureError. As on a real accelerator a capture executes nothing: memory
from before is left as it was, and what the block made holds no useful values before the first replay. A replay repeats
the operations with the numbers that Python had at the capture, so code that relies on others gives wrong results here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.simulated.device import active
from benchmarks.simulated.records import cause_of, record
from benchmarks.simulated.stream import STREAM, CaptureError


class Graph:
    """A captured block."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.made: dict[int, Any] = {}  # storages made in the block, by identity
        self.saved: dict[int, tuple[Any, Any]] = {}  # other storages that it writes to, and their content before
        self.generators: dict[int, tuple[Any, Tensor]] = {}  # by address, and their states before

    def save(self, tensors: Sequence[Tensor]) -> None:
        """Keep the content of memory from before the capture that is about to be written to."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.made and storage._cdata not in self.saved:
                self.saved[storage._cdata] = storage, storage.clone()

    def save_state(self, generator: Any) -> None:
        self.generators.setdefault(generator._cdata, (generator, generator.get_state()))

    def add(self, step: Callable[[], None]) -> None:
        self.steps.append(step)

    def add_operation(
        self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor], new: Sequence[Tensor]
    ) -> None:
        """Add an operation that has been executed. new: those of its outputs that are no view of an input."""
        for output in new:
            storage = output.untyped_storage()
            if storage._cdata not in self.saved:
                self.made.setdefault(storage._cdata, storage)

        def step() -> None:
            results = [leaf for leaf in tree_leaves(op(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for output, result in zip(outputs, results, strict=True):
                if output is not result:
                    output.copy_(result)

        self.steps.append(step)

    def restore(self) -> None:
        """Undo the capture's execution."""
        for storage, content in self.saved.values():
            storage.copy_(content)
        for generator, state in self.generators.values():
            generator.set_state(state)
        for storage in self.made.values():
            # Every byte 0xff: not a number, -1, or true.
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)

    def replay(self) -> None:
        """Repeat the operations, which counts as one launch."""
        if STREAM.capture is not None:
            raise CaptureError(f"{cause_of('replay')}: a graph is replayed within the capture of another")
        record("launches", cause_of("replay"))
        with torch.inference_mode():  # which alone may write to tensors made in it
            for step in self.steps:
                step()


@contextmanager
def capture() -> Iterator[Graph]:
    """Yield the graph of this block."""
    if STREAM.capture is not None:
        raise CaptureError(f"{cause_of('capture')}: a capture within another")
    graph = Graph()
    with active():
        STREAM.capture = graph
        try:
            yield graph
        finally:
            STREAM.capture = None
            graph.restore()
