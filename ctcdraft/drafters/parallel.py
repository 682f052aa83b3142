"""The block drafter: states -> frames -> paths -> tree, in one parallel pass. It knows neither loss nor corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.base import DraftHead
from ctcdraft.drafters.conditioning import ConditionedFrames
from ctcdraft.drafters.trees.ctc import FrameTreeBuilder, PrefixSearch
from ctcdraft.drafters.trees.draft_sampling import DraftSampling
from ctcdraft.errors import check_int
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.base_layer import base_block_config
from ctcdraft.nn.bodies import AuxStateFusion
from ctcdraft.nn.heads import BlankHead, Emissions
from ctcdraft.nn.logit_correction import LogitCorrection
from ctcdraft.nn.packing import visible_mask
from ctcdraft.nn.transformer import BlockConfig

WINDOWS_PER_FORWARD = 64  # their logits are held whole: 32,001 classes x 8 frames are 66 MB


class ParallelDrafter(DraftHead):
    """Two dials: the body that makes frames of states, and the paths that make a tree of frames.

    With the attention body and collapsed paths it is CTC-drafter (Wen et al. 2024), with the residual body and a
    sparse tree Medusa (Cai et al. 2024). frames: T, guessed beyond the root, which the base itself has said.
    vocabulary: how many words it says, the commonest of the corpus; None: all of the base's.
    """

    per_frame_weights = True

    def __init__(
        self,
        base: BaseLM,
        frames: int,
        body: Callable[[BlockConfig, int], Any],
        paths: FrameTreeBuilder,
        correction: Callable[..., LogitCorrection] | None = None,  # runs from before there was one do not name it
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        shape = base_block_config(base.lm, base.context_length)
        self.frames = check_int(frames, "drafter.frames")
        self.body: Any = body(shape, frames).to(base.device)
        self.head = BlankHead(base.head, base.width, vocabulary).to(base.device)
        self.embedding = base.embedding
        self.fuse = (
            AuxStateFusion(base.width, len(base.taps), shape.epsilon).to(base.device) if len(base.taps) > 1 else None
        )
        self.correction: LogitCorrection | None = None
        if correction is not None:
            self.correction = correction(base.embedding, epsilon=shape.epsilon).to(base.device)
        self.initialised = self.body.init_from_base(base.lm)
        self.paths = paths.fixed() if base.fixed is not None and isinstance(paths, PrefixSearch) else paths
        self.stops = tuple(sorted(base.stop_token_ids))

    @property
    def dtype(self) -> torch.dtype:
        """Its own weights': float32 in training, whatever the base's states come in."""
        return self.head.blank_D.dtype

    def input_states(self, states_BLD: Tensor) -> Tensor:
        """The base's states in the drafter's own precision, several taps fused into one."""
        states_BLD = states_BLD.to(self.dtype)
        return states_BLD if self.fuse is None else self.fuse(states_BLD)

    def forward(self, batch: Batch) -> Emissions:
        states_BLD = self.input_states(batch.states_BLD)
        text = self.body.text_keys_values(states_BLD, batch.position_ids_BL)
        index_BAD = batch.anchors_BA[..., None].expand(-1, -1, states_BLD.shape[-1])
        anchor_BAD = states_BLD.gather(1, index_BAD)
        states_BATD = self.body(
            anchor_BAD=anchor_BAD,
            root_BAD=self.embedding(batch.roots_BA).to(self.dtype),
            anchors_BA=batch.position_ids_BL.gather(1, batch.anchors_BA),
            text=text,
            visible_BAL=visible_mask(batch.anchors_BA, batch.position_ids_BL),
        )
        return self.emissions(states_BATD, anchor_BAD, batch.roots_BA)

    @torch.no_grad()
    def metrics(self, batch: Batch) -> dict[str, float]:
        """Of the batch's first windows. repeat_rate: frames whose best class is the word of the frame before, among all
        but first frames; words_lost: what the paths do not see of the frames (mean)."""
        # Not self(batch): where that is compiled, it would be compiled once more, without gradients.
        states_XTD = self.forward(batch).states_BATD[batch.lengths_BA > 0][:WINDOWS_PER_FORWARD]
        logits_XTC = self.head(states_XTD).float()
        best_XT = logits_XTC.argmax(dim=-1)
        repeats = (best_XT[:, 1:] == best_XT[:, :-1]) & (best_XT[:, 1:] != self.head.blank)
        metrics = {"repeat_rate": float(repeats.sum()) / max(repeats.numel(), 1)}
        lost = getattr(self.paths, "pruned_mass", None)
        if lost is None or self.correction is not None:  # frames that listen are searched over other words
            return metrics
        each = [float(lost(one_TC)) for one_TC in logits_XTC.log_softmax(dim=-1)]
        return metrics | {"words_lost": sum(each) / max(len(each), 1)}

    def draft(self, context: Context, memory: KVCache | None, rng: torch.Generator) -> tuple[TokenTree, Any]:
        if memory is None and self.body.layers:
            rows = len(context.tokens_L) + context.remaining_tokens + self.frames  # a step holds its slots in there too
            memory = KVCache(self.body.layers, capacity=rows)
        emissions = self.emit(context, memory)
        start_BAR = emissions.start_BAR
        start_1R = None if start_BAR is None else start_BAR.flatten(0, 1)
        return self.tree(emissions.logits().flatten(0, 2), start_1R, context, rng), memory

    def draft_many(self, contexts: Sequence[Context], rng: torch.Generator) -> Callable[[int], TokenTree]:
        """The tree behind any of these contexts of one text, each a token longer than the one before; as `draft` makes
        them one by one, but the frames of many in one pass."""
        states_LD = torch.cat([context.new_states_KD for context in contexts])

        @lru_cache(maxsize=1)
        def batch_logits(number: int) -> tuple[Tensor, Any]:
            emissions = self(
                batch_of_contexts(
                    contexts[number * WINDOWS_PER_FORWARD : (number + 1) * WINDOWS_PER_FORWARD], states_LD
                )
            )
            return emissions.logits()[0], emissions.start_BAR

        def tree(at: int) -> TokenTree:
            logits_ATC, start_BAR = batch_logits(at // WINDOWS_PER_FORWARD)
            row = at % WINDOWS_PER_FORWARD
            start_1R = None if start_BAR is None else start_BAR[0, row : row + 1]
            return self.tree(logits_ATC[row], start_1R, contexts[at], rng)

        return tree

    def tree(self, logits_TC: Tensor, start_1R: Any, context: Context, rng: torch.Generator) -> TokenTree:
        """What the paths make of the frames of one context. start_1R: the correction's memory, where there is one."""
        log_probs_TC = logits_TC.log_softmax(dim=-1, dtype=torch.float32)
        tree_arguments = (context.root, context.depth, context.nodes, self.stops, DraftSampling.of(context, rng))
        if self.correction is None:
            return self.paths(log_probs_TC, *tree_arguments)
        return self.paths(
            log_probs_TC, *tree_arguments, ConditionedFrames.empty(log_probs_TC, self.correction, start_1R)
        )

    def emit(self, context: Context, memory: Any) -> Emissions:
        """Emissions at the newest state; the text's keys and values grow in `memory`, one row a token."""
        states_BKD, root_BA = self.input_states(context.new_states_KD[None]), context.tokens_L[None, -1:]
        root_BAD = self.embedding(root_BA).to(self.dtype)
        return self.emissions(self.body.step(states_BKD, root_BAD, memory), states_BKD[:, -1:], root_BA)

    def emissions(self, states_BATD: Tensor, anchor_BAD: Tensor, roots_BA: Tensor) -> Emissions:
        if self.correction is None:
            return Emissions(states_BATD, self.head)
        return Emissions(states_BATD, self.head, self.correction, self.correction.start(anchor_BAD, roots_BA))


def batch_of_contexts(contexts: Sequence[Context], states_LD: Tensor) -> Batch:
    """Contexts of one text as the windows of a batch of one row; they ask for no labels."""
    roots_BA = torch.stack([context.root for context in contexts])[None]
    anchors_BA = roots_BA.new_tensor([[len(context.tokens_L) - 2 for context in contexts]])
    length = int(anchors_BA[0, -1]) + 1
    position_ids_BL = torch.arange(length, device=roots_BA.device)[None]
    text_BL = contexts[-1].tokens_L[None, :length]
    no_labels_BAS = roots_BA.new_empty(1, len(contexts), 0)
    return Batch(
        text_BL,
        states_LD[None, :length],
        anchors_BA,
        roots_BA,
        no_labels_BAS,
        torch.ones_like(roots_BA),
        position_ids_BL,
    )
