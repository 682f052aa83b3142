"""The proposer that vLLM constructs for `custom_class`: drafts of the most probable chains, of adaptive length.

vLLM calls it once per step with the tokens of all requests on the host. It returns empty lists and fills them in
`complete`, which runs when vLLM takes the drafts: by then the step's tokens have been handed over to be sent. Indices
go to the device and the chains come back in one transfer each; the lengths are then chosen on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctcdraft.errors import InputError
from ctcdraft.serving import configuration, vllm_runner
from ctcdraft.serving.batch_drafter import BatchDrafter, DraftBatch
from ctcdraft.serving.lengths import DraftLengths
from ctcdraft.serving.served_head import load_served_head


@dataclass(frozen=True)
class Step:
    """What is known of the step whose tokens were just sampled."""

    ids: Sequence[str]  # of the requests, in the order of the batch
    starts: Sequence[int]  # of every request among the tokens of the step, and the number of tokens
    drafted: Sequence[int]  # draft tokens of every request
    table_QM: Tensor  # ids of the blocks of every request
    limits: Sequence[int]  # tokens of prompt and answer with which every request ends
    stops: Sequence[Collection[int]]  # tokens at which it ends

    def is_decoding(self) -> bool:
        """Return whether no request prefills more than one token of its prompt."""
        sizes = zip(self.starts[:-1], self.starts[1:], self.drafted, strict=True)
        return all(end - start == 1 + drafted for start, end, drafted in sizes)

    def kept_rows(self, sampled: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the rows of every request's tokens in the forward pass, without those of rejected draft tokens.

        The last one is the anchor of the next draft: the token before the root.
        """
        ends = zip(self.starts[1:], self.drafted, sampled, strict=True)
        kept = [end - (drafted + 1 - len(tokens) if drafted else 0) for end, drafted, tokens in ends]
        return list(map(np.arange, self.starts[:-1], kept))

    def committed(self, i: int, tokens: Sequence[int], length: int) -> tuple[int, bool]:
        """Return how many of a request's sampled tokens stay, and whether it goes on after them.

        Args:
            length: of its text, with all of them.
        """
        for count, token in enumerate(tokens, 1):
            if token in self.stops[i] or length - len(tokens) + count >= self.limits[i]:
                return count, False
        return len(tokens), True


@dataclass
class DueDraft:
    """What `propose` leaves to `complete`."""

    step: Step
    asked: list[int]  # requests, by their place in the batch
    kept: list[np.ndarray]  # rows of every request in the forward pass, without those of rejected draft tokens
    roots: list[int]  # of the requests `asked`
    lengths: np.ndarray  # tokens of every request
    rooms_Q: np.ndarray  # greatest lengths of the drafts
    drafts: list[list[int]]


@dataclass
class LastStep:
    """The step before, for timing."""

    ended: float  # the time at which its tokens were known
    ids: frozenset[str]
    requests: int = 0  # of those, how many went on
    paused: float = 0.0  # seconds since then that belong to no step: states of steps without drafts were stored
    draft: float | None = None  # seconds of its draft; None: nothing was drafted


