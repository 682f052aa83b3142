"""The base LLM: tokens in, states and logits out. Frozen, never patched; it knows nothing of drafts or text tasks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ctcdraft.adapters import attached, refuse_import
from ctcdraft.base_values import chat_template, looks_like_folder, refuse_absent_device, refuse_unknown_dtype, stored
from ctcdraft.decoding.fixed import FixedReads
from ctcdraft.decoding.kv_cache import KVCache, Written
from ctcdraft.decoding.placed_cache import PlacedCache
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import InputError, first_line
from ctcdraft.fetching import fetched, refuse_quantised
from ctcdraft.fingerprints import tensors_hash, text_hash, tokenizer_hash, weights_hash
from ctcdraft.nn.few_rows import lay_for_few_rows
from ctcdraft.nn.packs import own_text
from ctcdraft.nn.sliding import SlidingWindow
from ctcdraft.placing import Placing, lay_out, places_of
from ctcdraft.readable import Reference, length_within, refuse_changed, refuse_unfaithful, refuse_unreadable


@dataclass(frozen=True)
class Read:
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
        refuse_unreadable(lm.config, name)
        if quantised is None:
            refuse_quantised(lm, name)
        refuse_taps(taps, lm.config.num_hidden_layers)
        self.taps = list(taps)
        self.fixed: FixedReads | None = None  # None: every read has the shape of its tree
        self.quantised = quantised
        self.adapted: str | None = None  # the hash of what was trained along with a head, and changes what it says
        self.layer_devices: list[torch.device] | None = None  # of every layer; None: all on one device
        self.lm = lm.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.head: Any = lm.get_output_embeddings()
        self.embedding: Any = lm.get_input_embeddings()
        self.context_length = length_within(context_length, lm.config, name)
        self.window = SlidingWindow.of(lm.config, self.context_length)
        self.stop_token_ids = stop_tokens(lm, tokenizer)
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
        lay_for_few_rows(self.lm)
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
            return PlacedCache(self.layer_devices, capacity)
        return KVCache(self.lm.config.num_hidden_layers, capacity)

    @torch.inference_mode()
    def read(self, tokens_L: Tensor, cache: KVCache) -> Read:
        """Read a run of tokens after what the cache holds; logits come back for the last of them only.

        Only the last, because the logits of a 2k prompt over 32k words would be 262 MB nobody looks at.
        """
        start = cache.length
        positions_L = torch.arange(start, start + len(tokens_L), device=self.device)
        states_LD = self._forward(tokens_L, positions_L, None, cache)
        return Read(states_LD, self.head(states_LD[-1:, : self.width]))

    @torch.inference_mode()
    def read_tree(self, tree: TokenTree, cache: KVCache) -> Read:
        """Read a tree of guesses in one pass; a node sees the committed text, its ancestors and itself.

        Node n stands at position cache.length + depth(n), so that the root takes the next free position.
        """
        if self.fixed is not None:
            return Read(*self.fixed(self._states_and_logits, tree, cache, self.dtype))
        start = cache.length
        # A single node sees all there is: without a mask it reads as stock decoding does, by the fastest kernel.
        mask_NM = tree.attention_mask(start, self.dtype) if len(tree) > 1 else None
        states_ND = self._forward(tree.tokens_N, start + tree.depths_N, mask_NM, cache)
        return Read(states_ND, self._logits(states_ND))

    @torch.inference_mode()
    def read_tree_level(self, tokens_K: Tensor, positions_K: Tensor, seen_KM: Tensor, cache: KVCache) -> Read:
        """Read words side by side behind what the cache holds, guesses included; seen_KM (True) says which of its
        rows, and which of the new ones, each word may see. For drafters that grow a tree level by level."""
        states_KD = self._forward(tokens_K, positions_K, self._additive_mask(seen_KM), cache)
        return Read(states_KD, self.head(states_KD))

    def _states_and_logits(self, *read: Any) -> tuple[Tensor, Tensor]:
        states_ND = self._forward(*read)
        return states_ND, self._logits(states_ND)

    def _logits(self, states_ND: Tensor) -> Tensor:
        return self.head(states_ND if len(self.taps) == 1 else states_ND[:, : self.width])

    def _forward(
        self, tokens_N: Tensor, positions_N: Tensor, mask_NM: Tensor | None, cache: KVCache | Written
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

    def hidden_states_with_grad(self, tokens_BL: Tensor, mask_BL: Tensor, position_ids_BL: Tensor | None = None) -> Tensor:
        """States_BLD of right-padded rows, without a cache, for training; mask_BL is 1 on real tokens.

        position_ids_BL: of every position in its own text (nn/packs.py), where a row may hold several: each is read as if
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
        seen_B1LL = own_text(position_ids_BL)
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


