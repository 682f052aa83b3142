"""How weights lie in memory where few rows are multiplied, as decoding does. It knows no model.

A linear layer's weights [out, in] lie row by row, and a CPU multiplies a handful of inputs faster where they lie
column by column. One thread of an Intel Xeon, float32, in parts of the time that it takes row by row:

    384 -> 160     16 rows 0.30    32 rows 0.69
    896 -> 4864    1 row 1.00    2 rows 1.08    8 rows 0.49    16 rows 0.70    32 rows 0.75
    5632 -> 2048   1 row 1.02    2 rows 1.32    8 rows 0.94    16 rows 1.21    32 rows 1.15

so matrices larger than LARGEST stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MAX_COLUMN_MAJOR_WEIGHTS = 5 * 2**20  # weights


def to_column_major_(module: nn.Module, but: Iterable[Tensor] = ()) -> None:
    """Lay the weights of its linear layers column by column, on a CPU and in float32. Shapes, names and values stay.

    Embeddings, and layers that share an embedding's weights, stay as they are: looking up a word reads a row. So do
    weights in types of their own, such as quantised ones. but: weights that are not the module's to change.
    """
    theirs = {id(weight) for weight in but}
    theirs |= {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    for layer in module.modules():
        if (
            type(layer) is nn.Linear
            and id(layer.weight) not in theirs
            and benefits_from_column_major(layer.weight.data)
        ):
            layer.weight.data = layer.weight.data.T.contiguous().T


def benefits_from_column_major(weight: Tensor) -> bool:
    plain = type(weight) is Tensor and weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and weight.numel() <= MAX_COLUMN_MAJOR_WEIGHTS
