"""Tree reads of static shape: padded trees and whole cache buffers, so that a GPU can replay a read as one CUDA graph.

A tree is padded to the next of a few sizes, and attention sees every row of the cache's buffers, most of them masked.
On a CPU the same reads run eagerly, slower than exact ones, as a proof that padding changes nothing. Either may be
compiled by torch first.
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

# (tokens_N, position_ids_N, mask_NM, cache) -> hidden states_ND and logits_NV
ForwardFunction = Callable[[Tensor, Tensor, Tensor, StaticCacheView], tuple[Tensor, Tensor]]
StatesAndLogits = tuple[Tensor, Tensor]
CapturedOutputs = TypeVar("CapturedOutputs", bound=tuple[Tensor, ...])
PADDED_SIZES = (1, 8, 16, 32, 64, 128, 256)  # nodes; beyond the last, multiples of ALLOCATION_STEP
RECOMPILE_LIMIT = 1024  # sizes and bases that one process may compile; torch's default is 8


@dataclass(frozen=True)
class StaticInputs:
    """The inputs of a forward pass over N nodes."""

    tokens_N: Tensor
    positions_N: Tensor
    rows_N: Tensor  # of the cache, to write
    mask_NM: Tensor  # additive

    @classmethod
    def of(cls, tree: TokenTree, start: int, capacity: int, dtype: torch.dtype) -> Self:
        """Return the padded inputs of a tree behind `start` rows of a cache with `capacity` rows.

        start 2, capacity 6, a root and its child, size 3:     rows 0 1 root child - -
            root     x x x                                      child    x x x x
            padding          (row 4)  x
        """
        size = padded_size(len(tree))
        missing = size - len(tree)
        # A padding node sees itself alone, because a softmax over nothing is NaN.
        padding_NN = torch.eye(missing, dtype=torch.int64, device=tree.tokens_N.device)
        seen_NN = torch.block_diag(tree.ancestors_NN.long(), padding_NN).bool()
        allowed_NM = F.pad(seen_NN, (start, capacity - start - size))
        allowed_NM[: len(tree), :start] = True
        mask_NM = torch.zeros(size, capacity, dtype=dtype, device=seen_NN.device)
        mask_NM.masked_fill_(~allowed_NM, torch.finfo(dtype).min)
        rows_N = torch.arange(start, start + size, device=seen_NN.device)
        return cls(F.pad(tree.tokens_N, (0, missing)), F.pad(tree.depths_N, (0, missing)) + start, rows_N, mask_NM)


class StaticShapeForward:
    """The CUDA graphs of one base, by size and capacity, and the cache buffers that they were captured with."""

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled  # by torch, once per size, before it is run or captured
        self.capture_error: str | None = None  # set when a capture failed; from then on all reads are eager
        self._run: Callable[..., StatesAndLogits] = CompiledForward(run_forward) if compiled else run_forward
        self._buffers: dict[int, tuple[Any, Any]] = {}  # keys and values, by capacity
        self._users: dict[int, Any] = {}  # weak references to the caches that use them now, by capacity
        self._graphs: dict[tuple[int, int], tuple[Any, StaticInputs, StatesAndLogits]] = {}

    @classmethod
    def of(cls, static_shapes: bool, compiled: bool) -> StaticShapeForward | None:
        """Return what the settings base.static_shapes and base.compiled ask for; None for reads of exact shapes."""
        if compiled and not static_shapes:
            raise InputError(
                "base.compiled=true without base.static_shapes=true would compile anew for nearly every tree and text; "
                "add base.static_shapes=true"
            )
        return cls(compiled) if static_shapes else None

    def __deepcopy__(self, memo: dict) -> StaticShapeForward:
        return StaticShapeForward()  # graphs and compiled code belong to the weights they were made for

    def new_cache(self, layers: int, capacity: int) -> KVCache:
        """Return a cache that uses the shared buffers of its capacity; its own ones while another cache uses these."""
        # Rows for the padding of a large tree too: buffers that grow need new graphs.
        cache = KVCache(layers, capacity + PADDED_SIZES[-1], zeroed=True)
        if self._users.get(cache.capacity, lambda: None)() is None:
            if cache.capacity in self._buffers:
                cache.use_buffers(*self._buffers[cache.capacity])
            self._users[cache.capacity] = weakref.ref(cache)
        return cache

    def __call__(
        self, forward: ForwardFunction, tree: TokenTree, cache: KVCache, dtype: torch.dtype
    ) -> StatesAndLogits:
        """Return hidden states and logits of the tree's nodes without the padding; append its rows to the cache."""
        start, nodes = cache.length, len(tree)
        if start + padded_size(nodes) > cache.capacity:
            cache.reserve(start + padded_size(nodes), *cache.layer_buffers[0])
        inputs = StaticInputs.of(tree, start, cache.capacity, dtype)
        # A cache with buffers of its own is read eagerly: no graph was captured with them.
        replays = tree.tokens_N.is_cuda and self._owns_buffers(cache) and self.capture_error is None
        states_ND, logits_NV = (self._replay if replays else self._read)(forward, inputs, cache)
        cache.crop(start + nodes)  # the padding's rows are overwritten by the next tree
        return states_ND[:nodes], logits_NV[:nodes]

    def _read(self, forward: ForwardFunction, inputs: StaticInputs, cache: KVCache) -> StatesAndLogits:
        return self._run(forward, inputs, StaticCacheView(cache.layer_buffers, inputs.rows_N))

    def _owns_buffers(self, cache: KVCache) -> bool:
        """Return whether this cache uses the buffers that graphs were captured with."""
        user = self._users.get(cache.capacity)
        if user is None or user() is not cache:
            return False
        self._buffers.setdefault(cache.capacity, cache.buffers)
        return self._buffers[cache.capacity][0] is cache.buffers[0]

    def _replay(self, forward: ForwardFunction, inputs: StaticInputs, cache: KVCache) -> StatesAndLogits:
        """Replay the graph of this shape, after capturing it on first use."""
        key = (len(inputs.tokens_N), cache.capacity)
        if key not in self._graphs:
            static_inputs = StaticInputs(**{name: tensor.clone() for name, tensor in vars(inputs).items()})
            try:
                graph, out = capture_cuda_graph(lambda: self._read(forward, static_inputs, cache))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # a base that synchronises with the host cannot be captured
                self.capture_error = first_line(error)
                return self._read(forward, inputs, cache)
            self._graphs[key] = graph, static_inputs, out
        graph, static_inputs, out = self._graphs[key]
        for name, tensor in vars(static_inputs).items():
            tensor.copy_(getattr(inputs, name))
        graph.replay()
        return out  # overwritten by the next replay of this shape; by then the loop has copied what it keeps


