"""Checks that a base model computes the logits of a token tree exactly.

Some architectures are refused by their config, others only by forward passes. The logits that transformers computes for
a short text right after loading are kept; after casting, merging, quantising or distribution over devices the base must
still compute them, and it must give the paths of a forked tree the logits that the two texts have by themselves.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import InputError, first_line

# Frequencies that depend on the length of the forward pass: a tree is longer than the single tokens of stock decoding.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Config keys that change logits after the lm_head, with the value that has no effect. They are refused by the config
# because in half precision a forward pass cannot distinguish a soft cap from rounding.
LOGIT_TRANSFORMS = {"final_logit_softcapping": None, "logits_scaling": 1, "logit_scale": 1}
FULL_PRECISION = (torch.float32, torch.float64)
MIN_CONTEXT_LENGTH = 5  # tokens: `refuse_inexact_tree_attention` reads four after a prefix


def checked_context_length(context_length: int | None, config: Any, name: str) -> int:
    """Return `context_length`, or for None the longest of the config; raise InputError for an impossible one."""
    # max_position_embeddings is the scaled length where the config scales rotary positions; some configs have none.
    most = getattr(config, "max_position_embeddings", None)
    length: Any = most if context_length is None else context_length
    valid = isinstance(length, int) and not isinstance(length, bool) and length >= MIN_CONTEXT_LENGTH
    if not valid or (most and length > most):
        bounds = f"from {MIN_CONTEXT_LENGTH} to {most}, the context of base {name}" if most else ">= 5"
        raise InputError(f"base.context_length must be an integer {bounds}, got {length}")
    return length


def refuse_unsupported_config(config: Any, name: str) -> None:
    """Raise InputError for a config whose architecture cannot verify a token tree exactly through attention masks."""
    for key, neutral in LOGIT_TRANSFORMS.items():
        value = getattr(config, key, None)
        if value not in (None, neutral):
            raise InputError(
                f"base {name} has {key}={value}: its logits are scaled after the lm_head, which drafters and trees "
                "apply alone; use another base"
            )
    reasons = set(getattr(config, "layer_types", None) or []) - SUPPORTED_LAYER_TYPES
    if not getattr(config, "num_attention_heads", None):
        reasons.add("no attention heads")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):  # one per layer type
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            reasons.add(f"{parameters['rope_type']} rotary positions, whose angles change as the text grows")
    if reasons:
        raise InputError(
            f"base {name} has {', '.join(sorted(reasons))}: a token tree cannot be verified and rolled back exactly; "
            "use a base with full or sliding attention in every layer"
        )


@dataclass(frozen=True)
class ReferenceLogits:
    """The logits that transformers computes with a model as it was loaded. logits_LV: in float32 on the host."""

    tokens_L: Tensor
    logits_LV: Tensor
    dtype: torch.dtype

    @classmethod
    @torch.inference_mode()
    def of(cls, lm: Any, name: str, length: int = 16) -> ReferenceLogits:
        """Run one short forward pass on the device and in the dtype of the loaded model."""
        length = min(length, int(getattr(lm.config, "max_position_embeddings", length)))
        vocabulary = lm.get_input_embeddings().weight.shape[0]
        tokens_L = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(1))
        # An offloaded model has no device; accelerate's hooks take tokens from the host.
        device = lm.device if lm.device.type != "meta" else torch.device("cpu")
        attention = lm.config._attn_implementation
        # Where the model is on the CPU, for which flash attention has no kernels.
        lacks_kernels = device.type == "cpu" and "flash" in str(attention)
        try:
            if lacks_kernels:
                lm.set_attn_implementation("sdpa")
            logits_LV = lm(tokens_L[None].to(device)).logits[0]
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputError(
                f"base {name} as transformers loads it cannot read {length} tokens ({first_line(error)}); use another "
                "base, or another base.attention="
            ) from error
        finally:
            if lacks_kernels:
                lm.set_attn_implementation(attention)
        return cls(tokens_L, logits_LV.float().cpu(), logits_LV.dtype)


@torch.inference_mode()
def refuse_changed_logits(base: Any, reference: ReferenceLogits) -> None:
    """Raise InputError unless the base still computes the reference logits, up to the rounding of its dtype."""
    ours_LV = base.lm(reference.tokens_L[None].to(base.device)).logits[0].float().cpu()
    theirs_LV = reference.logits_LV
    difference = (ours_LV - theirs_LV).square().mean().sqrt() / theirs_LV.std()
    if not difference < (1e-3 if {base.dtype, reference.dtype} <= set(FULL_PRECISION) else 0.25):
        raise InputError(
            f"base {base.name} as {base.dtype} is not what transformers loaded as {reference.dtype} (logits differ by "
            f"{difference:.2g} of their spread): its weights did not survive the cast; choose another dtype= or base"
        )


@torch.inference_mode()
def refuse_inexact_tree_attention(base: Any, length: int = 320) -> None:
    """Raise InputError unless the paths of a forked tree have the logits of the two texts read one by one.

    This finds local attention, position biases and scaled logits that no config key states.
    """
    rng = torch.Generator().manual_seed(0)
    if base.window is not None:  # a shorter prefix would be seen whole, whatever the mask does beyond the window
        length = max(length, base.window.window + 64)
    length = min(length, base.context_length - 4)
    text = torch.randint(base.vocabulary, (length + 4,), generator=rng).to(base.device)
    prefix, (root, left, right, below) = text[:length], text[length:]
    paths_PK, lengths_P = torch.stack([left, below, right, right]).reshape(2, 2), torch.tensor([2, 1]).to(root.device)
    tree = TokenTree.from_paths(root, paths_PK, lengths_P, 9)
    try:
        cache = base.new_cache(length + 8)
        base.read(prefix, cache)
        forked_NV = base.read_tree(tree, cache).logits_NV[-2:].float()
        paths = (torch.stack([root, left, below]), torch.stack([root, right]))
        alone_NV = torch.stack([last_logits(base.lm, torch.cat([prefix, path])) for path in paths])
    except InputError:  # such as a failed compilation
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
        raise InputError(
            f"base {base.name} cannot read a token tree through an attention mask ({first_line(error)}); use "
            "another base"
        ) from error
    difference = (forked_NV - alone_NV).abs().max() / alone_NV.std()
    if not difference < (1e-2 if base.dtype in FULL_PRECISION else 0.5):
        raise InputError(
            f"base {base.name} computes other logits for a token tree than for the texts in it (they differ by "
            f"{difference:.2g} of their spread): its attention is local or biased by distance, or its logits are "
            "scaled; use another base"
        )


def last_logits(lm: Any, tokens_L: Tensor) -> Tensor:
    # The logits of all positions over a vocabulary of 256k would be gigabytes.
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(lm.forward).parameters else {}
    return lm(tokens_L[None], **options).logits[0, -1].float()
