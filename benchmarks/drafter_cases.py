"""Every drafter of configs/drafter with random weights on one base, to be decoded with and not to be judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ctcdraft.config.cli import compose_config
from ctcdraft.config.drafters import build_drafter
from ctcdraft.drafters.base import DraftHead
from ctcdraft.drafters.merged import Merged

# Overrides of train.py.
OVERRIDES: Mapping[str, tuple[str, ...]] = {
    "autoregressive": ("drafter=autoregressive",),
    "prompt_lookup": ("drafter=prompt_lookup",),
    "source_copy": ("drafter=source_copy",),
    "suffix": ("drafter=suffix",),
    "ctc": ("drafter=ctc",),
    "ctc_gru": ("drafter=ctc_gru",),
    "transducer": ("drafter=transducer",),
    "medusa": ("drafter=medusa",),
    "blockwise": ("drafter=blockwise",),
    "dflash": ("drafter=dflash",),
    "dspark": ("drafter=dspark",),
    "domino": ("drafter=domino",),
    "peagle": ("drafter=peagle",),
    "hydra": ("drafter=hydra",),
    "hydra_plus": ("drafter=hydra_plus",),
    "eagle_static": ("drafter=eagle", "drafter/tree=eagle1"),
    "eagle_dynamic": ("drafter=eagle",),
    "eagle3": ("drafter=eagle3",),
    "eagle3_1": ("drafter=eagle3_1",),
    "redrafter": ("drafter=redrafter",),
    "early_exit": ("drafter=early_exit",),
    "kangaroo": ("drafter=kangaroo",),
    "draft_model": ("drafter=draft_model",),
    "draft_model_dynamic": ("drafter=draft_model", "drafter/tree=dynamic"),
}
NAMES = (*OVERRIDES, "merged")
SPREAD = 0.02  # of what is added to the weights: some heads are initialised to draft the same token everywhere


def drafter_cases(base: Any, draft_model: str, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the drafters by name.

    Args:
        draft_model: folder of a language model with the base's tokenizer.
        like: the cases of another device, whose weights these get.
    """
    cases = {name: random_drafter(name, base, draft_model, like and like[name]) for name in OVERRIDES}
    cases["merged"] = Merged(base, cases["ctc"], cases["prompt_lookup"])
    return cases


def random_drafter(name: str, base: Any, draft_model: str = "", like: Any = None) -> Any:
    """Return one of these drafters; for the arguments see drafter_cases."""
    path = [f"drafter.path={draft_model}"] if name.startswith("draft_model") else []
    torch.manual_seed(0)
    drafter = build_drafter(compose_config("train", *OVERRIDES[name], *path).drafter, base)
    if not isinstance(drafter, DraftHead):
        return drafter
    if like is not None:
        drafter.load_state_dict(like.state_dict())
    elif not drafter.usable_untrained:
        spread_weights(drafter)
    return drafter.for_inference(base)


@torch.no_grad()
def spread_weights(drafter: DraftHead) -> None:
    for weight in drafter.trainable_parameters():
        weight.add_(torch.randn_like(weight), alpha=SPREAD)