def run_forward(forward: ForwardFunction, inputs: StaticInputs, cache: StaticCacheView) -> StatesAndLogits:
    return forward(inputs.tokens_N, inputs.positions_N, inputs.mask_NM, cache)


def capture_cuda_graph(run: Callable[[], CapturedOutputs]) -> tuple[Any, CapturedOutputs]:
    """Return a CUDA graph of `run` and the tensors it fills, after the warm-up calls that kernels need."""
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
    """Return all sizes that trees of at most so many nodes are padded to:   12 -> 1 8 16"""
    return sorted({padded_size(fewer) for fewer in range(1, nodes + 1)})


class CompiledForward:
    """A forward pass compiled once per number of nodes, for cache buffers of any capacity."""

    def __init__(self, run: Callable[[ForwardFunction, StaticInputs, StaticCacheView], StatesAndLogits]) -> None:
        self._run: Any = torch.compile(run, dynamic=False, fullgraph=True)
        self._sizes: set[int] = set()

    def __call__(self, forward: ForwardFunction, inputs: StaticInputs, cache: StaticCacheView) -> StatesAndLogits:
        """Run; compile first if the size is new. Raises InputError where that is impossible."""
        size = len(inputs.tokens_N)
        if size in self._sizes:
            return self._run(forward, inputs, cache)
        # The capacity stays dynamic: attention runs in a kernel that takes any number of rows, and half a minute of
        # compiling per capacity would gain nothing.
        torch._dynamo.maybe_mark_dynamic(inputs.mask_NM, 1)
        for buffer in (buffer for layer in cache.layer_buffers for buffer in layer):
            torch._dynamo.maybe_mark_dynamic(buffer, 2)
        try:
            # Warnings of the compiler concern torch itself; a user can do nothing about them.
            with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                warnings.simplefilter("ignore")
                outputs = self._run(forward, inputs, cache)
        # No fallback to eager code: it would be measured under a wrong name.
        except torch._dynamo.exc.TorchDynamoException as error:
            raise InputError(
                f"base.compiled=true: this base cannot be compiled here ({first_line(error)}); compiling needs a C++ "
                "compiler, on a GPU also triton, and a model without control flow that depends on values; install "
                "what is missing, or set base.compiled=false"
            ) from error
        self._sizes.add(size)
        return outputs
