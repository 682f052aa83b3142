"""Which bases read a tree exactly: what a config gives away, and what only a reading shows. It loads nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ctcdraft.decoding.tree import TokenTree
from ctcdraft.errors import InputError, first_line

if TYPE_CHECKING:
    from ctcdraft.base import BaseLM

STRETCHED = ("dynamic", "longrope")  # by the length of what is read: a tree reaches further than its first word
LEAST = 5  # tokens of a context: `refuse_unfaithful` reads four behind a text


def length_within(context_length: int | None, config: Any, name: str) -> int:
    """Return the context to use, None for the config's own; raise InputError for a length that it cannot have.

    The most is max_position_embeddings, which with rotary scaling is the scaled length. Bases whose positions are no
    embeddings have none.
    """
    most = getattr(config, "max_position_embeddings", None)
    wanted = most if context_length is None else context_length
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < LEAST or (most and wanted > most):
        bounds = f"an integer from {LEAST} to {most}, the context of base {name}" if most else "given as an integer"
        raise InputError(f"base.context_length must be {bounds}, got {wanted}")
    return wanted


def refuse_unreadable(config: Any, name: str) -> None:
    """Raise InputError for a base whose attention cannot read a tree through a plain mask, word for word the same."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if getattr(config, "sliding_window", None) is not None:
        kinds.add(f"sliding window of {config.sliding_window}")
    if not getattr(config, "num_attention_heads", None):
        kinds.add("no attention heads")
    if (rope := (getattr(config, "rope_parameters", None) or {}).get("rope_type")) in STRETCHED:
        kinds.add(f"{rope} rotary positions, whose angles change as the text grows")
    if kinds:
        raise InputError(
            f"base {name} has {', '.join(sorted(kinds))}: a tree of guesses cannot be read and rolled back "
            "exactly there; use a base with full attention in every layer"
        )


@torch.inference_mode()
def refuse_unfaithful(base: BaseLM, length: int = 320) -> None:
    """Raise InputError unless this base reads a forked tree as it reads the two texts in it.

    A config does not tell whether attention is local, positions enter as biases or logits are scaled after
    the head; a reading does. The text is longer than the local windows in use, where the context allows.
    """
    rng = torch.Generator().manual_seed(0)
    length = min(length, base.context_length - 4)
    text = torch.randint(base.vocabulary, (length + 4,), generator=rng).to(base.device)
    prefix, (root, left, right, below) = text[:length], text[length:]
    tree = TokenTree.from_paths(root, torch.stack([left, below, right, right]).reshape(2, 2), torch.tensor([2, 1]), 9)
    try:
        cache = base.new_cache(length + 8)
        base.read(prefix, cache)
        forked_NV = base.read_tree(tree, cache).logits_NV[-2:].float()
        paths = (torch.stack([root, left, below]), torch.stack([root, right]))
        alone_NV = torch.stack([base.lm(torch.cat([prefix, path])[None]).logits[0, -1].float() for path in paths])
    except InputError:  # such as that it cannot be compiled, which says what to do
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"base {base.name} cannot read a tree through a plain mask ({first_line(error)}); use another base"
        ) from error
    apart = (forked_NV - alone_NV).abs().max() / alone_NV.std()
    if not apart < (1e-2 if base.dtype in (torch.float32, torch.float64) else 0.5):
        raise InputError(
            f"base {base.name} reads a tree otherwise than the texts in it (logits differ by {apart:.2g} of their "
            "spread): its attention is local or biased by distance, or its logits are scaled; use another base"
        )
