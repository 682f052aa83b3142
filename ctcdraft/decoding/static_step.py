"""The decoding step as a fixed sequence of device operations, which a CUDA graph can replay.

    draft    the drafter's tree of fixed size, from tensors that the step before has written
    read     one forward pass over it, behind a number of rows that the device alone knows
    commit   verification, cache update, and what the next draft reads; one report for the host

Nothing in a step waits for the device. The host reads the report of a step while the next one runs (static_loop.py).
On a CPU the same operations run one by one, as a proof that they compute what exact shapes compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Drafter, prefill, refuse_over_budget
from ctcdraft.decoding.sampling import GumbelNoise, unwarped_log_probs
from ctcdraft.decoding.settings import DecodingSettings, LogitsProcessor
from ctcdraft.decoding.static_cache import StaticCache
from ctcdraft.decoding.static_graphs import Graphs, Restore, on_device, saved_tensors
from ctcdraft.decoding.static_prompt import PromptMemory, padded_size
from ctcdraft.decoding.step_operations import COUNTS, commit_matches
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import sample_base_tokens
from ctcdraft.errors import InputError

ROW_STEP = 256  # attention sees a multiple of so many rows, so that few graphs serve a growing text
Watch = Callable[[str, Callable[[], Any]], Any]  # called with a part's name and its function


@dataclass(frozen=True)
class StaticContext:
    """All inputs of a draft, like loop.Context; of the new tokens and hidden states count_1 are real."""

    root_1: Tensor
    new_tokens_K: Tensor  # committed since the last draft, the root being the newest
    new_states_KD: Tensor  # of the tokens before them
    count_1: Tensor | None  # None: all, in the first draft behind a prompt that is not padded
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

    def reading_all(self) -> Self:
        """Return the first context of a text for a drafter that reads the text itself: all its tokens are new."""
        assert self.tokens_L is not None
        count_1 = None if self.count_1 is None else self.count_1 + 1
        last_1 = self.last_1 if self.count_1 is None else self.count_1
        return replace(self, new_tokens_K=self.tokens_L, count_1=count_1, last_1=last_1)


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
        self.keeps_states = getattr(drafter, "uses_hidden_states", True)
        numbers = {"dtype": torch.int64, "device": self.device}
        self.root_1, self.count_1, self.last_1, self.key_1 = (torch.zeros(1, **numbers) for _ in range(4))
        self.new_tokens_P = torch.zeros(longest, **numbers)
        self.new_states_PD: Any = None  # allocated with the first text, of the width and dtype of its states
        self.report_R = torch.zeros(COUNTS + longest, **numbers)
        self.noise = GumbelNoise(0, self.key_1) if settings.temperature > 0 else None
        self.root_alone = TokenTree.only_root(self.root_1)
        self.memory: Any = None
        self.drafted: Any = None  # the tree; this and what the base computes for it link the parts of a step
        self.output: Any = None
        self.draft_caches: list[tuple[StaticCache, int]] = []  # with their rows beyond the text
        self.caches_in_use = 0  # by this text
        self.prompt = PromptMemory(self.device)
        self.graphs = Graphs(self.device)
        self.memories: dict[Any, Any] = {}  # what drafts of captured steps were given and return, which graphs read
        self.prepared: set[tuple[int, int | None]] = set()  # rows and prompt sizes for which all graphs are there

    def rows_behind(self, length: int) -> int:
        """Return the rows that attention sees in the step after the one whose text has `length` rows."""
        # The tokens of the step whose outcome is not known yet, and the next tree.
        return seen_rows(length + self.longest + self.settings.nodes)

    def start(self, prompt_L: Tensor, seed: int, padded: bool = True) -> tuple[int, StaticContext]:
        """Read a prompt, padded if it is short; return the response's first token and the first draft's context."""
        self.key_1.fill_(GumbelNoise.key_of(seed))
        for cache, _ in [(self.cache, 0), *self.draft_caches]:
            cache.restart()
        self.memory, self.caches_in_use = None, 0
        if (size := padded_size(len(prompt_L)) if padded else None) is None:
            return self.start_in_exact_shapes(prompt_L)
        self.prompt.write(prompt_L)
        self.see_rows(seen_rows(size))
        with on_device(self.device):
            self.graphs.call_of(("prompt", self.cache.visible, size), lambda: self.read_prompt(size), self.keep)()
        return int(self.root_1), replace(self.context(), **self.prompt.first_draft(size))

    def start_in_exact_shapes(self, prompt_L: Tensor) -> tuple[int, StaticContext]:
        self.see_rows(self.cache.capacity)
        first = prefill(self.base, self.cache.exact, prompt_L, self.settings, self.noise)
        self.cache.adopt_prompt()
        tokens_L, states_KD = first.tokens_L, first.new_states_KD
        self.allocate_states(states_KD)
        self.root_1.copy_(tokens_L[-1:])
        return int(tokens_L[-1]), replace(
            self.context(), new_tokens_K=tokens_L[1:], new_states_KD=states_KD, count_1=None, tokens_L=tokens_L
        )

    def read_prompt(self, size: int) -> None:
        """Read the padded prompt, and sample the first token of the response, like loop.prefill."""
        logits_1V = self.settings.process_logits(self.prompt.read(self.base, size, self.cache))
        self.allocate_states(self.prompt.states_SD)
        self.root_1.copy_(sample_base_tokens(logits_1V, self.noise, self.prompt.last_1, self.root_alone))
        self.prompt.append(self.root_1)

    def allocate_states(self, states_KD: Tensor) -> None:
        """Allocate the hidden states that steps write, of the width and dtype of these."""
        if self.new_states_PD is None:
            self.new_states_PD = states_KD.new_zeros(len(self.new_tokens_P), states_KD.shape[1])

    def context(self) -> StaticContext:
        """Return the context in the memory that steps write to."""
        new = self.root_1, self.new_tokens_P, self.new_states_PD, self.count_1, self.last_1
        return StaticContext(*new, self.settings.nodes, self.draft_cache, self.settings.process_draft_logits)

    def draft_cache(self, layers: int, rows: int, positions: int | None = None) -> StaticCache:
        """Return an empty cache for a drafter's memory: in every text the same ones, in the order of the calls.

        positions: position ids of the drafter; None: those of the base.
        """
        if self.caches_in_use == len(self.draft_caches):
            capacity = self.cache.capacity + rows
            cache = StaticCache(layers, capacity, positions or self.base.context_length, self.device)
            # Fast kernels copy a mask into one whose rows are a multiple of 16 where they are not.
            self.draft_caches.append((cache, -(-rows // 16) * 16))
            self.see_rows(self.cache.visible)
        self.caches_in_use += 1
        return self.draft_caches[self.caches_in_use - 1][0]

    def rewind(self) -> None:
        """Let all texts have one row, so that any step has room; what follows is no sensible text."""
        for cache, _ in [(self.cache, 0), *self.draft_caches]:
            cache.length_1.fill_(1)

    def run(self, rows: int, first: StaticContext | None = None, watch: Watch | None = None) -> None:
        """Queue one step whose attention sees `rows` rows.

        first: the context of a text's first draft; behind a prompt that is not padded that step is eager.
        watch: called with every part and its function, to time the parts; None: the step is one graph.
        """
        self.see_rows(rows)
        steps = {"draft": lambda: self.draft(first or self.context()), "read": self.read, "commit": self.commit}
        parts = steps if watch else {"step": lambda: [step() for step in steps.values()]}
        eager, size = first is not None and first.count_1 is None, 0 if first is None else len(first.new_tokens_K)
        with on_device(self.device):
            for part, function in parts.items():
                key, before = (part, self.cache.visible, size), self.memory
                call = function if eager else self.graphs.call_of(key, function, self.keep)
                if watch is None:
                    call()
                else:
                    watch(part, call)
                if key in self.graphs.graphs and not eager:
                    _, self.memory = self.memories.setdefault(key, (before, self.memory))

    def keep(self) -> Restore:
        """Save what a captured function changes; return a function that restores it."""
        state = self.root_1, self.count_1, self.last_1, self.new_tokens_P, self.new_states_PD, self.report_R
        lengths = [cache.length_1 for cache, _ in [(self.cache, 0), *self.draft_caches]]
        restore_tensors = saved_tensors([tensor for tensor in (*state, *lengths) if tensor is not None])
        # A commit by itself moves rows, which a second one would move again.
        restore_rows = self.cache.saved_rows(self.settings.nodes)
        python, known = (self.memory, self.caches_in_use), len(self.draft_caches)

        def restore() -> None:
            restore_tensors()
            restore_rows()
            self.memory, self.caches_in_use = python
            for cache, _ in self.draft_caches[known:]:
                cache.restart()

        return restore

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


def seen_rows(rows: int) -> int:
    """Return the rows that attention sees for at least so many in use.   100 -> 256, 1,100 -> 1,280, 5,000 -> 5,120"""
    step = max(ROW_STEP, 1 << max(rows.bit_length() - 3, 0))
    return -(-rows // step) * step
