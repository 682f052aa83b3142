"""Which bases read a tree exactly: what a config tells, and what only a forward pass shows.

Before a loaded model is cast, moved, merged or spread, transformers' own forward pass over a short text is kept; the
base must give the same logits afterwards, and must read a forked tree as it reads the two texts in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import InputError, first_line

if TYPE_CHECKING:
    from ctcdraft.models.base_model import BaseLM

LENGTH_DEPENDENT_ROPE = (
    "dynamic",
    "longrope",
)  # by the length of what is read: a tree reaches further than its first word
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}  # layer types
# What a config does to logits after the head, and the value that does nothing. In half precision a cap is too small a
# difference for a forward pass to tell from rounding, but the distribution is another one.
LOGIT_TRANSFORMS = {"final_logit_softcapping": None, "logits_scaling": 1, "logit_scale": 1}
FULL_PRECISION = (torch.float32, torch.float64)
MIN_CONTEXT_LENGTH = 5  # tokens of a context: `refuse_unfaithful` reads four behind a text


def checked_context_length(context_length: int | None, config: Any, name: str) -> int:
    """Return the context to use, None for the config's own; raise InputError for a length that it cannot have.

    The most is max_position_embeddings, which with rotary scaling is the scaled length. Bases whose positions are no
    embeddings have none.
    """
    most = getattr(config, "max_position_embeddings", None)
    wanted = most if context_length is None else context_length
    if (
        isinstance(wanted, bool)
        or not isinstance(wanted, int)
        or wanted < MIN_CONTEXT_LENGTH
        or (most and wanted > most)
    ):
        bounds = (
            f"an integer from {MIN_CONTEXT_LENGTH} to {most}, the context of base {name}"
            if most
            else "given as an integer"
        )
        raise InputError(f"base.context_length must be {bounds}, got {wanted}")
    return wanted


def refuse_unsupported_config(config: Any, name: str) -> None:
    """Raise InputError for a base whose attention cannot read a tree through masks, token for token the same."""
    kinds = set(getattr(config, "layer_types", None) or []) - SUPPORTED_LAYER_TYPES
    if not getattr(config, "num_attention_heads", None):
        kinds.add("no attention heads")
    kinds |= {
        f"{one} rotary positions, whose angles change as the text grows" for one in length_dependent_rope_types(config)
    }
    changed = {key: getattr(config, key, None) for key in LOGIT_TRANSFORMS}
    for key, value in changed.items():
        if value not in (None, LOGIT_TRANSFORMS[key]):
            raise InputError(
                f"base {name} has {key}={value}: its logits are scaled after the lm_head, which drafters and trees "
                "read by itself; use another base"
            )
    if kinds:
        raise InputError(
            f"base {name} has {', '.join(sorted(kinds))}: a tree of guesses cannot be read and rolled back "
            "exactly there; use a base with full or sliding attention in every layer"
        )


def length_dependent_rope_types(config: Any) -> set[str]:
    """Return the rotary types that depend on the length of the text; some configs have one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {str(one.get("rope_type")) for one in each} & set(LENGTH_DEPENDENT_ROPE)


@dataclass(frozen=True)
class ReferenceLogits:
    """What transformers computes with a model as it was loaded. logits_LV: of every token, in float32 on the host."""

    tokens_L: Tensor
    logits_LV: Tensor
    dtype: torch.dtype

    @classmethod
    @torch.inference_mode()
    def of(cls, lm: Any, name: str, length: int = 16) -> ReferenceLogits:
        """Run one short forward pass, where the model is and as it is: at most seconds of the minutes of loading."""
        length = min(length, int(getattr(lm.config, "max_position_embeddings", length)))
        vocabulary = lm.get_input_embeddings().weight.shape[0]
        tokens_L = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(1))
        # What is offloaded has no device of its own; accelerate's hooks take tokens from the host.
        device = lm.device if lm.device.type != "meta" else torch.device("cpu")
        try:
            with attention_available_on(lm, device):
                logits_LV = lm(tokens_L[None].to(device)).logits[0]
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputError(
                f"base {name} as transformers loads it cannot read {length} tokens ({first_line(error)}); use another "
                "base, or another base.attention="
            ) from error
        return cls(tokens_L, logits_LV.float().cpu(), logits_LV.dtype)


@contextmanager
def attention_available_on(lm: Any, device: torch.device) -> Iterator[None]:
    """Within, attention runs on this device: flash attention has no kernels for the CPU, where models are loaded."""
    before = lm.config._attn_implementation
    if device.type == "cpu" and "flash" in str(before):
        lm.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if lm.config._attn_implementation != before:
            lm.set_attn_implementation(before)


@torch.inference_mode()
def refuse_changed_logits(base: BaseLM, reference: ReferenceLogits) -> None:
    """Raise InputError unless the model gives the logits that it gave before it was cast, merged or spread."""
    ours_LV = base.lm(reference.tokens_L[None].to(base.device)).logits[0].float().cpu()
    theirs_LV = reference.logits_LV
    difference = (ours_LV - theirs_LV).square().mean().sqrt() / theirs_LV.std()
    if not difference < (1e-3 if {base.dtype, reference.dtype} <= set(FULL_PRECISION) else 0.25):
        raise InputError(
            f"base {base.name} as {base.dtype} is not what transformers loaded as {reference.dtype} (logits differ by "
            f"{difference:.2g} of their spread): its weights did not survive the cast; choose another dtype= or base"
        )


@torch.inference_mode()
def refuse_inexact_tree_attention(base: BaseLM, length: int = 320) -> None:
    """Raise InputError unless this base reads a forked tree as it reads the two texts in it.

    A config does not tell whether attention is local, positions enter as biases or logits are scaled after
    the head; a forward pass does. The text is longer than the windows in use, where the context allows.
    """
    rng = torch.Generator().manual_seed(0)
    if base.window is not None:
        length = max(length, base.window.window + 64)
    length = min(length, base.context_length - 4)
    text = torch.randint(base.vocabulary, (length + 4,), generator=rng).to(base.device)
    prefix, (root, left, right, below) = text[:length], text[length:]
    tree = TokenTree.from_paths(root, torch.stack([left, below, right, right]).reshape(2, 2), torch.tensor([2, 1]), 9)
    try:
        cache = base.new_cache(length + 8)
        base.read(prefix, cache)
        forked_NV = base.read_tree(tree, cache).logits_NV[-2:].float()
        paths = (torch.stack([root, left, below]), torch.stack([root, right]))
        alone_NV = torch.stack([last_logits(base.lm, torch.cat([prefix, path])) for path in paths])
    except InputError:  # such as that it cannot be compiled, which says what to do
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
        raise InputError(
            f"base {base.name} cannot read a tree through a plain mask ({first_line(error)}); use another base"
        ) from error
    difference = (forked_NV - alone_NV).abs().max() / alone_NV.std()
    if not difference < (1e-2 if base.dtype in FULL_PRECISION else 0.5):
        raise InputError(
            f"base {base.name} reads a tree otherwise than the texts in it (logits differ by {difference:.2g} of their "
            "spread): its attention is local or biased by distance, or its logits are scaled; use another base"
        )


def last_logits(lm: Any, tokens_L: Tensor) -> Tensor:
    """Return the logits_V after a text. All of a long one over 256k tokens would be gigabytes."""
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(lm.forward).parameters else {}
    return lm(tokens_L[None], **options).logits[0, -1].float()
