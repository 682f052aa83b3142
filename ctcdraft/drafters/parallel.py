"""Parallel drafters: hidden states -> frames -> token tree in one forward pass (CTC-drafter, Medusa, blockwise)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.base import DraftHead, refuse_other_tree
from ctcdraft.drafters.trees.ctc import PrefixSearch
from ctcdraft.drafters.trees.request import ConditionedFrames, FrameTreeBuilder, TreeRequest
from ctcdraft.errors import InputError, check_int
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.base_layer import base_block_config
from ctcdraft.nn.block_config import BlockConfig
from ctcdraft.nn.bodies import AuxStateFusion
from ctcdraft.nn.draft_vocab import FrameHeads
from ctcdraft.nn.heads import BlankHead, Emissions, TokenEmissions, TokenHead
from ctcdraft.nn.logit_correction import LogitCorrection
from ctcdraft.nn.masks import visible_mask

WINDOWS_PER_FORWARD = 64  # bounds the memory of their logits: 8 frames of 32,001 classes are 66 MB in float32


class ParallelDrafter(DraftHead):
    """A drafter that computes all frames at once and builds the tree from them.

    With the attention body and collapsed paths it is CTC-drafter (Wen et al. 2024), with the residual body and a
    static tree Medusa (Cai et al. 2024).

    Args:
        frames: T, frames per anchor. The root is not among what they predict: the base has computed it already.
        body: makes the module that computes frames from hidden states.
        correction: makes the logit correction; None for frames that do not depend on the draft tokens.
        vocabulary: size of the draft vocabulary, the most frequent tokens of the corpus; None for the base's own.
        own_heads: a trained lm_head for each frame instead of the base's, and no blank, as in Medusa.
    """

    per_frame_weights = True
    fixed_shapes = True

    def __init__(
        self,
        base: BaseLM,
        frames: int,
        body: Callable[[BlockConfig, int], Any],
        tree: FrameTreeBuilder,
        correction: Callable[..., LogitCorrection] | None = None,  # older run directories do not have these two
        vocabulary: int | None = None,
        own_heads: bool = False,
    ) -> None:
        super().__init__()
        self.frames = check_int(frames, "drafter.frames")
        refuse_other_tree(self, tree, from_frames=True)
        config = replace(base_block_config(base.lm, base.context_length), state_layers=len(base.aux_layers))
        self.width, self.state_columns = base.width, base.state_columns
        self.body: Any = body(config, frames).to(base.device)
        self.reads_tokens: bool = getattr(self.body, "reads_tokens", False)
        self.reads_all_layers: bool = getattr(self.body, "reads_all_layers", False)
        self.teacher = TokenHead(base.head) if own_heads else None  # distributions to learn from, in training
        own, shared = partial(FrameHeads, base.head, frames), partial(BlankHead, base.head, base.width)
        self.head: Any = (own(vocabulary, with_blank=True) if own_heads else shared(vocabulary)).to(base.device)
        self.embedding = base.embedding
        aux = len(base.aux_layers) > 1 and not self.reads_all_layers
        self.fuse = AuxStateFusion(base.width, len(base.aux_layers), config.epsilon).to(base.device) if aux else None
        self.correction: LogitCorrection | None = None
        if correction is not None:
            self.correction = correction(base.embedding, epsilon=config.epsilon).to(base.device)
            refuse_alignments(self.correction, tree)
        self.initialised = self.body.init_from_base(base.lm)
        self.frame_tree = tree
        self.stops = tuple(sorted(base.stop_token_ids))

    @property
    def dtype(self) -> torch.dtype:
        # Of its own weights: float32 in training, whatever the dtype of the base's hidden states.
        return self.head.dtype

    def input_states(self, states_BLD: Tensor, next_BL: Tensor | None = None) -> Tensor:
        """Return the base's hidden states in the drafter's dtype, those of several layers fused into one.

        The auxiliary layers follow the fused state where the body's blocks have text of their own. A body that reads
        all layers gets them as they are, and one that reads tokens the embeddings of next_BL, the tokens after them.
        """
        states_BLD = states_BLD.to(self.dtype)
        if self.state_columns is not None:
            states_BLD = states_BLD[..., self.state_columns]
        if next_BL is not None:
            return torch.cat([states_BLD, self.embedding(next_BL).to(self.dtype)], dim=-1)
        if self.fuse is None:
            return states_BLD
        fused_BLD = self.fuse(states_BLD)
        if not getattr(self.body, "own_text", False):
            return fused_BLD
        return torch.cat([fused_BLD, states_BLD[..., self.width :]], dim=-1)

    def forward(self, batch: Batch) -> Emissions:
        states_BLD = self.input_states(batch.states_BLD, batch.next_tokens() if self.reads_tokens else None)
        text = self.body.text_keys_values(states_BLD, batch.position_ids_BL)
        columns = states_BLD.shape[-1] if self.reads_all_layers else self.width  # the fused states
        anchor_BAD = states_BLD.gather(1, batch.anchors_BA[..., None].expand(-1, -1, columns))
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
        """Return measures of the first windows of a batch.

        repeat_rate: share of frames whose best class is the token of the frame before, first frames left out.
        words_lost: mean probability of alignments with tokens that the prefix search does not consider.
        """
        # forward, not self(batch): a compiled module would be compiled again for a call without gradients.
        states_XTD = self.forward(batch).states_BATD[batch.lengths_BA > 0][:WINDOWS_PER_FORWARD]
        logits_XTC = self.head(states_XTD).float()
        best_XT = logits_XTC.argmax(dim=-1)
        repeats = (best_XT[:, 1:] == best_XT[:, :-1]) & (best_XT[:, 1:] != self.head.blank)
        metrics = {"repeat_rate": float(repeats.sum()) / max(repeats.numel(), 1)}
        # A logit correction conditions the frames, and the search then considers every token.
        if isinstance(self.frame_tree, PrefixSearch) and self.correction is None:
            lost = [float(self.frame_tree.pruned_mass(frames_TC)) for frames_TC in logits_XTC.log_softmax(dim=-1)]
            metrics["words_lost"] = sum(lost) / max(len(lost), 1)
        return metrics

    def draft(self, context: Context, memory: KVCache | None, rng: torch.Generator) -> tuple[TokenTree, Any]:
        if memory is None and self.body.layers:
            # The frames of a draft take cache rows too, behind those of the text, and so does the root.
            memory = context.new_cache(self.body.layers, self.frames + 1, self.body.rotary.positions)
        emissions = self.emit(context, memory)
        return self.build_tree(emissions.logits(), emissions.start_BAR, 0, context, rng), memory

    def draft_many(self, contexts: Sequence[Context], rng: torch.Generator) -> Callable[[int], TokenTree]:
        """Return a function that gives the tree of context n, the same tree as `draft`.

        The contexts are of one text, each one token longer than the one before. Frames are computed for
        WINDOWS_PER_FORWARD of them per forward pass, so ask for them in order.
        """
        states_LD = torch.cat([context.new_states_KD for context in contexts])

        @lru_cache(maxsize=1)
        def batch_logits(number: int) -> tuple[Tensor, Any]:
            first = number * WINDOWS_PER_FORWARD
            emissions = self(batch_of_contexts(contexts[first : first + WINDOWS_PER_FORWARD], states_LD))
            return emissions.logits(), emissions.start_BAR

        def tree(index: int) -> TokenTree:
            logits_BATC, start_BAR = batch_logits(index // WINDOWS_PER_FORWARD)
            return self.build_tree(logits_BATC, start_BAR, index % WINDOWS_PER_FORWARD, contexts[index], rng)

        return tree

    def build_tree(self, logits_BATC: Tensor, start_BAR: Any, anchor: int, context: Context, rng: Any) -> TokenTree:
        """Return the tree of one anchor's frames. start_BAR: states of the logit correction after the roots."""
        logits_TC, request = logits_BATC[0, anchor], TreeRequest.of(context, self.stops, rng)
        if self.correction is None:
            return self.frame_tree(logits_TC.log_softmax(dim=-1, dtype=torch.float32), request)
        conditioned = ConditionedFrames.of_logits(logits_TC, self.correction, start_BAR[0, anchor : anchor + 1])
        return self.frame_tree(conditioned.log_probs_TC, request, conditioned)

    def emit(self, context: Context, memory: Any) -> Emissions:
        """Return the emissions at the newest hidden state; appends the text's new keys and values to `memory`."""
        next_BK = context.new_tokens_K[None] if self.reads_tokens else None
        states_BKD, root_BA = self.input_states(context.new_states_KD[None], next_BK), context.root_1[None]
        root_BAD, anchor_BAE = self.embedding(root_BA).to(self.dtype), context.newest(states_BKD)
        return self.emissions(self.body.step(states_BKD, root_BAD, memory, context), anchor_BAE, root_BA)

    def emissions(self, states_BATD: Tensor, anchor_BAE: Tensor, roots_BA: Tensor) -> Emissions:
        """Return the emissions of frames, given `input_states` at the anchors."""
        start_BAR = None
        if self.correction is not None:
            start_BAR = self.correction.start(self.start_states(anchor_BAE), roots_BA, states_BATD)
        if self.teacher is not None:
            return TokenEmissions(states_BATD, self.teacher, self.correction, start_BAR, own=self.head)
        return Emissions(states_BATD, self.head, self.correction, start_BAR)

    def start_states(self, anchor_BAE: Tensor) -> Tensor:
        """Return the states_BAD at the anchors from which a logit correction starts: of layers that the body reads."""
        if self.reads_all_layers and self.correction is not None and self.correction.reads_anchor:
            return self.body.read_text(anchor_BAE)[..., -self.width :]  # behind an embedding, where it reads tokens
        return anchor_BAE[..., : self.width]


