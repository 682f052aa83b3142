"""The layers of a base whose hidden states draft heads read: base.aux_layers, and a head's own among them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch

from ctcdraft.errors import InputError


def resolve_aux_layers(aux_layers: Sequence[str | int | float], layers: int) -> list[str | int]:
    """Return base.aux_layers with fractions as layer numbers, each once: [last, 0.33, 4] of 12 layers -> [last, 4].

    Raises:
        InputError: for values that name no layers of the base.
    """
    inner: list[Any] = [
        min(round(layer * layers), layers - 1) if isinstance(layer, float) and 0 < layer < 1 else layer
        for layer in aux_layers[1:]
    ]
    if list(aux_layers[:1]) != ["last"] or any(
        not isinstance(layer, int) or not 0 <= layer < layers for layer in inner
    ):
        raise InputError(
            f'base.aux_layers must be "last" and then layers from 0 to {layers - 1} or fractions of them, as in '
            f"[last,{layers // 2}] or [last,0.5], got {list(aux_layers)}"
        )
    return ["last", *dict.fromkeys(inner)]


def refuse_shared_layers(drafter: Any, view: Any, source: Any) -> None:
    """Raise InputError for a head on a view of the base that would read the columns of all its layers."""
    reads_all = getattr(drafter, "uses_aux_hidden_states", True)
    if view.state_columns is not None and reads_all and not hasattr(drafter, "state_columns"):
        raise InputError(
            f"{source} reads the layers {view.aux_layers} and has no state_columns, so that {type(drafter).__name__} "
            "cannot share a base with heads of other layers; evaluate it alone"
        )


def view_of_layers(base: Any, aux_layers: Sequence[str | int]) -> Any:
    """Return the base as a head sees it that reads these of its layers; the base itself where it lacks one of them.

    Heads with different layers are compared on one base that has them all, and each takes its own columns, which
    `state_columns` names (ParallelDrafter does; heads that read the last layer alone need none, as it comes first).
    """
    if list(aux_layers) == base.aux_layers or not set(aux_layers) <= set(base.aux_layers):
        return base
    view, columns_D = copy(base), torch.arange(base.width, device=base.device)
    view.aux_layers = list(aux_layers)
    view.state_columns = torch.cat([columns_D + base.width * base.aux_layers.index(layer) for layer in aux_layers])
    return view
