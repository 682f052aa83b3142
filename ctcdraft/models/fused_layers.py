"""The decoder layers of a stock model as plain blocks that share its weights, for steps of fixed shapes.

A stock Llama layer is 37 launches, most of them some microseconds of arithmetic on little memory; a block has ten.
Only models of MODEL_TYPES have them: outputs on random inputs of some hundred tokens would not show what another model
does differently far behind. A block is used only if its outputs agree with those of the layer that it
replaces (nn/base_layer.py), and the blocks only if all of them, with embeddings and the last norm, agree with the whole
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.decoding.static_cache import StaticCache
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.nn.base_layer import BASE_PARAMETER_NAMES, base_block_config, decoder_layers, try_copy_layer
from ctcdraft.nn.block_config import BlockConfig
from ctcdraft.nn.block_operations import add_linear
from ctcdraft.nn.rotary import Rotary
from ctcdraft.nn.transformer import CausalBlock
from ctcdraft.nn.weight_layout import pack_rows_

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of hidden states, relative; in half precision the layers round
HALF_TOLERANCE = 0.1
CHECKED_TOKENS = 256


class FusedLayers:
    """Runs a base's layers over rows of a StaticCache.

    Args:
        states: numbers of the layers whose outputs are returned beside the last hidden states; 0 are the embeddings.
    """

    def __init__(self, lm: Any, blocks: Sequence[Any], rotary: Rotary, states: Sequence[int]) -> None:
        self.embedding, self.norm = lm.get_input_embeddings(), lm.base_model.norm
        self.blocks, self.rotary, self.states = blocks, rotary, states

    def __call__(self, tokens_N: Tensor, position_ids_N: Tensor, seen_NM: Tensor, cache: StaticCache) -> Tensor:
        """Return hidden states_ND, those of other layers behind. seen_NM: which rows of the cache each token sees."""
        x_1ND, kept = self.embedding(tokens_N)[None], dict[int, Tensor]()
        rotation = self.rotary.at(position_ids_N)
        mask_XM = self.blocks[0].attention.mask_of(seen_NM, x_1ND.dtype)
        for number, block in enumerate(self.blocks):
            if number in self.states:
                kept[number] = x_1ND.clone()  # the layer adds to it in place
            mixed_1NE = block.attention(block.attention_norm(x_1ND), rotation, cache, mask_XM, number)
            x_1ND = add_linear(x_1ND, block.attention.out, mixed_1NE)
            x_1ND = add_linear(x_1ND, block.mlp.down, block.mlp.inner(block.mlp_norm(x_1ND)))
        x_1ND = self.norm(x_1ND)
        return torch.cat([x_1ND, *(kept[number] for number in self.states)], dim=-1)[0] if kept else x_1ND[0]


def read_static_tree(base: Any, tree: TokenTree, cache: StaticCache) -> tuple[Tensor, Tensor]:
    """Return hidden states_ND and logits_NV of a tree of fixed size: by compiled, fused or the stock layers."""
    position_ids_N, seen_NM = cache.append_tree(tree)
    tokens_N = tree.tokens_N.clamp(min=0)
    if base.static_shapes is not None and (compiled := base.static_shapes.compiled_forward) is not None:
        mask_NM = base.additive_mask(seen_NM)
        return compiled(base.states_and_logits, tokens_N, position_ids_N, mask_NM, cache.view())
    states_ND = read_static_rows(base, tokens_N, position_ids_N, seen_NM, cache)
    return states_ND, base.logits(states_ND)


def read_padded_text(base: Any, tokens_P: Tensor, count_1: Tensor, cache: StaticCache) -> Tensor:
    """Append a text of which count_1 tokens are real to the cache; return hidden states_PD. It is never compiled."""
    rows = cache.append(len(tokens_P), tokens_P.device, count_1=count_1)
    states_PD = read_static_rows(base, tokens_P, rows.position_ids_N, rows.seen_by_text(), cache)
    rows.close()
    return states_PD


def read_static_rows(
    base: Any, tokens_N: Tensor, position_ids_N: Tensor, seen_NM: Tensor, cache: StaticCache
) -> Tensor:
    """Return hidden states_ND of tokens whose rows `cache` has chosen: by fused or the stock layers."""
    compiled = base.static_shapes is not None and base.static_shapes.compiled
    if not base.tried_to_fuse and base.device.type != "cpu" and not compiled:
        base.fuse_layers()
    if base.fused_layers is None:
        return base.read_rows(tokens_N, position_ids_N, seen_NM, cache)
    return base.fused_layers(tokens_N, position_ids_N, seen_NM, cache)


@torch.no_grad()
def fused_layers(base: Any) -> FusedLayers | None:
    """Return the layers of a base as blocks; None where they compute something else, or memory is short for copies."""
    try:
        return checked_layers(base)
    except torch.OutOfMemoryError:
        return None


def checked_layers(base: Any) -> FusedLayers | None:
    """Return the layers of a base as blocks if their outputs agree."""
    lm = base.lm
    if lm.config.model_type not in MODEL_TYPES or is_changed(lm):
        return None
    if any((base.layer_devices, base.window, base.quantization)):
        return None
    layers, shape = decoder_layers(lm), base_block_config(lm, base.context_length)
    rotary = Rotary(shape.frequencies, shape.positions, shape.rotary_scale)
    with torch.random.fork_rng(devices=[]):  # heads are drawn from the global random state
        probe = CausalBlock(shape, input_norm=True).to(base.device).eval()
    if any(not is_plain(probe, layer, number, shape, lm) for number, layer in enumerate(layers)):
        return None
    fused = FusedLayers(lm, [block_of(layer, shape) for layer in layers], rotary, base.aux_layers[1:])
    return fused if computes_the_same(fused, base) else None


def is_changed(lm: Any) -> bool:
    """Return whether calls of the model or of its parts do something else than their classes say."""
    if any(getattr(part.forward, "__func__", None) is not type(part).forward for part in lm.base_model.modules()):
        return True
    hooks = [
        hook
        for part in lm.base_model.modules()
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    ]
    # Those of transformers and of LayerInputs collect hidden states.
    origins = [getattr(getattr(hook, "func", hook), "__module__", "") for hook in hooks]
    return any(not origin.startswith(("transformers.", "ctcdraft.models.aux_layers")) for origin in origins)


def is_plain(probe: CausalBlock, layer: Any, number: int, shape: BlockConfig, lm: Any) -> bool:
    """Return whether a plain block with the layer's own weights computes what the layer does."""
    parameters = dict(layer.named_parameters())
    if any(type(part) is not nn.Linear for part in layer.modules() if hasattr(part, "in_features")):
        return False  # one with an adapter
    with torch.device("meta"):
        new: Any = type(layer)(lm.config, number)
    if [settings(part) for part in new.eval().modules()] != [settings(part) for part in layer.modules()]:
        return False  # a layer with another factor, window or epsilon than that of its config
    if try_copy_layer(probe, shape, probe, lm, number) is not None:
        return False
    theirs = {name: parameters.get(BASE_PARAMETER_NAMES[name]) for name in probe.state_dict()}
    # Other weights than the layer's own are those of another convention: of norms, of rotary pairs, of scales.
    return all(
        weight is not None and torch.equal(value, weight.float())
        for (name, value), weight in zip(probe.state_dict().items(), theirs.values(), strict=True)
    )


