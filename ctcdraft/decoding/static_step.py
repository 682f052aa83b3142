"""The decoding step as a fixed sequence of device operations, which a CUDA graph can replay.

    draft    the drafter's tree of fixed size, from tensors that the step before has written
    read     one forward pass over it, behind a number of rows that the device alone knows
    commit   verification, cache update, and what the next draft reads; one report for the host

Nothing in a step waits for the device. The host reads the report of a step while the next one runs (static_loop.py).
On a CPU the same operations run one by one, as a proof that they compute what exact shapes compute.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Drafter, prefill, refuse_over_budget
from ctcdraft.decoding.sampling import GumbelNoise, unwarped_log_probs
from ctcdraft.decoding.settings import DecodingSettings, LogitsProcessor
from ctcdraft.decoding.static_cache import StaticCache
from ctcdraft.decoding.step_operations import COUNTS, commit_matches
from ctcdraft.decoding.verification import sample_base_tokens
from ctcdraft.errors import InputError, first_line

ROW_STEP = 256  # attention sees a multiple of so many rows, so that few graphs serve a growing text
Watch = Callable[[str, Callable[[], Any]], Any]  # called with a part's name and its function


@dataclass(frozen=True)
class StaticContext:
    """All inputs of a draft, like loop.Context; of the new tokens and hidden states count_1 are real."""

    root_1: Tensor
    new_tokens_K: Tensor  # committed since the last draft, the root being the newest
    new_states_KD: Tensor  # of the tokens before them
    count_1: Tensor | None  # None: all, in the first draft of a text
    last_1: Tensor  # count_1 - 1
    nodes: int
    new_cache: Callable[..., StaticCache]  # (layers, rows beyond the text, position ids of the drafter)
    logits_processor: LogitsProcessor = unwarped_log_probs
    min_path_prob: float = 0.0
    tokens_L: Tensor | None = None  # the whole text, in its first draft
    padded = True

    @property
    def root(self) -> Tensor:
        return self.root_1[0]

    @property
    def depth(self) -> int:
        return self.nodes - 1

    def newest(self, x_BKX: Tensor) -> Tensor:
        """Return the row of the newest token, [B, 1, X]."""
        return x_BKX[:, -1:] if self.count_1 is None else x_BKX.index_select(1, self.last_1)


class StaticDecoder:
    """One drafter's steps on one base, in memory that stays in place from text to text.

    Args:
        cache: of the base; decoders may share it, as there is one text at a time.
    """

    def __init__(self, base: Any, drafter: Drafter, settings: DecodingSettings, cache: StaticCache) -> None:
        self.base, self.settings, self.cache = base, settings, cache
        self.drafter: Any = drafter
        self.device = base.device
        self.longest = longest = min(settings.nodes, getattr(drafter, "frames", 0) + 1)  # tokens that a step commits
        self.capture_error: str | None = None  # set when a capture failed; from then on all steps are eager
        self.keeps_states = getattr(drafter, "uses_hidden_states", True)
        numbers = {"dtype": torch.int64, "device": self.device}
        self.root_1, self.count_1, self.last_1, self.key_1 = (torch.zeros(1, **numbers) for _ in range(4))
        self.new_tokens_P = torch.zeros(longest, **numbers)
        self.new_states_PD: Any = None  # allocated with the first text, of the width and dtype of its states
        self.report_R = torch.zeros(COUNTS + longest, **numbers)
        self.noise = GumbelNoise(0, self.key_1) if settings.temperature > 0 else None
        self.memory: Any = None
        self.drafted: Any = None  # the tree; this and what the base computes for it link the parts of a step
        self.output: Any = None
        self.draft_caches: list[tuple[StaticCache, int]] = []  # with their rows beyond the text
        self.captured_memories: list[Any] = []  # held, because graphs read tensors that a drafter made in another text
        self.graphs: dict[tuple[str, int], Any] = {}  # by part, and by the rows that attention sees
        self.prepared: set[int] = set()  # rows for which all graphs are there

    def rows_behind(self, length: int) -> int:
        """Return the rows that attention sees in the step after the one whose text has `length` rows."""
        # The tokens of the step whose outcome is not known yet, and the next tree.
        return seen_rows(length + self.longest + self.settings.nodes)

    def start(self, prompt_L: Tensor, seed: int) -> tuple[int, StaticContext]:
        """Read a prompt; return the first token of the response, and the context of the first draft."""
        self.key_1.fill_(GumbelNoise.key_of(seed))
        for cache, _ in [(self.cache, 0), *self.draft_caches]:
            cache.restart()
            cache.visible = cache.capacity
        first = prefill(self.base, self.cache.exact, prompt_L, self.settings, self.noise)
        self.cache.adopt_prompt()
        self.memory, self._next_cache = None, 0
        tokens_L, states_KD = first.tokens_L, first.new_states_KD
        if self.new_states_PD is None:
            self.new_states_PD = states_KD.new_zeros(len(self.new_tokens_P), states_KD.shape[1])
        self.root_1.copy_(tokens_L[-1:])
        return int(tokens_L[-1]), replace(
            self.context(), new_tokens_K=tokens_L[1:], new_states_KD=states_KD, count_1=None, tokens_L=tokens_L
        )

    def context(self) -> StaticContext:
        """Return the context in the memory that steps write to."""
        new = self.root_1, self.new_tokens_P, self.new_states_PD, self.count_1, self.last_1
        return StaticContext(*new, self.settings.nodes, self.draft_cache, self.settings.process_draft_logits)

    def draft_cache(self, layers: int, rows: int, positions: int | None = None) -> StaticCache:
        """Return an empty cache for a drafter's memory: in every text the same ones, in the order of the calls.

        positions: position ids of the drafter; None: those of the base.
        """
        if self._next_cache == len(self.draft_caches):
            capacity = self.cache.capacity + rows
            cache = StaticCache(layers, capacity, positions or self.base.context_length, self.device)
            # Fast kernels copy a mask into one whose rows are a multiple of 16 where they are not.
            self.draft_caches.append((cache, -(-rows // 16) * 16))
        self._next_cache += 1
        return self.draft_caches[self._next_cache - 1][0]

    def run(self, rows: int, first: StaticContext | None = None, watch: Watch | None = None) -> None:
        """Queue one step whose attention sees `rows` rows.

        first: the context of a text's first draft, whose shapes are the prompt's: that step is eager.
        watch: called with every part and its function, to time the parts; None: the step is one graph.
        """
        self.see_rows(rows)
        steps = {"draft": lambda: self.draft(first or self.context()), "read": self.read, "commit": self.commit}
        eager = first is not None or self.capture_error is not None or not can_capture(self.device)
        parts = steps if watch else {"step": lambda: [step() for step in steps.values()]}
        with on_device(self.device):
            for part, function in parts.items():
                replay = function if eager else self.replay_of((part, self.cache.visible), function)
                if watch is None:
                    replay()
                else:
                    watch(part, replay)

    def see_rows(self, rows: int) -> None:
        """Let attention see so many rows."""
        self.cache.visible = min(rows, self.cache.capacity)
        for cache, extra in self.draft_caches:
            cache.visible = min(rows + extra, cache.capacity)

    def draft(self, context: StaticContext) -> None:
        # None: drafters that sample their tokens have no fixed shapes.
        self.drafted, self.memory = self.drafter.draft(context, self.memory, None)
        # Computed here, not when they are first asked for: where parts are captured one by one, the graph of another
        # part would read memory that belongs to the tree of the text in which it was captured.
        self.drafted.depths_N, self.drafted.ancestors_NN  # noqa: B018
        # Here, as kernels write behind their buffers without complaint. Both numbers are on the host.
        refuse_over_budget(self.drafter, self.settings.nodes, "nodes", len(self.drafted))
        if self.drafted.height >= self.longest:
            raise InputError(
                f"{type(self.drafter).__name__} drafted a tree of depth {self.drafted.height} where steps of fixed "
                f"shapes have room for {self.longest - 1}; its attribute `frames` must be the depth of its deepest tree"
            )

    def read(self) -> None:
        self.output = self.base.read_tree(self.drafted, self.cache)

    def commit(self) -> None:
        """Verify by `match`, the only verifier of fixed shapes."""
        tree, output = self.drafted, self.output
        logits_NV = self.settings.process_logits(output.logits_NV)
        base_tokens_N = sample_base_tokens(logits_NV, self.noise, self.cache.length_1, tree)
        arrays = tree.tokens_N, tree.parents_N, tree.depths_N, tree.ancestors_NN, base_tokens_N
        written = self.root_1, self.new_tokens_P, self.count_1, self.last_1, self.report_R, self.cache.length_1
        path_K, *rows = commit_matches(*arrays, *written, tree.height)
        if tree.height:
            self.cache.move_rows(*rows)
        if self.keeps_states:
            torch.index_select(output.states_ND, 0, path_K, out=self.new_states_PD[: len(path_K)])

    def replay_of(self, key: tuple[str, int], function: Callable[[], Any]) -> Callable[[], Any]:
        """Return the replay of a captured graph, after capturing it on first use; the function if that fails."""
        if key not in self.graphs:
            try:
                self.graphs[key] = self.capture(function)
            except (torch.OutOfMemoryError, InputError):
                raise
            # A base or drafter that synchronises with the host cannot be captured; and Triton has errors of its own.
            except Exception as error:
                self.capture_error = first_line(error)
                return function
        return self.graphs[key].replay

    def capture(self, function: Callable[[], Any]) -> Any:
        """Return a CUDA graph of a part, after the warm-up calls that kernels need; leave the state as it is."""
        state = [self.root_1, self.count_1, self.last_1, self.new_tokens_P, self.new_states_PD, self.report_R]
        state += [cache.length_1 for cache, _ in [(self.cache, 0), *self.draft_caches]]
        self.captured_memories.append(self.memory)
        saved = [tensor.clone() for tensor in state if tensor is not None]

        def restore() -> None:
            for tensor, value in zip((one for one in state if one is not None), saved, strict=True):
                tensor.copy_(value)

        for _ in range(2):
            function()
            restore()
        return capture_graph(function)


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


def seen_rows(rows: int) -> int:
    """Return the rows that attention sees for at least so many in use.   100 -> 256, 1,100 -> 1,280, 5,000 -> 5,120"""
    step = max(ROW_STEP, 1 << max(rows.bit_length() - 3, 0))
    return -(-rows // step) * step
