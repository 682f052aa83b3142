"""Rotary position embeddings (Su et al. 2021) of a head's layers, with the frequencies of the base's own layers.

The head's layers always pair dimension i with i + head_width / 2 (half-split). A base that pairs neighbours, or turns
only its first dimensions, is the same after a fixed reordering of the rows of its query and key weights
(`half_split_rows`); a dimension that is not turned has frequency 0. So one table of cosines and one of sines serve all.

The frequencies come from the base's rotary module, made anew from its config: it is the one place that knows every way
to scale them, and a copy in float32 on the CPU exists for a base on the meta device, in shards or in half precision
(where `.to(bfloat16)` rounds the frequencies of the module inside the base).
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FREQUENCY_RTOL = (
    1e-5  # relative: float32 rounds theta ** (-2i / width) by less, and a scaled frequency differs by far more
)


class Rotary(nn.Module):
    """Cosines and sines of every position's angles; frequencies in float32 whatever the dtype."""

    def __init__(self, frequencies: tuple[float, ...], positions: int, scale: float = 1.0) -> None:
        super().__init__()
        # Tables, no buffers: `.to(bfloat16)` would round the angles, and decoding would differ from training.
        self._tables = {torch.device("cpu"): rotary_tables(frequencies, positions, scale)}

    def forward(self, positions_X: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `rotate` takes for every position: two tensors [*X, head_width]."""
        cos, sin = self.tables(positions_X.device)
        return cos[positions_X], sin[positions_X]

    def span(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the same for the positions start .. stop - 1: [stop - start, head_width]. A slice gathers nothing."""
        cos, sin = self.tables(device)
        return cos[start:stop], sin[start:stop]

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            cos, sin = self._tables[torch.device("cpu")]
            self._tables[device] = cos.to(device), sin.to(device)
        return self._tables[device]


def rotary_tables(frequencies: tuple[float, ...], positions: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position's angles, [positions, head_width]; the left half's sines are negative.

    scale: on both, as YaRN does to sharpen attention.
    """
    angles = torch.arange(positions)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([cos, cos], dim=-1).float(), torch.cat([-sin, sin], dim=-1).float()


def apply_rotary(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x [..., head_width] by the angles of its position: (l, r) becomes (l cos - r sin, r cos + l sin).

    The sign is in the table of sines, so the halves only change places: four operations, and no copy is negated.
    """
    cos, sin = cos_sin
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def default_frequencies(width: int, theta: float) -> tuple[float, ...]:
    """Return the width / 2 unscaled frequencies theta ** (-2i / width), in float64."""
    # On the CPU by name: plans make drafters under torch.device("meta"), where there are no values.
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    return tuple((theta**-exponents).tolist())


def config_rope_theta(config: Any) -> float:
    """Return rope_theta of the base's last layer; 10,000 where the config names none."""
    rope = getattr(config, "rope_parameters", None) or {}
    return float((rope.get(last_layer_type(config)) or rope).get("rope_theta", 10_000.0))


def last_layer_type(config: Any) -> str:
    """Return the type of the base's last layer, by which some bases (Gemma 3) keep several rotary embeddings."""
    return str((getattr(config, "layer_types", None) or [""])[-1])


class BaseRotary(NamedTuple):
    """A copy of a base's rotary module, and what it turns the last layer by.

    kind: type of that layer, where the module asks for it. frequencies: fewer than head_width / 2 where only the first
    dimensions are turned. scale: on cosines and sines.
    """

    module: nn.Module
    kind: str | None
    frequencies: tuple[float, ...]
    scale: float

    @classmethod
    def of(cls, lm: Any) -> BaseRotary | None:
        """Make the rotary module of a transformers model anew from its config, on the CPU and in float32.

        None where the base has no such module: its positions are learned, or turned inside its layers.
        """
        inside: Any = getattr(lm.base_model, "rotary_emb", None)
        if getattr(inside, "config", None) is None:
            return None
        config = copy.deepcopy(inside.config)  # some rotary modules write into their config
        with torch.device("cpu"):
            made = type(inside)(config)
        for kind in (last_layer_type(config), None):
            prefix = "" if kind is None else f"{kind}_"
            found = getattr(made, f"{prefix}inv_freq", None)
            if found is not None:
                scale = float(getattr(made, f"{prefix}attention_scaling", 1.0))
                return cls(made, kind, exact_frequencies(found, config_rope_theta(config)), scale)
        return None

    def embeddings(self, x_BLD: Tensor, position_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position embeddings that the base's own layers take beside x."""
        layer_options = {} if self.kind is None else {"layer_type": self.kind}
        cos, sin = self.module(x_BLD.cpu(), position_ids_BL.cpu(), **layer_options)
        return cos.to(x_BLD.device), sin.to(x_BLD.device)


def exact_frequencies(found: Tensor, theta: float) -> tuple[float, ...]:
    """Return the frequencies in float64: of theta itself where float32 rounding is all that lies between."""
    exact = default_frequencies(2 * len(found), theta)
    near = torch.allclose(
        found.double(), torch.tensor(exact, dtype=torch.float64, device="cpu"), rtol=FREQUENCY_RTOL, atol=0
    )
    return exact if near else tuple(found.double().tolist())


def half_split_rows(head_width: int, rotated: int, interleaved: bool) -> Tensor:
    """Return which row of a base's head comes where in ours.

    rotated: its first dimensions, which are turned; the others are spread over the two halves.

        4 of 6, half-split    pairs (0, 2) (1, 3), 4 and 5 not turned     0 1 4   2 3 5
        4 of 6, interleaved   pairs (0, 1) (2, 3)                         0 2 4   1 3 5
    """
    first = torch.arange(0, rotated, 2) if interleaved else torch.arange(rotated // 2)
    second = first + (1 if interleaved else rotated // 2)
    rest = torch.arange(rotated, head_width).chunk(2) if rotated < head_width else (first[:0], first[:0])
    return torch.cat([first, rest[0], second, rest[1]])
