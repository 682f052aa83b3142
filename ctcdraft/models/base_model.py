"""The frozen base model: token ids in, hidden states and logits out.

It wraps a stock transformers model without patching it: a custom KV cache and a 4-D additive attention mask are enough
to read a token tree in one forward pass, so every architecture whose attention obeys its mask can be used as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.static_cache import StaticCache
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.models.aux_layers import LayerInputs, resolve_aux_layers, run_layers
from ctcdraft.models.checkpoints import eos_token_ids, refuse_quantized
from ctcdraft.models.compatibility import checked_context_length, refuse_unsupported_config
from ctcdraft.models.deepspeed import gather, is_sharded
from ctcdraft.models.device_map import MultiDeviceCache
from ctcdraft.models.fingerprint import base_fingerprint, rotary_summary, weights_identity
from ctcdraft.models.fused_layers import FusedLayers, fused_layers, read_padded_text, read_static_tree
from ctcdraft.nn.masks import SlidingWindow, mask_values, packed_causal_mask
from ctcdraft.nn.tree_attention import use_tree_attention
from ctcdraft.nn.weight_layout import to_column_major_


@dataclass(frozen=True)
class ModelOutput:
    """The result of one forward pass of the base over N tokens."""

    states_ND: Tensor  # after the final norm; those of other `base.aux_layers` are concatenated behind
    logits_NV: Tensor  # of the token after each row; `BaseLM.read` computes them for the last row only


class BaseLM(nn.Module):
    """A frozen causal LM of stock transformers that decodes one sequence at a time.

    Decoding has no batch axis because the library measures latency. Only `hidden_states`, for training, has one.
    """

    def __init__(
        self,
        lm: Any,
        tokenizer: Any,
        name: str,
        revision: str | None = None,
        context_length: int | None = None,
        chat_template: str | None = None,
        aux_layers: Sequence[str | int | float] = ("last",),
        quantization: str | None = None,
    ) -> None:
        super().__init__()
        refuse_unsupported_config(lm.config, name)
        if quantization is None:
            refuse_quantized(lm, name)
        self.aux_layers = resolve_aux_layers(aux_layers, lm.config.num_hidden_layers)
        self.layer_inputs: Any = LayerInputs.of(lm, self.aux_layers[1:])
        self.state_columns: Tensor | None = None  # those of its hidden states that a head reads; see view_of_layers
        self.static_shapes: StaticShapes | None = None  # None: each forward pass has the shape of its tree
        self.fused_layers: FusedLayers | None = None  # for fixed shapes on an accelerator, see fuse_layers
        self.tried_to_fuse = False
        self.quantization = quantization
        self.adapted: str | None = None  # hash of the LoRA trained together with a draft head and merged into lm
        self.layer_devices: list[torch.device] | None = None  # one per layer; None: all layers on one device
        self.lm = lm.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.head: Any = lm.get_output_embeddings()
        self.embedding: Any = lm.get_input_embeddings()
        self.context_length = checked_context_length(context_length, lm.config, name)
        self.window = SlidingWindow.of(lm.config, self.context_length)
        self.stop_token_ids = eos_token_ids(lm, tokenizer)
        (self.weights_hash, self.weights_sum), self.rotary = weights_identity(lm), rotary_summary(lm)
        if chat_template is not None and tokenizer is not None:
            tokenizer.chat_template = chat_template

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Apply `fn` as nn.Module does, except that buffers keep their dtype."""
        # They are rotary frequencies in float32. Rounded, they rotate by wrong angles, more so at later positions.
        buffers = [(module, *named) for module in self.modules() for named in module.named_buffers("", False)]
        super()._apply(fn, recurse)
        self.fused_layers, self.tried_to_fuse = None, False  # they share the weights
        if self.static_shapes is not None:
            self.static_shapes.decoders.clear()  # captured steps read the memory of what is dropped here
        for module, name, value in buffers:
            module._buffers[name] = value.to(module.get_buffer(name).device)
        return self

    def gathered_parameters(self) -> AbstractContextManager[Any]:
        """Return a context in which the last layer and the final norm, which drafters copy, are complete in ZeRO-3."""
        inner = self.lm.base_model
        copied = [getattr(inner, "norm", None), *list(getattr(inner, "layers", []))[-1:]]
        shards = [value for module in copied if module for value in module.parameters() if is_sharded(value)]
        return gather(shards) if shards else nullcontext()

    def for_inference(self) -> Self:
        """Choose the memory layout and the attention that are fast for the few rows of a tree; not for training."""
        to_column_major_(self.lm)
        use_tree_attention(self.lm)
        return self

    @property
    def vocabulary(self) -> int:
        """V, the rows of the lm_head; may be more than the tokens of the tokenizer."""
        return self.head.weight.shape[0]

    @property
    def width(self) -> int:
        """D, the width of a hidden state."""
        return self.head.weight.shape[1]

    @property
    def layers(self) -> int:
        return self.lm.config.num_hidden_layers

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def execution_mode(self) -> str:
        """How a tree is read, for a report: "compiled and captured, fixed shapes, torchao_int8"."""
        shapes = "eager, exact shapes" if self.static_shapes is None else self.static_shapes.execution_mode(self.device)
        fused = self.fused_layers and self.static_shapes and not self.static_shapes.compiled and "fused layers"
        parts = shapes, fused, self.quantization, self.adapted and "changed by LoRA"
        return ", ".join(part for part in parts if part)

    def new_cache(self, capacity: int) -> Any:
        """Return an empty KV cache for one text, with room for `capacity` tokens."""
        if self.layer_devices is not None:
            return MultiDeviceCache(self.layer_devices, capacity)
        return KVCache(self.lm.config.num_hidden_layers, capacity)

    @torch.inference_mode()
    def read(self, tokens_L: Tensor, cache: KVCache) -> ModelOutput:
        """Run the base on tokens that follow the cached ones, and return logits for the last token only."""
        start = cache.length
        positions_L = torch.arange(start, start + len(tokens_L), device=self.device)
        states_LD = self._forward(tokens_L, positions_L, None, cache)
        # Logits of all positions of a 2k prompt over 32k tokens would be 262 MB.
        return ModelOutput(states_LD, self.head(states_LD[-1:, : self.width]))

    @torch.inference_mode()
    def read_tree(self, tree: TokenTree, cache: KVCache) -> ModelOutput:
        """Run the base on a token tree in one forward pass.

        A node attends to the cached text, its ancestors and itself; its position id is cache.length + its depth.
        """
        if isinstance(cache, StaticCache):
            return ModelOutput(*read_static_tree(self, tree, cache))
        start = cache.length
        # A single node attends to all that is cached; without a mask it takes the fastest kernel, as in stock decoding.
        mask_NM = tree.attention_mask(start, self.dtype) if len(tree) > 1 else None
        states_ND = self._forward(tree.tokens_N, start + tree.depths_N, mask_NM, cache)
        return ModelOutput(states_ND, self.logits(states_ND))

    @torch.inference_mode()
    def read_padded(self, tokens_P: Tensor, count_1: Tensor, cache: StaticCache) -> Tensor:
        """Run the base on a text of which count_1 tokens are real and the rest padding; return hidden states_PD."""
        return read_padded_text(self, tokens_P, count_1, cache)

    @torch.inference_mode(False)
    def fuse_layers(self) -> None:
        """Let trees of fixed shapes be read by fused layers, where the layers allow it."""
        self.fused_layers, self.tried_to_fuse = fused_layers(self), True

    @torch.inference_mode()
    def read_rows(self, tokens_K: Tensor, position_ids_K: Tensor, seen_KM: Tensor | None, cache: Any) -> Tensor:
        """Run the base on tokens whose cache rows `append` or `append_level` has chosen; return hidden states_KD.

        seen_KM is True where a token attends to a cached row or to one of the K new rows; None: a causal mask.
        """
        mask_KM = None if seen_KM is None else self.additive_mask(seen_KM)
        return self._forward(tokens_K, position_ids_K, mask_KM, cache)

    def states_and_logits(self, *read: Any) -> tuple[Tensor, Tensor]:
        states_ND = self._forward(*read)
        return states_ND, self.logits(states_ND)

    def logits(self, states_ND: Tensor) -> Tensor:
        return self.head(states_ND if len(self.aux_layers) == 1 else states_ND[:, : self.width])

    def _forward(self, tokens_N: Tensor, positions_N: Tensor, mask_NM: Tensor | None, cache: Any) -> Tensor:
        # The mask is 4-D and additive: eager attention would silently add a boolean mask as 0 and 1.
        mask = None if mask_NM is None else self.layer_masks(mask_NM[None, None])
        inputs = {"input_ids": tokens_N[None], "position_ids": positions_N[None], "attention_mask": mask}
        return run_layers(self, **inputs, past_key_values=cache, use_cache=True)[0]

    @torch.no_grad()
    def hidden_states(self, tokens_BL: Tensor, mask_BL: Tensor, position_ids_BL: Tensor | None = None) -> Tensor:
        """Return `hidden_states_with_grad` without a gradient."""
        return self.hidden_states_with_grad(tokens_BL, mask_BL, position_ids_BL)

    def hidden_states_with_grad(
        self, tokens_BL: Tensor, mask_BL: Tensor, position_ids_BL: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states [B, L, D] of right-padded sequences, without a KV cache, for training.

        Args:
            mask_BL: 1 on tokens, 0 on padding.
            position_ids_BL: positions within each text where a row packs several (nn/masks.py); texts of one row do
                not attend to each other.
        """
        inputs = {"attention_mask": mask_BL} | ({} if position_ids_BL is None else self.packed_inputs(position_ids_BL))
        return run_layers(self, input_ids=tokens_BL, use_cache=False, **inputs)

    def layer_masks(self, mask_B1QM: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the additive mask in the form the layers take: one, or one per layer type with sliding windows."""
        return mask_B1QM if self.window is None else self.window(mask_B1QM)

    def packed_inputs(self, position_ids_BL: Tensor) -> dict[str, Any]:
        """Return the extra inputs of stock transformers for packed sequences; none where every row is one text."""
        seen_B1LL = packed_causal_mask(position_ids_BL)
        if seen_B1LL is None:
            return {}
        return {"attention_mask": self.layer_masks(self.additive_mask(seen_B1LL)), "position_ids": position_ids_BL}

    def additive_mask(self, seen_X: Tensor) -> Tensor:
        """Return 0 where `seen_X` is True and the lowest number of the dtype elsewhere."""
        return torch.where(seen_X, *mask_values(self.dtype, self.device))

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of this base, which draft heads and corpora made for it are checked against."""
        return base_fingerprint(self)