def load_base(
    path: str,
    dtype: str,
    device: str,
    name: str | None = None,
    revision: str | None = None,
    attention: str = "sdpa",
    context_length: int | None = None,
    chat_template_file: str | None = None,
    adapter: str | None = None,
    taps: Sequence[str | int] = ("last",),
    config: Any = None,
    quantised: str | None = None,
    fixed: bool = False,
    device_map: Any = None,
    max_memory: Any = None,
    offload_folder: str | None = None,
    adapted: str | None = None,
    zero3: bool = False,
    compiled: bool = False,
) -> BaseLM:
    """Load a base from a folder or a hub id; `adapter` is a peft LoRA folder that is merged before freezing.

    taps: "last", then the layers whose states drafters see too (0: the embeddings, k: what layer k gives out).
    config: for plans without the weights (paper.py); what is loaded brings its own.
    quantised: one of QUANTISED, which needs its package. fixed: trees
    are padded to few shapes, and on a GPU each of these is captured as a graph. compiled: by torch, once a shape.
    device_map and what follows it: the layers lie over several devices (placing.py); states and logits are on `device`
    all the same. adapted: the folder of what a run has trained along with its head (RUN/adapter), merged like
    `adapter`; with it the base is another one, and says so. zero3: in shards over the processes of torchrun
    (sharding.py).
    """
    import transformers

    refuse_unknown_dtype(dtype)
    refuse_absent_device(device)
    reads = FixedReads.of(fixed, compiled)
    transformers.utils.logging.disable_progress_bar()
    placing = Placing(device_map, max_memory, offload_folder) if device_map is not None else None
    changes = {"fixed": fixed, "adapter": adapter, "adapted": adapted}
    refuse_spread(placing is not None, zero3, bool(quantised), changes)
    if looks_like_folder(path) and not (Path(path) / "config.json").is_file():
        raise InputError(f"no base LLM at {path}: there is no config.json; give a Hugging Face folder as base.path=")
    if zero3:
        from ctcdraft.sharding import load_sharded

        named = name or Path(path).name
        return load_sharded(path, dtype, device, named, revision, attention, context_length, chat_template_file, taps)
    lm, tokenizer = fetched(path, revision, attention, stored(dtype, device, quantised, placing))
    if adapter is not None:
        lm = attached(lm, adapter)
    reference = Reference.of(lm, path)
    if adapter is not None:
        lm = lm.merge_and_unload()
    if placing is not None:
        lay_out(lm, device)
    template = chat_template(chat_template_file) if chat_template_file else None
    base = BaseLM(lm, tokenizer, name or Path(path).name, revision, context_length, template, taps, quantised)
    if placing is not None:
        devices = places_of(lm, base.device)
        base.layer_devices = devices if len(set(devices)) > 1 else None
    elif quantised is None:  # what is quantised was loaded where it stays, and has a type of its own
        base = base.to(device, getattr(torch, dtype))
    refuse_changed(base, reference)
    if adapted is not None:
        adapt(base, Path(adapted))
    base.fixed = reads
    refuse_unfaithful(base)
    return base


def refuse_spread(placed: bool, sharded: bool, quantised: bool, changes: Mapping[str, Any]) -> None:
    """Raise InputError where a base over several devices or processes is to be changed, too, by values of `changes`."""
    changed = [key for key, value in changes.items() if value]
    if placed and changed:
        raise InputError(f"base.{changed[0]}= is for a base on one device; leave it out, or base.device_map=")
    if sharded and (placed or quantised or changed):
        raise InputError("base.zero3=true takes the base as it is; leave out its device_map, quantised, fixed, adapter")


def adapt(base: BaseLM, folder: Path) -> None:
    """Merge what a run has trained along with its head into the base that it began with."""
    import peft
    from safetensors.torch import load_file

    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise InputError(f"there is no {weights}; give the adapter/ of a run of adapt=lora as base.adapted=")
    try:
        base.adapted = tensors_hash(load_file(weights))
        refuse_import(peft.PeftConfig.from_pretrained(str(folder)), str(folder))
        peft.PeftModel.from_pretrained(base.lm, str(folder)).merge_and_unload()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"cannot merge {folder} into {base.name}: {first_line(error)}; check base.adapted=") from error
    base.lm.eval().requires_grad_(False)
    base.name += ", changed by LoRA"


def refuse_taps(taps: Sequence[str | int], layers: int) -> None:
    inner = taps[1:]
    if list(taps[:1]) != ["last"] or any(not isinstance(tap, int) or not 0 <= tap < layers for tap in inner):
        raise InputError(
            f'base.taps={list(taps)} must be "last" and then layers from 0 to {layers - 1}, as in [last,{layers // 2}]'
        )


def stop_tokens(lm: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer: the generation config's, else the config's, else the tokenizer's."""
    for source in (getattr(lm, "generation_config", None), lm.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, Sequence) else [found])
    return frozenset()


def unconfigured(lm: Any) -> Any:
    """A second handle on the same weights with an empty generation config: `generate` fills what it is not told from
    the model's own, such as top_p or a repetition penalty, and would then say other words than its logits do."""
    handle = copy.copy(lm)
    handle.generation_config = type(lm.generation_config)()
    return handle
