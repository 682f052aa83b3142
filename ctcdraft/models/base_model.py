"""The base LLM: tokens in, states and logits out. Frozen, never patched; it knows nothing of drafts or text tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from ctcdraft.decoding.kv_cache import KVCache, StaticCacheView
from ctcdraft.decoding.static_shapes import StaticShapeForward
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import InputError
from ctcdraft.models.checkpoints import refuse_quantized
from ctcdraft.models.compatibility import checked_context_length, refuse_unsupported_config
from ctcdraft.models.device_map import MultiDeviceCache
from ctcdraft.models.fingerprint import text_hash, tokenizer_hash, weights_hash
from ctcdraft.nn.packing import packed_causal_mask
from ctcdraft.nn.sliding import SlidingWindow
from ctcdraft.nn.weight_layout import to_column_major_


@dataclass(frozen=True)
class ModelOutput:
    """What one reading of the base gives back.

    states_ND: the base's last hidden states (after its final norm), one row a token read; behind them, where the
    base has more taps than "last", the states of those layers.
    logits_NV: the scores of the word after each of them; `BaseLM.read` keeps the last row only.
    """

    states_ND: Tensor
    logits_NV: Tensor


class BaseLM(nn.Module):
    """A frozen causal LM of stock transformers, read one sequence at a time.

    Decoding has no batch axis: the setting is latency. Only `states`, which is for training, has one.
    """

    def __init__(
        self,
        lm: Any,
        tokenizer: Any,
        name: str,
        revision: str | None = None,
        context_length: int | None = None,
        chat_template: str | None = None,
        taps: Sequence[str | int] = ("last",),
        quantised: str | None = None,
    ) -> None:
        super().__init__()
        refuse_unsupported_config(lm.config, name)
        if quantised is None:
            refuse_quantized(lm, name)
        refuse_taps(taps, lm.config.num_hidden_layers)
        self.taps = list(taps)
        self.fixed: StaticShapeForward | None = None  # None: every read has the shape of its tree
        self.quantised = quantised
        self.adapted: str | None = None  # the hash of what was trained along with a head, and changes what it says
        self.layer_devices: list[torch.device] | None = None  # of every layer; None: all on one device
        self.lm = lm.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.head: Any = lm.get_output_embeddings()
        self.embedding: Any = lm.get_input_embeddings()
        self.context_length = checked_context_length(context_length, lm.config, name)
        self.window = SlidingWindow.of(lm.config, self.context_length)
        self.stop_token_ids = stop_token_ids(lm, tokenizer)
        self.weights_hash = weights_hash(lm)
        if chat_template is not None and tokenizer is not None:
            tokenizer.chat_template = chat_template

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Apply `fn` as nn.Module does, except that buffers keep their dtype.

        The buffers are rotary frequencies in float32. Rounded to bfloat16 they turn positions by wrong angles, by more
        the longer the text is; stock transformers keeps them in float32, too.
        """
        buffers = [(module, *named) for module in self.modules() for named in module.named_buffers("", False)]
        super()._apply(fn, recurse)
        for module, name, value in buffers:
            module._buffers[name] = value.to(module.get_buffer(name).device)
        return self

    def gathered_parameters(self) -> AbstractContextManager[Any]:
        """Within, drafters find the weights that they begin with whole."""
        return nullcontext()

    def for_inference(self) -> Self:
        """To decode with: weights laid for the few rows of a tree. Nothing that is trained or saved needs it."""
        to_column_major_(self.lm)
        return self

    @property
    def vocabulary(self) -> int:
        """V: rows of the head, which may be more than the tokenizer has words."""
        return self.head.weight.shape[0]

    @property
    def width(self) -> int:
        """D: the width of a state."""
        return self.head.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def execution_mode(self) -> str:
        """In words, for a report: how it reads a tree."""
        shape = "exact shapes" if self.fixed is None else "fixed shapes"
        ways = [
            " and ".join(self._execution_modes()) or "eager",
            shape,
            self.quantised,
            "changed by LoRA" if self.adapted else None,
        ]
        return ", ".join(one for one in ways if one)

    def _execution_modes(self) -> Iterator[str]:
        if self.fixed is not None and self.fixed.compiled:
            yield "compiled"
        if self.fixed is not None and self.device.type == "cuda":
            why = self.fixed.capture_error
            yield "captured" if why is None else f"not captured ({why})"

    def new_cache(self, capacity: int) -> Any:
        """Keys and values of one text, room for `capacity` rows: a KVCache, or what does as it does."""
        if self.fixed is None:
            return self.batch_cache(capacity)
        return self.fixed.new_cache(self.lm.config.num_hidden_layers, capacity)

    def batch_cache(self, capacity: int) -> Any:
        """Of several texts side by side: the rows that reads of a fixed shape lend are those of one."""
        if self.layer_devices is not None:
            return MultiDeviceCache(self.layer_devices, capacity)
        return KVCache(self.lm.config.num_hidden_layers, capacity)

    @torch.inference_mode()
    def read(self, tokens_L: Tensor, cache: KVCache) -> ModelOutput:
        """Read a run of tokens after what the cache holds; logits come back for the last of them only.

        Only the last, because the logits of a 2k prompt over 32k words would be 262 MB nobody looks at.
        """
        start = cache.length
        positions_L = torch.arange(start, start + len(tokens_L), device=self.device)
        states_LD = self._forward(tokens_L, positions_L, None, cache)
        return ModelOutput(states_LD, self.head(states_LD[-1:, : self.width]))

    @torch.inference_mode()
    def read_tree(self, tree: TokenTree, cache: KVCache) -> ModelOutput:
        """Read a tree of guesses in one pass; a node sees the committed text, its ancestors and itself.

        Node n stands at position cache.length + depth(n), so that the root takes the next free position.
        """
        if self.fixed is not None:
            return ModelOutput(*self.fixed(self._states_and_logits, tree, cache, self.dtype))
        start = cache.length
        # A single node sees all there is: without a mask it reads as stock decoding does, by the fastest kernel.
        mask_NM = tree.attention_mask(start, self.dtype) if len(tree) > 1 else None
        states_ND = self._forward(tree.tokens_N, start + tree.depths_N, mask_NM, cache)
        return ModelOutput(states_ND, self._logits(states_ND))

    @torch.inference_mode()
    def read_tree_level(self, tokens_K: Tensor, positions_K: Tensor, seen_KM: Tensor, cache: KVCache) -> ModelOutput:
        """Read words side by side behind what the cache holds, guesses included; seen_KM (True) says which of its
        rows, and which of the new ones, each word may see. For drafters that grow a tree level by level."""
        states_KD = self._forward(tokens_K, positions_K, self._additive_mask(seen_KM), cache)
        return ModelOutput(states_KD, self.head(states_KD))

    def _states_and_logits(self, *read: Any) -> tuple[Tensor, Tensor]:
        states_ND = self._forward(*read)
        return states_ND, self._logits(states_ND)

    def _logits(self, states_ND: Tensor) -> Tensor:
        return self.head(states_ND if len(self.taps) == 1 else states_ND[:, : self.width])

    def _forward(
        self, tokens_N: Tensor, positions_N: Tensor, mask_NM: Tensor | None, cache: KVCache | StaticCacheView
    ) -> Tensor:
        output = self.lm.base_model(
            input_ids=tokens_N[None],
            position_ids=positions_N[None],
            # 4-D and additive: eager attention would silently *add* a bool mask as 0 and 1.
            attention_mask=None if mask_NM is None else self.layer_masks(mask_NM[None, None]),
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=len(self.taps) > 1,
        )
        return self._select_layers(output)[0]

    @torch.no_grad()
    def hidden_states(self, tokens_BL: Tensor, mask_BL: Tensor, position_ids_BL: Tensor | None = None) -> Tensor:
        """As `hidden_states_with_grad`; nothing learns from them."""
        return self.hidden_states_with_grad(tokens_BL, mask_BL, position_ids_BL)

    def hidden_states_with_grad(
        self, tokens_BL: Tensor, mask_BL: Tensor, position_ids_BL: Tensor | None = None
    ) -> Tensor:
        """States_BLD of right-padded rows, without a cache, for training; mask_BL is 1 on real tokens.

        position_ids_BL: of every position in its own text (nn/packs.py), where a row may hold several: each is read
        as if
        it stood alone.
        """
        inputs = {"attention_mask": mask_BL} | ({} if position_ids_BL is None else self.packed_inputs(position_ids_BL))
        output = self.lm.base_model(
            input_ids=tokens_BL, use_cache=False, output_hidden_states=len(self.taps) > 1, **inputs
        )
        return self._select_layers(output)

    def layer_masks(self, mask_B1QM: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the additive mask as the layers take it: one, or one per layer type for sliding windows."""
        return mask_B1QM if self.window is None else self.window(mask_B1QM)

    def packed_inputs(self, position_ids_BL: Tensor) -> dict[str, Any]:
        """What stock transformers must be told to read packs of texts; nothing where every row is one text."""
        seen_B1LL = packed_causal_mask(position_ids_BL)
        if seen_B1LL is None:
            return {}
        return {"attention_mask": self.layer_masks(self._additive_mask(seen_B1LL)), "position_ids": position_ids_BL}

    def _additive_mask(self, seen_X: Tensor) -> Tensor:
        """A mask as stock transformers take it: 0 where seen, the least number elsewhere."""
        mask_X = torch.zeros(seen_X.shape, dtype=self.dtype, device=self.device)
        return mask_X.masked_fill_(~seen_X, torch.finfo(self.dtype).min)

    def _select_layers(self, output: Any) -> Tensor:
        """The states of all taps, side by side."""
        if len(self.taps) == 1:
            return output.last_hidden_state
        return torch.cat([output.last_hidden_state, *(output.hidden_states[tap] for tap in self.taps[1:])], dim=-1)

    def fingerprint(self) -> dict[str, Any]:
        """What a drafter depends on: made for one base, it must refuse another.

        The weights enter by a sample of every tensor as it was stored, so that two bases in one folder name are
        told apart in milliseconds, and one base in float32 and in float16 is the same.
        """
        return {
            "base": self.name,
            "revision": self.revision,
            "weights": self.weights_hash,
            **({"quantised": self.quantised} if self.quantised else {}),
            "width": self.width,
            "vocabulary": self.vocabulary,
            "taps": self.taps,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "chat_template": text_hash(getattr(self.tokenizer, "chat_template", None) or ""),
            **({"adapter": self.adapted} if self.adapted else {}),
        }


def refuse_taps(taps: Sequence[str | int], layers: int) -> None:
    inner = taps[1:]
    if list(taps[:1]) != ["last"] or any(not isinstance(tap, int) or not 0 <= tap < layers for tap in inner):
        raise InputError(
            f'base.taps={list(taps)} must be "last" and then layers from 0 to {layers - 1}, as in [last,{layers // 2}]'
        )


def stop_token_ids(lm: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer: the generation config's, else the config's, else the tokenizer's."""
    for source in (getattr(lm, "generation_config", None), lm.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, Sequence) else [found])
    return frozenset()