def settings(part: nn.Module) -> dict[str, Any]:
    """Return the numbers and names that a module was built with."""
    plain = (int, float, str, type(None))
    return {name: value for name, value in vars(part).items() if isinstance(value, plain) and name[0] != "_"}


def block_of(layer: Any, shape: BlockConfig) -> CausalBlock:
    """Return a block that shares the weights of a layer; those that one product computes become rows of one matrix."""
    attention, mlp = layer.self_attn, layer.mlp
    with torch.device("meta"):
        block = CausalBlock(replace(shape, positions=1), input_norm=True).eval()
    block.attention.packed = pack_rows_([attention.q_proj, attention.k_proj, attention.v_proj])
    block.mlp.packed = pack_rows_([mlp.gate_proj, mlp.up_proj])
    for name, _ in list(block.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(block.get_submodule(owner), leaf, layer.get_parameter(BASE_PARAMETER_NAMES[name]))
    return block


def computes_the_same(fused: FusedLayers, base: Any) -> bool:
    """Return whether the hidden states of a random text agree with those of the whole model."""
    rng = torch.Generator().manual_seed(0)
    count = min(CHECKED_TOKENS, base.context_length)
    tokens_N = torch.randint(base.vocabulary, (count,), generator=rng).to(base.device)
    cache = StaticCache(len(fused.blocks), count, base.context_length, base.device)
    rows = cache.append(count, base.device)
    found = fused(tokens_N, rows.position_ids_N, rows.seen_by_all(), cache)[:, : base.width].float()
    expected = base.lm.base_model(input_ids=tokens_N[None], use_cache=False).last_hidden_state[0].float()
    return bool((found - expected).norm() < TOLERANCE.get(base.dtype, HALF_TOLERANCE) * expected.norm())
