"""Reads whose shape never changes, so that a GPU can replay them as one graph. It knows trees and cache rows, no model.

A tree is padded to the next size there is, and attention sees every row of the cache's buffers, most of them masked.
On a CPU the same reads run eagerly, slower than exact ones and the proof that padding changes nothing; or compiled,
which a shape that never changes pays for once. On a GPU what is compiled is captured like all else.

A read that torch compiles once for every number of nodes. It knows the sizes of tensors, no model and no tree.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.decoding.kv_cache import ALLOCATION_STEP, KVCache, StaticCacheView
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import InputError, first_line

# (tokens_N, positions_N, mask_NM, cache) -> states_ND and logits_NV
ForwardFunction = Callable[[Tensor, Tensor, Tensor, StaticCacheView], tuple[Tensor, Tensor]]
StatesAndLogits = tuple[Tensor, Tensor]
CapturedOutputs = TypeVar("CapturedOutputs", bound=tuple[Tensor, ...])
PADDED_SIZES = (1, 8, 16, 32, 64, 128, 256)  # nodes; beyond the last, multiples of it


@dataclass(frozen=True)
class StaticInputs:
    """What a read of N nodes is told: words, their positions, the rows they are written to and those they see."""

    tokens_N: Tensor
    positions_N: Tensor
    rows_N: Tensor
    mask_NM: Tensor

    @classmethod
    def of(cls, tree: TokenTree, start: int, capacity: int, dtype: torch.dtype) -> Self:
        """The tree behind `start` rows, padded. A padding node sees itself alone: a node that sees nothing is NaN.

        start 2, capacity 6, a root and its child, size 3:     rows 0 1 root child - -
            root     x x x                                      child    x x x x
            padding          (row 4)  x
        """
        size = padded_size(len(tree))
        missing = size - len(tree)
        seen_NN = torch.block_diag(
            tree.ancestors_NN.long(), torch.eye(missing, dtype=torch.int64, device=tree.tokens_N.device)
        ).bool()
        allowed_NM = F.pad(seen_NN, (start, capacity - start - size))
        allowed_NM[: len(tree), :start] = True
        mask_NM = torch.zeros(size, capacity, dtype=dtype, device=seen_NN.device)
        mask_NM.masked_fill_(~allowed_NM, torch.finfo(dtype).min)
        rows_N = torch.arange(start, start + size, device=seen_NN.device)
        return cls(F.pad(tree.tokens_N, (0, missing)), F.pad(tree.depths_N, (0, missing)) + start, rows_N, mask_NM)

    def copy_(self, other: StaticInputs) -> None:
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name))

    def clone(self) -> StaticInputs:
        return StaticInputs(**{name: tensor.clone() for name, tensor in vars(self).items()})


class StaticShapeForward:
    """All graphs of one base, by size and capacity, and the one set of buffers that they were captured over.

    compiled: torch compiles a read of every size before it is run or captured.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        self.capture_error: str | None = None  # why nothing more is captured
        self._run: Callable[..., StatesAndLogits] = CompiledForward(run_forward) if compiled else run_forward
        self._buffers: dict[int, tuple[Any, Any]] = {}  # keys and values, by capacity
        self._users: dict[int, Any] = {}  # who holds them now, weakly
        self._graphs: dict[tuple[int, int], tuple[Any, StaticInputs, StatesAndLogits]] = {}

    @classmethod
    def of(cls, fixed: bool, compiled: bool) -> StaticShapeForward | None:
        """What the values base.fixed and base.compiled ask for; None: reads of exact shapes."""
        if compiled and not fixed:
            raise InputError(
                "base.compiled=true without base.fixed=true would compile anew for nearly every tree and text; add "
                "base.fixed=true"
            )
        return cls(compiled) if fixed else None

    def __deepcopy__(self, memo: dict) -> StaticShapeForward:
        return StaticShapeForward()  # graphs and code belong to the weights, and their type, that they were made for

    def new_cache(self, layers: int, capacity: int) -> KVCache:
        """A cache over the buffers of its capacity; where another text still holds them, one of its own, which is
        read eagerly."""
        cache = KVCache(layers, capacity + PADDED_SIZES[-1], zeroed=True)
        if self._users.get(cache.capacity, lambda: None)() is None:
            cache.use_buffers(self._buffers.get(cache.capacity))
            self._users[cache.capacity] = weakref.ref(cache)
        return cache

    def __call__(
        self, forward: ForwardFunction, tree: TokenTree, cache: KVCache, dtype: torch.dtype
    ) -> StatesAndLogits:
        """States and logits of the tree's own nodes; its rows are appended to the cache."""
        start, nodes = cache.length, len(tree)
        cache.reserve(start + padded_size(nodes))
        inputs = StaticInputs.of(tree, start, cache.capacity, dtype)
        if tree.tokens_N.is_cuda and self._owns_buffers(cache) and self.capture_error is None:
            states_ND, logits_NV = self._replay(forward, inputs, cache)
        else:
            states_ND, logits_NV = self._run(forward, inputs, cache.static_view(inputs.rows_N))
        cache.crop(start + nodes)
        return states_ND[:nodes], logits_NV[:nodes]

    def _owns_buffers(self, cache: KVCache) -> bool:
        """Whether this cache's rows lie where graphs expect them."""
        user = self._users.get(cache.capacity)
        if user is None or user() is not cache:
            return False
        self._buffers.setdefault(cache.capacity, cache.buffers)
        return self._buffers[cache.capacity][0] is cache.buffers[0]

    def _replay(self, forward: ForwardFunction, inputs: StaticInputs, cache: KVCache) -> StatesAndLogits:
        """The graph of this shape, captured when it is first asked for. What it gives out is overwritten by the next
        read of its shape; the loop has indexed what it keeps by then."""
        key = (len(inputs.tokens_N), cache.capacity)
        if key not in self._graphs:
            static_inputs = inputs.clone()
            try:
                graph, out = capture_cuda_graph(
                    lambda: self._run(forward, static_inputs, cache.static_view(static_inputs.rows_N))
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # a base that asks the host something while it reads
                self.capture_error = first_line(error)
                return self._run(forward, inputs, cache.static_view(inputs.rows_N))
            self._graphs[key] = graph, static_inputs, out
        graph, static_inputs, out = self._graphs[key]
        static_inputs.copy_(inputs)
        graph.replay()
        return out


def run_forward(forward: ForwardFunction, inputs: StaticInputs, cache: StaticCacheView) -> StatesAndLogits:
    return forward(inputs.tokens_N, inputs.positions_N, inputs.mask_NM, cache)


def capture_cuda_graph(run: Callable[[], CapturedOutputs]) -> tuple[Any, CapturedOutputs]:
    """A CUDA graph of `run` and the tensors it fills, after the calls that kernels need before they can be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def padded_size(nodes: int) -> int:
    """3 -> 8, 64 -> 64, 300 -> 512"""
    return next((size for size in PADDED_SIZES if size >= nodes), -(-nodes // ALLOCATION_STEP) * ALLOCATION_STEP)


def padded_sizes_up_to(nodes: int) -> list[int]:
    """All sizes that trees of so many nodes, or fewer, are padded to:   12 -> 1 8 16"""
    return sorted({padded_size(fewer) for fewer in range(1, nodes + 1)})


RECOMPILE_LIMIT = 1024  # sizes and bases that one process may meet; torch gives up at eight


class CompiledForward:
    """`run` as one piece of compiled code for every number of nodes. How many rows the cache's buffers have stays
    open: attention is a kernel that takes any number, and half a minute of compiling buys nothing there."""

    def __init__(self, run: Callable[[ForwardFunction, StaticInputs, StaticCacheView], tuple[Tensor, Tensor]]) -> None:
        self._run: Any = torch.compile(run, dynamic=False, fullgraph=True)
        self._sizes: set[int] = set()

    def __call__(self, forward: ForwardFunction, inputs: StaticInputs, cache: StaticCacheView) -> tuple[Tensor, Tensor]:
        size = len(inputs.tokens_N)
        if size in self._sizes:
            return self._run(forward, inputs, cache)
        outputs = self._compile(forward, inputs, cache)
        self._sizes.add(size)
        return outputs

    def _compile(self, forward: ForwardFunction, inputs: StaticInputs, cache: StaticCacheView) -> tuple[Tensor, Tensor]:
        """Compile this size and read. InputError where that is impossible: a read that would quietly be an eager one
        were a figure under a wrong name."""
        torch._dynamo.maybe_mark_dynamic(inputs.mask_NM, 1)
        for buffer in (buffer for layer in cache.layer_buffers for buffer in layer):
            torch._dynamo.maybe_mark_dynamic(buffer, 2)
        try:
            # What torch has to say of itself while it compiles is nothing that a user could mend.
            with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                warnings.simplefilter("ignore")
                return self._run(forward, inputs, cache)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise InputError(
                f"base.compiled=true: this base cannot be compiled here ({first_line(error)}); it takes a C++ "
                "compiler, on a GPU also triton, and a model without turns that depend on its values; install what "
                "is missing, or leave base.compiled=false"
            ) from error
