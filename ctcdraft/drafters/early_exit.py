"""Early exit: the base's own first layers draft for all of them, as they are or with a trained adapter.

The first layers read draft tokens with a KV cache of their own, and once more when the base reads the tree. Kangaroo
and LayerSkip run the upper layers alone then, which needs a base that can be entered at a layer; measured times are too
long by that much.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctcdraft.drafters.draft_model import LanguageModelDrafter
from ctcdraft.drafters.sequential import decoder_layer
from ctcdraft.drafters.trees.request import StepTreeBuilder
from ctcdraft.models.aux_layers import first_layers
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.base_layer import copy_final_norm
from ctcdraft.nn.block_config import BlockConfig, RMSNorm
from ctcdraft.nn.masks import packed_causal_mask


class EarlyExit(LanguageModelDrafter):
    """Drafts with the base's first layers, its final norm and its lm_head (LayerSkip, Elhoushi et al. 2024).

    LayerSkip trains the base so that its lower layers can predict tokens; other bases are used as they are.

    layers: number of layers, or a fraction of the base's.
    """

    usable_untrained = True

    def __init__(self, base: BaseLM, layers: int | float, frames: int, tree: StepTreeBuilder) -> None:
        super().__init__(base, first_layers(base, layers, normed=True), True, frames, tree)
        self.initialised = f"the base's first {self.lm.layers} of {base.layers} layers"


class Kangaroo(LanguageModelDrafter):
    """Drafts with an attention layer and a norm on the hidden states of a lower layer (Liu et al. 2024).

    Frames are the next-token distributions behind the text and behind every draft token. The draft is not stopped at an
    improbable token, as Kangaroo's is; decoding.nodes=adaptive decides that.

    Args:
        layers: number of the base's layers below the adapter, or a fraction of them.
        mlp: give the adapter an MLP, too, as decoder layers have.
        like_base: see `decoder_layer`.
    """

    def __init__(
        self, base: BaseLM, layers: int | float, frames: int, tree: StepTreeBuilder, mlp: bool, like_base: bool
    ) -> None:
        super().__init__(base, first_layers(base, layers, normed=False), True, frames, tree)
        self.adapter, initialised = decoder_layer(base, like_base, input_norm=True, mlp=mlp)
        self.adapter.layer = self.lm.layers
        self.norm = RMSNorm(base.width, eps=BlockConfig.of(base.lm.config, base.context_length).epsilon).to(base.device)
        copy_final_norm(self.norm, base.lm)
        self.initialised = f"adapter on layer {self.lm.layers} of {base.layers}, {initialised}"

    @property
    def cached_layers(self) -> int:
        return self.lm.layers + 1  # the last one is the adapter's

    def text_states(self, tokens_BL: Tensor, position_ids_BL: Tensor) -> Tensor:
        with torch.no_grad():
            states_BLD = super().text_states(tokens_BL, position_ids_BL)
        return self.adapt(states_BLD, position_ids_BL, None, packed_causal_mask(position_ids_BL))

    def read(self, tokens_K: Tensor, position_ids_K: Tensor, seen_KM: Tensor | None, cache: Any) -> Tensor:
        states_KD = super().read(tokens_K, position_ids_K, seen_KM, cache)
        return self.adapt(states_KD[None], position_ids_K, cache, seen_KM)[0]

    def adapt(self, states_BLD: Tensor, position_ids: Tensor, cache: Any, seen: Tensor | None) -> Tensor:
        """Return the hidden states that the lm_head reads, of those below the adapter; see CausalBlock."""
        states_BLD = self.adapter(states_BLD.to(self.norm.weight.dtype), position_ids, cache, seen)
        return self.norm(states_BLD)
