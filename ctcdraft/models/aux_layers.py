"""Layers of a base: those whose hidden states draft heads read (base.aux_layers), and its first ones as a model."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.errors import InputError


def resolve_aux_layers(aux_layers: Any, layers: int) -> list[str | int]:
    """Return base.aux_layers with fractions as layer numbers, each once: [last, 0.33, 4] of 12 layers -> [last, 4].

    Raises:
        InputError: for values that name no layers of the base.
    """
    given = list(aux_layers) if isinstance(aux_layers, Sequence) and not isinstance(aux_layers, str) else []
    inner: list[Any] = [
        min(round(layer * layers), layers - 1) if isinstance(layer, float) and 0 < layer < 1 else layer
        for layer in given[1:]
    ]
    if given[:1] != ["last"] or any(type(layer) is not int or not 0 <= layer < layers for layer in inner):
        raise InputError(
            f'base.aux_layers must be "last" and then layers from 0 to {layers - 1} or fractions of them, as in '
            f"[last,{layers // 2}] or [last,0.5], got {aux_layers}"
        )
    return ["last", *dict.fromkeys(inner)]


class LayerInputs:
    """The inputs of some layers, recorded as they run: the hidden states that transformers numbers alike.

    With output_hidden_states=True transformers leaves hooks on every layer and every attention, and each later forward
    pass of the base takes longer, also autoregression's, which draft heads are compared with.
    """

    def __init__(self, inner: nn.Module) -> None:
        self.modules: dict[Any, nn.Module] = {"inner": inner}  # and the layers, by number
        self.by_thread: dict[int, dict[int, Tensor]] = {}  # of forward passes that want them; training has two threads

    @classmethod
    def of(cls, lm: Any, numbers: Sequence[Any]) -> LayerInputs | None:
        """Return the inputs of these layers of a model, one object per model; None where its layers are not known."""
        stacks = layer_stacks(lm.base_model, lm.config.num_hidden_layers)
        if len(stacks) != 1 or not numbers:
            return None
        (layers,) = stacks.values()
        inputs = lm.__dict__.setdefault("layer_inputs", cls(lm.base_model))
        for number in {*numbers} - {*inputs.modules}:
            layers[number].register_forward_pre_hook(partial(inputs.record, number), with_kwargs=True)
            inputs.modules[number] = layers[number]
        return inputs

    def record(self, number: int, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and (wanted := self.by_thread.get(get_ident())) is not None:
            wanted[number] = args[0] if args else keywords["hidden_states"]

    @property
    def is_compiled(self) -> bool:
        """Return whether these modules are run by torch.compile, in which nothing is recorded."""
        if torch.compiler.is_compiling():
            return True
        return any(
            one._compiled_call_impl is not None or hasattr(one.forward, "_torchdynamo_orig_callable")
            for one in self.modules.values()
        )


def run_layers(base: Any, **inputs: Any) -> Tensor:
    """Run the base up to its final norm; return these hidden states, with those of auxiliary layers behind them."""
    inner, several = base.lm.base_model, len(base.aux_layers) > 1
    below: Any = {}
    if several and base.layer_inputs is not None and not base.layer_inputs.is_compiled:
        threads, own = base.layer_inputs.by_thread, get_ident()
        threads[own] = below
        try:
            output = inner(**inputs, output_hidden_states=False)
        finally:
            del threads[own]
    else:
        output = inner(**inputs, output_hidden_states=several)
        below = output.hidden_states
    last_BLD = output.last_hidden_state
    if not several:
        return last_BLD
    # With device_map a layer's input may still be on the device of the layer before.
    return torch.cat([last_BLD, *(below[layer].to(last_BLD.device) for layer in base.aux_layers[1:])], dim=-1)


def layer_stacks(inner: nn.Module, layers: int) -> dict[str, nn.ModuleList]:
    """Return the lists of so many modules among the children of a model, by name."""
    children = dict(inner.named_children())
    return {name: part for name, part in children.items() if isinstance(part, nn.ModuleList) and len(part) == layers}


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


def first_layers(base: Any, layers: int | float, normed: bool) -> Any:
    """Return the base without its later layers: embedding, first layers, final norm, lm_head, all of them shared.

    Args:
        layers: their number, or a fraction of the base's.
        normed: whether the final norm follows the last of them.
    """
    is_fraction = isinstance(layers, float) and 0 < layers < 1
    count = min(max(round(layers * base.layers), 1), base.layers - 1) if is_fraction else layers
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < base.layers:
        raise InputError(
            f"drafter.layers must be an integer from 1 to {base.layers - 1} or a fraction of the base's {base.layers} "
            f"layers, got {layers}"
        )
    if base.layer_devices is not None:
        raise InputError(
            f"{base.name} is distributed over several devices, where its first layers cannot be run alone; leave out "
            "base.device_map, or take another drafter"
        )
    inner = base.lm.base_model
    children = dict(inner.named_children())
    stacks = [*layer_stacks(inner, base.layers)]
    norms = [name for name, part in children.items() if "norm" in type(part).__name__.lower()]
    if len(stacks) != 1 or len(norms) != 1:
        raise InputError(
            f"layers and final norm of {base.name} are not known among {', '.join(children)}, so its first layers "
            "cannot be run alone; take another drafter"
        )
    config = deepcopy(base.lm.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    parts = {stacks[0]: children[stacks[0]][:count]} | ({} if normed else {norms[0]: nn.Identity()})
    lm = with_children(base.lm, {base.lm.base_model_prefix: with_children(inner, parts, config=config)}, config=config)
    return with_children(base, {"lm": lm}, aux_layers=["last"], state_columns=None, static_shapes=None)


def with_children(module: Any, children: dict[str, Any], **attributes: Any) -> Any:
    """Return a module with other children and attributes that shares all else with this one."""
    new = copy(module)
    # Without it `copy` would share the mapping, and the original would get the new children, too.
    new.__dict__ |= {"_modules": module._modules | children, **attributes}
    return new
