"""Rotary position embeddings (Su et al. 2021) of a draft head's layers, with the frequencies of the base's layers.

Our layers always pair dimension i with i + head_width / 2 (half-split). A base that pairs neighbours, or rotates only
its first dimensions, is equivalent after a fixed reordering of the rows of its query and key weights
(`half_split_rows`); a dimension that is not rotated has frequency 0. So one table of cosines and one of sines suffice.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FREQUENCY_RTOL = 1e-5  # float32 rounds theta ** (-2i / width) by less, and a scaled frequency differs by far more


class Rotary(nn.Module):
    """Cosines and sines of every position's angles, in float32 whatever the dtype of the module.

    scale: factor on both (YaRN).
    """

    def __init__(self, frequencies: tuple[float, ...], positions: int, scale: float = 1.0) -> None:
        super().__init__()
        angles = torch.arange(positions)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # The left half's sines are negated, so that `apply_rotary` swaps the halves and negates no copy.
        tables = torch.cat([cos, cos], dim=-1).float(), torch.cat([-sin, sin], dim=-1).float()
        # No buffers: `.to(bfloat16)` would round the tables, and decoding would differ from training.
        self._tables = {torch.device("cpu"): tables}
        self.positions = positions

    def forward(self, positions_X: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for `apply_rotary`, two tensors [*X, head_width]."""
        cos, sin = self.tables(positions_X.device)
        return cos[positions_X], sin[positions_X]

    def at(self, position_ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all cosines and sines, and the position ids, for `block_operations.rotate_into`."""
        return *self.tables(position_ids_N.device), position_ids_N

    def span(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the same for positions start .. stop - 1, [stop - start, head_width], as views."""
        cos, sin = self.tables(device)
        return cos[start:stop], sin[start:stop]

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            cos, sin = self._tables[torch.device("cpu")]
            self._tables[device] = cos.to(device), sin.to(device)
        return self._tables[device]


def apply_rotary(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [..., head_width] by the angles of its position: (l, r) becomes (l cos - r sin, r cos + l sin)."""
    cos, sin = cos_sin
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def default_frequencies(width: int, theta: float) -> tuple[float, ...]:
    """Return the width / 2 unscaled frequencies theta ** (-2i / width), in float64."""
    # On the CPU by name: a dry run builds drafters under torch.device("meta"), where there are no values.
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    return tuple((theta**-exponents).tolist())


def config_rope_theta(config: Any) -> float:
    """Return rope_theta of the base's last layer; 10,000 where the config names none."""
    rope = getattr(config, "rope_parameters", None) or {}
    return float((rope.get(last_layer_type(config)) or rope).get("rope_theta", 10_000.0))


def last_layer_type(config: Any) -> str:
    """Return the type of the base's last layer; some bases (Gemma 3) have rotary embeddings per layer type."""
    return str((getattr(config, "layer_types", None) or [""])[-1])


class BaseRotary(NamedTuple):
    """A copy of a base's rotary module, and its parameters for the last layer."""

    module: nn.Module
    layer_type: str | None  # of the last layer, where the module has several
    frequencies: tuple[float, ...]  # fewer than head_width / 2 where only the first dimensions are rotated
    scale: float  # factor on cosines and sines

    @classmethod
    def of(cls, lm: Any) -> BaseRotary | None:
        """Build the rotary module of a transformers model again from its config, on the CPU and in float32.

        Return None where the base has no such module: its positions are learned, or encoded inside its layers.
        """
        # Only this module covers all ways of scaling frequencies. The one inside the base may be on the meta device or
        # in shards, and `.to(bfloat16)` has rounded its frequencies.
        original: Any = getattr(lm.base_model, "rotary_emb", None)
        if getattr(original, "config", None) is None:
            return None
        config = copy.deepcopy(original.config)  # some rotary modules write into their config
        with torch.device("cpu"):
            module = type(original)(config)
        for layer_type in (last_layer_type(config), None):
            prefix = "" if layer_type is None else f"{layer_type}_"
            frequencies = getattr(module, f"{prefix}inv_freq", None)
            if frequencies is not None:
                scale = float(getattr(module, f"{prefix}attention_scaling", 1.0))
                return cls(module, layer_type, exact_frequencies(frequencies, config_rope_theta(config)), scale)
        return None

    def embeddings(self, x_BLD: Tensor, position_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position embeddings that the base's own layers take besides x."""
        layer_options = {} if self.layer_type is None else {"layer_type": self.layer_type}
        cos, sin = self.module(x_BLD.cpu(), position_ids_BL.cpu(), **layer_options)
        return cos.to(x_BLD.device), sin.to(x_BLD.device)


def exact_frequencies(frequencies: Tensor, theta: float) -> tuple[float, ...]:
    """Return the frequencies in float64: recomputed from theta if they differ from that by float32 rounding only."""
    exact = default_frequencies(2 * len(frequencies), theta)
    exact_F = torch.tensor(exact, dtype=torch.float64, device="cpu")
    is_default = torch.allclose(frequencies.double(), exact_F, rtol=FREQUENCY_RTOL, atol=0)
    return exact if is_default else tuple(frequencies.double().tolist())


def half_split_rows(head_width: int, rotated: int, interleaved: bool) -> Tensor:
    """Return the order in which the rows of a base's attention head are in ours.

    rotated: the number of its first dimensions that are rotated; the others are spread over the two halves.

        4 of 6, half-split    pairs (0, 2) (1, 3), 4 and 5 not rotated    0 1 4   2 3 5
        4 of 6, interleaved   pairs (0, 1) (2, 3)                         0 2 4   1 3 5
    """
    first = torch.arange(0, rotated, 2) if interleaved else torch.arange(rotated // 2)
    second = first + (1 if interleaved else rotated // 2)
    rest = torch.arange(rotated, head_width).chunk(2) if rotated < head_width else (first[:0], first[:0])
    return torch.cat([first, rest[0], second, rest[1]])
