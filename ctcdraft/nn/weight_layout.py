"""Memory layouts of linear weights for decoding: column-major on a CPU, packed on an accelerator.

On a CPU: a linear layer's weights [out, in] are row-major; a CPU multiplies a handful of inputs faster if they are
column-major. Time relative to row-major, float32, one thread of an Intel Xeon:

    384 -> 160     16 rows 0.30    32 rows 0.69
    896 -> 4864    1 row 1.00    2 rows 1.08    8 rows 0.49    16 rows 0.70    32 rows 0.75
    5632 -> 2048   1 row 1.02    2 rows 1.32    8 rows 0.94    16 rows 1.21    32 rows 1.15

so matrices larger than MAX_COLUMN_MAJOR_WEIGHTS are left row-major.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

MAX_COLUMN_MAJOR_WEIGHTS = 5 * 2**20  # weights


def to_column_major_(module: nn.Module, but: Iterable[Tensor] = ()) -> None:
    """Make the weights of a module's linear layers column-major, on a CPU and in float32; shapes and values stay.

    Tensor subclasses such as quantised weights stay row-major, and so do `but`.
    """
    excluded = {id(weight) for weight in but}
    # Layers that share an embedding's weights too, because a lookup reads a row.
    excluded |= {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    for layer in module.modules():
        if type(layer) is not nn.Linear or id(layer.weight) in excluded:
            continue
        weight = layer.weight.data
        plain = type(weight) is Tensor and weight.device.type == "cpu" and weight.dtype == torch.float32
        if plain and weight.numel() <= MAX_COLUMN_MAJOR_WEIGHTS:
            layer.weight.data = weight.T.contiguous().T


Packed = tuple[Tensor, Tensor | None]  # weights [sum of outputs, in] and biases


def pack_rows_(layers: Sequence[nn.Module]) -> Packed | None:
    """Make the weights of linear layers with one input rows of one matrix, and return it with their biases.

    One product then computes all layers: one launch on an accelerator. The parameters become views, so that a state
    dict stays as it is and new values reach the matrix. Returns None on a CPU, which multiplies as fast by one after
    the other, and for layers that are not plain.
    """
    plain = [layer for layer in layers if type(layer) is nn.Linear and not layer.weight.is_cpu]
    if len(plain) < len(layers) or len({layer.bias is None for layer in plain}) > 1:
        return None
    biased = all(layer.bias is not None for layer in plain)
    return join_rows_(plain, "weight"), join_rows_(plain, "bias") if biased else None


def join_rows_(layers: Sequence[nn.Module], name: str) -> Tensor:
    """Make a parameter of each layer rows of one tensor, and return it."""
    parameters = [layer.get_parameter(name) for layer in layers]
    joined = torch.cat([parameter.detach() for parameter in parameters])
    for layer, parameter, rows in zip(layers, parameters, joined.split([*map(len, parameters)]), strict=True):
        setattr(layer, name, nn.Parameter(rows, requires_grad=parameter.requires_grad))
    return joined


class PackedLinears(nn.Module):
    """Linear layers with one input, which one product can compute once `pack` was called."""

    packs: ClassVar[tuple[str, ...]]  # names of the layers
    packed: Packed | None = None

    def pack(self) -> None:
        self.packed = pack_rows_([getattr(self, name) for name in self.packs])

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.packed = None  # the parameters get memory of their own on another device or in another dtype
        return super()._apply(*args, **kwargs)
