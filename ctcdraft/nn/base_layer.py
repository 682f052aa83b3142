"""Initialisation of a draft head's layers from the base's last layer, accepted only if the outputs agree.

Names and shapes do not determine what a layer computes: a norm may scale by 1 + w, rotary pairs may be neighbours, a
layer may have no rotary positions or multiply its residuals. So the weights are converted to a plain layer under each
of a few conventions, and the first whose outputs on random inputs equal those of the base's own layer is kept. If none
agrees the head's layer keeps its random weights, and the reason is returned for the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.nn.block_config import ACTIVATIONS, BlockConfig, RMSNorm
from ctcdraft.nn.rotary import BaseRotary, half_split_rows

COPY_TOLERANCE = 2e-3  # relative to the norm of what the layer adds to its input; both sides compute in float32
SAMPLE_LENGTH = 12  # positions, spread out: near the start scaled frequencies give nearly the same angles
MAX_SAMPLE_POSITION = 512  # the float32 rounding of the base's angles grows with the position

# Our parameter -> the corresponding parameter of a base's layer.
BASE_PARAMETER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.bias": "self_attn.v_proj.bias",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
INPUT_NORM = "attention_norm.weight"  # EAGLE's layer has none

# The head's layer under a causal mask: hidden states [1, L, D], position ids [L] -> output.
BlockForward = Callable[[Tensor, Tensor], Tensor]


def base_block_config(lm: Any, context_length: int) -> BlockConfig:
    """Return the shape of the base's own layers: sizes, rotary frequencies, head norms, biases and activation."""
    plain, config = BlockConfig.of(lm.config, context_length), lm.config
    layers = decoder_layers(lm)
    parameters = dict(layers[-1].named_parameters()) if layers else {}
    norm = parameters.get("self_attn.q_norm.weight")
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    shape = replace(
        plain,
        qk_norm=norm is not None and tuple(getattr(norm, "ds_shape", norm.shape)) == (plain.head_width,),
        qkv_bias=all(f"self_attn.{part}_proj.bias" in parameters for part in "qkv"),
        activation=activation if activation in ACTIVATIONS else plain.activation,
    )
    rotary = BaseRotary.of(lm)
    if rotary is None or 2 * len(rotary.frequencies) > plain.head_width:
        return shape
    unrotated = plain.head_width // 2 - len(rotary.frequencies)
    return replace(shape, frequencies=(*rotary.frequencies, *[0.0] * unrotated), rotary_scale=rotary.scale)


def decoder_layers(lm: Any) -> list[nn.Module]:
    return list(getattr(lm.base_model, "layers", []))


def init_from_base_layer(block: nn.Module, shape: BlockConfig, forward: BlockForward, lm: Any) -> tuple[bool, str]:
    """Copy the base's last layer, or the one before, into the block if the outputs agree; else leave it as it is.

    Return whether it was copied, and the line for the plan.
    """
    layers, note = decoder_layers(lm), ""
    if getattr(lm.base_model, "rotary_emb", None) is None:
        note = f"; no rotary embedding of the base is known, the head's has theta {shape.rope_theta:,.0f}"
    if not layers:
        return False, f"at random (the base has no list of decoder layers{note})"
    if any(value.is_meta for value in (*layers[-1].parameters(), *block.parameters())):
        return False, "from the base's last layer if the outputs agree (its weights are not loaded)"
    reasons: list[str] = []
    # The layer before too, because random weights cost many training steps: the last layer of SmolLM3, for example, has
    # no rotary positions.
    for number in range(len(layers) - 1, max(-1, len(layers) - 3), -1):
        reason = try_copy_layer(block, shape, forward, lm, number)
        if reason is None:
            which = "last layer" if not reasons else f"layer {number + 1} of {len(layers)}"
            return True, f"from the base's {which} ({'; '.join(['outputs agree', *reasons])})"
        reasons.append(f"its last layer {reason}")
    return False, f"at random ({reasons[0]}{note})"


