"""How a row of states becomes bytes: whole, halved, or eight bits with a scale a token. It knows tensors, no files."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Precision(ABC):
    name: str
    parts: tuple[str, ...]  # names of the tensors a row becomes

    @abstractmethod
    def pack(self, states_LD: Tensor) -> dict[str, Tensor]: ...

    @abstractmethod
    def unpack(self, parts: dict[str, Tensor]) -> Tensor:
        """States_LD in float32."""

    @abstractmethod
    def bytes_per_token(self, width: int) -> int: ...


class FloatPrecision(Precision):
    """A torch floating type."""

    parts = ("states",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = str(dtype).removeprefix("torch.")
        self.dtype = dtype

    def pack(self, states_LD: Tensor) -> dict[str, Tensor]:
        return {"states": states_LD.to(self.dtype)}

    def unpack(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["states"].float()

    def bytes_per_token(self, width: int) -> int:
        return width * self.dtype.itemsize


class Int8Precision(Precision):
    """Eight bits a value and one float32 scale a token, its largest value over 127: half of bfloat16's bytes.

    A token's values are off by at most half its scale. States have a few dimensions many times larger than the
    rest, and these set the scale.
    """

    name = "int8"
    parts = ("states", "scales")

    def pack(self, states_LD: Tensor) -> dict[str, Tensor]:
        states_LD = states_LD.float()
        scales_L1 = (states_LD.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        return {"states": (states_LD / scales_L1).round().to(torch.int8), "scales": scales_L1}

    def unpack(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["states"].float() * parts["scales"]

    def bytes_per_token(self, width: int) -> int:
        return width + 4


PRECISIONS: dict[str, Precision] = {
    "float32": FloatPrecision(torch.float32),
    "bfloat16": FloatPrecision(torch.bfloat16),
    "int8": Int8Precision(),
}