def refuse_alignments(correction: LogitCorrection, tree: Any) -> None:
    """Raise InputError for a tree with tokens in any frame where the correction is for frame k and draft token k."""
    interprets_as = getattr(tree, "interprets_as", "tokens")
    if correction.reads_frames and interprets_as != "tokens":
        raise InputError(
            f"drafter/correction: {type(correction).__name__} corrects frame k for draft token k, and "
            f"{type(tree).__name__} reads frames as {interprets_as}; use drafter/tree=per_frame, or the gru one"
        )


def batch_of_contexts(contexts: Sequence[Context], states_LD: Tensor) -> Batch:
    """Return contexts of one text as the windows of a batch with one sequence and no labels."""
    roots_BA = torch.stack([context.root for context in contexts])[None]
    anchors_BA = roots_BA.new_tensor([[len(context.tokens_L) - 2 for context in contexts]])
    length = int(anchors_BA[0, -1]) + 1
    return Batch(
        tokens_BL=contexts[-1].tokens_L[None, :length],
        states_BLD=states_LD[None, :length],
        anchors_BA=anchors_BA,
        roots_BA=roots_BA,
        labels_BAS=roots_BA.new_empty(1, len(contexts), 0),
        lengths_BA=torch.ones_like(roots_BA),
        position_ids_BL=torch.arange(length, device=roots_BA.device)[None],
    )