@torch.no_grad()
def try_copy_layer(block: nn.Module, shape: BlockConfig, forward: BlockForward, lm: Any, number: int) -> str | None:
    """Copy this layer of the base into the block if the outputs agree and return None; else return the reason."""
    original = {name: value.clone() for name, value in block.state_dict().items()}
    layer = decoder_layers(lm)[number]
    base_weights = {name: dequantized_weight(value) for name, value in layer.state_dict().items()}
    if reason := unmatched_parameters(base_weights, original, shape):
        return reason
    device = next(block.parameters()).device
    x_BLD, position_ids_L = random_hidden_states(shape, device)
    try:
        float32_copy = float32_layer(layer, number, lm.config, device, identity=INPUT_NORM not in original)
        expected_BLD = run_base_layer(float32_copy, lm, x_BLD, position_ids_L)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        return f"cannot be run by itself: {type(error).__name__}"
    errors, weights = [], {name: base_weights[BASE_PARAMETER_NAMES[name]] for name in original}
    for offset, interleaved in product((0.0, 1.0), (False, True)):  # the plainest convention first
        block.load_state_dict(convert_weights(weights, float32_copy, shape, offset, interleaved))
        errors.append(float((forward(x_BLD, position_ids_L) - expected_BLD).norm() / (expected_BLD - x_BLD).norm()))
        if errors[-1] < COPY_TOLERANCE:
            return None
    block.load_state_dict(original)
    return f"computes something else: the output of a copy is off by {min(errors):.2g} of what the layer adds"


