"""The proposer that vLLM constructs for `custom_class`: drafts of the most probable chains, of adaptive length.

vLLM calls it once per step with the tokens of all requests on the host. Indices go to the device and the chains come
back in one transfer each; the lengths are then chosen on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctcdraft.serving import vllm_runner
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

    def is_decoding(self) -> bool:
        """Return whether no request prefills more than one token of its prompt."""
        sizes = zip(self.starts[:-1], self.starts[1:], self.drafted, strict=True)
        return all(end - start == 1 + drafted for start, end, drafted in sizes)


@dataclass(frozen=True)
class LastDraft:
    """The end of the step before, for timing."""

    ended: float
    seconds: float | None  # None: nothing was drafted
    ids: frozenset[str]


class CTCProposer:
    """Serves the head at additional_config["ctcdraft"]["head"]; see docs/serving.md."""

    def __init__(self, vllm_config: Any) -> None:
        self.options = vllm_runner.read_options(vllm_config)
        vllm_runner.refuse_unserved(vllm_config)
        vllm_runner.install_hooks()
        self.vllm_config = vllm_config
        self.max_length = vllm_config.model_config.max_model_len
        self.depth = vllm_config.speculative_config.num_speculative_tokens
        self.step: Step | None = None
        self.last = LastDraft(0.0, None, frozenset())

    def load_model(self, target: Any) -> None:
        """Load the head on the target's embedding and lm_head, and ask vLLM for the memory of its keys and values."""
        folder, values = Path(self.options.head), self.options.values
        model = self.vllm_config.model_config
        weights = target.model.embed_tokens.weight, target.lm_head.weight
        head = load_served_head(folder, values, model.model, model.revision, vllm_runner.warn, *weights)
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
        self.drafter.record([states[: len(slots_L)] for states in layers], positions_L[: len(slots_L)], slots_L)

    def begin_step(self, *values: Any) -> None:
        """Take the fields of the step that vLLM asks for drafts after."""
        self.step = Step(*values)

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: np.ndarray, *unused: Any, **also_unused: Any
    ) -> list[list[int]]:
        """Return the draft tokens of every request; none for those whose prompt is not prefilled yet."""
        began, step, count = perf_counter(), self.step, len(sampled_token_ids)
        assert step is not None
        self.observe(step, sampled_token_ids, began)
        rooms = np.minimum(self.max_length - num_tokens_no_spec[:count] - 1, self.depth)
        asked = [i for i in range(count) if sampled_token_ids[i] and rooms[i] > 0]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        seconds = None
        if asked and self.lengths.wants_draft(count):
            tokens_QK, probs_QK = self.chains(step, asked, sampled_token_ids, num_tokens_no_spec)
            ids = [step.ids[i] for i in asked]
            lengths = self.lengths.choose(ids, probs_QK, rooms[asked], count)
            for i, tokens, length in zip(asked, tokens_QK.tolist(), lengths.tolist(), strict=True):
                drafts[i] = tokens[:length]
            seconds = perf_counter() - began
        self.last = LastDraft(perf_counter(), seconds, frozenset(step.ids))
        return drafts

    def observe(self, step: Step, sampled: list[list[int]], now: float) -> None:
        """Measure the step that ends now, but not the time of one with prefill or of one after idle time."""
        for one, drafted, tokens in zip(step.ids, step.drafted, sampled, strict=True):
            if drafted and tokens:
                self.lengths.observe_request(one, len(tokens) - 1)
        if self.last.ids.issuperset(step.ids) and step.is_decoding():
            committed = sum(map(len, sampled))
            seconds = now - self.last.ended
            self.lengths.observe_step(len(step.ids), step.starts[-1], committed, seconds, self.last.seconds)

    def chains(
        self, step: Step, asked: list[int], sampled: list[list[int]], lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens_QK and probabilities_QK of the requests `asked`."""
        # The anchor is the token before the root: the last one read before the first rejected draft token.
        behind = [step.starts[i + 1] - step.drafted[i] + len(sampled[i]) - 2 for i in asked]
        anchors = [int(lengths[i]) - 2 for i in asked]
        columns = torch.tensor([behind, anchors, [sampled[i][-1] for i in asked], asked])
        device = step.table_QM.device
        if device.type == "cuda":
            columns = columns.pin_memory()
        rows_Q, anchors_Q, roots_Q, requests_Q = columns.to(device, non_blocking=True)
        batch = DraftBatch(rows_Q, anchors_Q, roots_Q, step.table_QM[requests_Q], max(anchors) + 1)
        tokens_QK, probs_QK = self.drafter.draft(batch, self.depth)
        both = torch.stack([tokens_QK.double(), probs_QK.double()]).cpu().numpy()  # one transfer
        return both[0].astype(np.int64), both[1]