class CTCProposer:
    """Serves the head at additional_config["ctcdraft"]["head"]; see docs/serving.md."""

    def __init__(self, vllm_config: Any) -> None:
        self.options = configuration.read_options(vllm_config)
        configuration.refuse_unserved(vllm_config)
        vllm_runner.install_hooks()
        self.vllm_config = vllm_config
        self.depth = vllm_config.speculative_config.num_speculative_tokens
        self.step: Step | None = None
        self.due: DueDraft | None = None
        self.last = LastStep(0.0, frozenset())

    def load_model(self, target: Any) -> None:
        """Load the head on the target's embedding and lm_head, and ask vLLM for the memory of its keys and values."""
        folder, values = Path(self.options.head), self.options.values
        model = self.vllm_config.model_config
        try:
            weights = target.model.embed_tokens.weight, target.lm_head.weight
        except AttributeError as error:
            name = type(target).__name__
            raise InputError(
                f"vLLM's {name} has no embed_tokens and lm_head for the head to share ({error})"
            ) from error
        head = load_served_head(folder, values, model.model, model.revision, configuration.warn, *weights)
        self.aux_layers = tuple(sorted(layer for layer in values["fingerprint"]["taps"] if layer != "last"))
        self.drafter = BatchDrafter(head)
        self.drafter.warm_up(self.depth)
        self.lengths = DraftLengths(head.acceptance, self.options.adaptive)
        shape = head.drafter.body.shape if head.blocks else None
        self.cache_layers = vllm_runner.add_cache_layers(self.vllm_config, head.blocks, shape)

    @torch.inference_mode()
    def record(self, layers: Sequence[Tensor], positions_L: Tensor, slots: dict[str, Tensor]) -> None:
        """Take the hidden states of a forward pass of the target."""
        if not self.drafter.caches and self.cache_layers:
            self.drafter.bind([layer.kv_cache for layer in self.cache_layers])
        name = self.cache_layers[0].layer_name if self.cache_layers else next(iter(slots))
        slots_L = slots[name]
        states = [states[: len(slots_L)] for states in layers]
        self.drafter.record(states, positions_L[: len(slots_L)], slots_L)

    def begin_step(self, *values: Any) -> None:
        """Take the fields of the step that vLLM asks for drafts after."""
        self.step = Step(*values)

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: np.ndarray, *unused: Any, **also_unused: Any
    ) -> list[list[int]]:
        """Return the lists for the draft tokens of every request; they stay empty where it is in prefill or ends."""
        step, count = self.step, len(sampled_token_ids)
        assert step is not None
        lengths = num_tokens_no_spec[:count].copy()  # vLLM writes to its array
        outcomes = [step.committed(i, tokens, int(lengths[i])) for i, tokens in enumerate(sampled_token_ids)]
        requests = sum(goes_on for _, goes_on in outcomes)
        self.observe(step, sampled_token_ids, sum(tokens for tokens, _ in outcomes), requests)
        rooms = np.minimum(np.array(step.limits) - lengths - 1, self.depth)
        asked = [i for i, (tokens, goes_on) in enumerate(outcomes) if tokens and goes_on and rooms[i] > 0]
        asked.sort(key=lambda i: int(lengths[i]))
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        # With the requests that end: under load others take their places.
        wanted = bool(asked) and self.lengths.wants_draft(count)
        self.due = None
        if wanted:  # vLLM cuts its lists of sampled tokens before the draft is computed
            rows, roots = step.kept_rows(sampled_token_ids), [sampled_token_ids[i][-1] for i in asked]
            self.due = DueDraft(step, asked, rows, roots, lengths, rooms[asked], drafts)
        return drafts

    @torch.inference_mode()
    def complete(self) -> None:
        """Fill in the drafts of the step before."""
        due, self.due = self.due, None
        if due is None:
            self.drafter.store_when_many()
            return
        began = perf_counter()
        self.drafter.store_older()
        resumed = perf_counter()
        tokens_QK, probs_QK = self.chains(due)
        lengths = self.lengths.choose([due.step.ids[i] for i in due.asked], probs_QK, due.rooms_Q, len(due.kept))
        for i, tokens, length in zip(due.asked, tokens_QK.tolist(), lengths.tolist(), strict=True):
            due.drafts[i][:] = tokens[:length]
        self.last.paused, self.last.draft = resumed - began, perf_counter() - resumed

    def observe(self, step: Step, sampled: list[list[int]], committed: int, requests: int) -> None:
        """Measure the step that ends now, but not one with prefill, after idle time or with an unexpected batch size.

        Args:
            committed: tokens that stay, of all requests.
            requests: that go on.
        """
        now = perf_counter()
        for one, drafted, tokens in zip(step.ids, step.drafted, sampled, strict=True):
            if drafted and tokens:
                self.lengths.observe_request(one, drafted, len(tokens) - 1)
        last, self.last = self.last, LastStep(now, frozenset(step.ids), requests)
        self.lengths.forget(last.ids.difference(step.ids))
        if last.ids.issuperset(step.ids) and last.requests == len(step.ids) and step.is_decoding():
            seconds = now - last.ended - last.paused - (last.draft or 0.0)
            self.lengths.observe_step(len(step.ids), step.starts[-1], committed, seconds, last.draft)

    def chains(self, due: DueDraft) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens_QK and probabilities_QK of the requests `asked`."""
        last = np.cumsum([len(rows) for rows in due.kept]) - 1  # of every request among the kept rows: its anchor
        columns = [last[due.asked], due.lengths[due.asked] - 2, due.roots, due.asked]
        indices = torch.from_numpy(np.concatenate([*columns, *due.kept]))
        table_QM = due.step.table_QM
        device = table_QM.device
        if device.type == "cuda":
            indices = indices.pin_memory()
        *ids, kept_L = indices.to(device, non_blocking=True).split([len(due.asked)] * 4 + [int(last[-1]) + 1])
        rows_Q, anchors_Q, roots_Q, requests_Q = ids
        texts = [int(due.lengths[i]) - 1 for i in due.asked]
        batch = DraftBatch(rows_Q, anchors_Q, roots_Q, table_QM[requests_Q], texts, kept_L)
        tokens_QK, probs_QK = self.drafter.draft(batch, self.depth)
        both = torch.stack([tokens_QK.double(), probs_QK.double()]).cpu().numpy()  # one transfer
        return both[0].astype(np.int64), both[1]