def unmatched_parameters(theirs: dict[str, Tensor], ours: dict[str, Tensor], shape: BlockConfig) -> str | None:
    """Split fused weights of the base's layer in place; return how its parameters differ, None if they match."""
    widths = [heads * shape.head_width for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    fused = (("self_attn", "qkv", tuple("qkv"), widths), ("mlp", "gate_up", ("gate", "up"), [shape.inner] * 2))
    for part, name, pieces, rows in fused:
        weight = theirs.get(f"{part}.{name}_proj.weight")
        if weight is not None and len(weight) == sum(rows):
            del theirs[f"{part}.{name}_proj.weight"]
            split = zip(pieces, weight.split(rows), strict=True)
            theirs |= {f"{part}.{one}_proj.weight": value for one, value in split}
    wanted = {BASE_PARAMETER_NAMES[name]: value.shape for name, value in ours.items()}
    spare = {BASE_PARAMETER_NAMES[INPUT_NORM]} - set(wanted)
    lost, lacking = set(theirs) - set(wanted) - spare, set(wanted) - set(theirs)
    if lost or lacking:
        names = sorted(lost or lacking)
        some = f"{', '.join(names[:2])}{' and more' if len(names) > 2 else ''}"
        return f"has {some}, which a copy has no place for" if lost else f"lacks {some}, which a copy needs"
    other = [name for name, sizes in wanted.items() if theirs[name].shape != sizes]
    return f"has {other[0]} in another shape" if other else None


def convert_weights(
    weights: dict[str, Tensor], layer: Any, shape: BlockConfig, offset: float, interleaved: bool
) -> dict[str, Tensor]:
    """Return a base's weights, under our names, as those of a plain layer.

    Args:
        layer: the base's, whose attributes are two factors (Granite): `scaling` of scores, `residual_multiplier`.
        offset: added to norm weights.
        interleaved: the rotary pairs of the base are neighbours.
    """
    converted: dict[str, Tensor] = {}
    rotated = 2 * sum(frequency != 0 for frequency in shape.frequencies)
    order = half_split_rows(shape.head_width, rotated, interleaved)
    reordered = not torch.equal(order, torch.arange(shape.head_width))
    default = shape.head_width**-0.5
    query_scale = float(getattr(layer.self_attn, "scaling", default)) / default
    output_scale = float(getattr(layer, "residual_multiplier", 1))
    # Scores are scaled in the queries' norm where there is one, because it would undo a scale of the projection.
    scaled = "attention.query_norm" if "attention.query_norm.weight" in weights else "attention.query."
    for name, weight in weights.items():
        if offset and "norm" in name:
            weight = weight.float() + offset
        if reordered and name.startswith(("attention.query", "attention.key")):
            weight = weight.unflatten(0, (-1, shape.head_width))[:, order].flatten(0, 1)
        if query_scale != 1 and name.startswith(scaled):
            weight = weight.float() * query_scale
        if output_scale != 1 and name in ("attention.out.weight", "mlp.down.weight"):
            weight = weight.float() * output_scale
        converted[name] = weight
    return converted


def random_hidden_states(shape: BlockConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random inputs [1, L, D] and position ids [L]."""
    rng = torch.Generator().manual_seed(0)
    # With mean 0.5 to expose norms that subtract the mean.
    x_BLD = torch.randn(1, SAMPLE_LENGTH, shape.width, generator=rng) + 0.5
    last = min(shape.positions, MAX_SAMPLE_POSITION) - 1
    position_ids_L = torch.linspace(0, 1, SAMPLE_LENGTH).square().mul(last).long()
    return x_BLD.to(device), position_ids_L.to(device)


def float32_layer(layer: nn.Module, number: int, config: Any, device: torch.device, identity: bool) -> Any:
    """Return a float32 copy of the base's layer. identity: without its first norm."""
    # A copy, because calls of the original run the hooks of device maps and shards.
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    with torch.device("meta"):  # initialisation here must not advance the random state that heads are drawn from
        copied: Any = type(layer)(config, number)
    for name, value in [*layer.state_dict().items(), *layer.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        part = copied.get_submodule(owner)
        is_float = value.is_floating_point()
        value = dequantized_weight(value).to(device, torch.float32, copy=True) if is_float else value.to(device)
        delattr(part, leaf)  # raises for a name that the class does not have
        part.register_buffer(leaf, value)
    if identity:
        copied.input_layernorm = nn.Identity()
    return copied.eval()


def run_base_layer(layer: Any, lm: Any, x_BLD: Tensor, position_ids_L: Tensor) -> Tensor:
    size, lowest = (1, 1, len(position_ids_L), len(position_ids_L)), torch.finfo(torch.float32).min
    mask_BHLM = torch.full(size, lowest, device=x_BLD.device).triu(1)
    rotary = BaseRotary.of(lm)
    embeddings = None if rotary is None else rotary.embeddings(x_BLD, position_ids_L[None])
    output = layer(x_BLD, attention_mask=mask_BHLM, position_ids=position_ids_L[None], position_embeddings=embeddings)
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def copy_final_norm(norm: RMSNorm, lm: Any) -> bool:
    """Copy the base's final norm if it is an RMS norm with weight w or 1 + w; return whether it is."""
    base_norm: Any = getattr(lm.base_model, "norm", None)
    weight = getattr(base_norm, "weight", None)
    if weight is None or weight.shape != norm.weight.shape or weight.is_meta:
        return False
    rng = torch.Generator().manual_seed(0)
    x_LD = (torch.randn(SAMPLE_LENGTH, len(weight), generator=rng) + 0.5).to(weight.device)
    try:
        expected_LD = base_norm.forward(x_LD)  # no __call__, to bypass the hooks of device maps and shards
    except RuntimeError:  # such as a LayerNorm in half precision
        return False
    for scale_D in (weight, weight.float() + 1):
        ours_LD = F.rms_norm(x_LD, norm.normalized_shape, scale_D.float(), norm.eps)
        if (ours_LD - expected_LD).norm() < COPY_TOLERANCE * expected_LD.norm():
            norm.weight.copy_(scale_D)
            return True
    return False


def dequantized_weight(value: Any) -> Tensor:
    # Quantised tensor subclasses store codes and scales.
    return value.dequantize() if hasattr(value, "__tensor_flatten__") else value


def zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
