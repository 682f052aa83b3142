"""From logits to probabilities (temperature, top-k, top-p), and counter-based noise to sample tokens with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014): its increment and the two multipliers of its finaliser, as signed integers.
SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
SPLITMIX_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
SPLITMIX_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


def warp(logits_NV: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return log-probabilities_NV in float32 or wider after temperature, then top-k, then top-p.

    top_k = 0 and top_p = 1 keep every token; a removed token has log-probability -inf.
    """
    if temperature == 0:  # one-hot at the argmax, so that greedy decoding needs no code of its own
        best_N1 = logits_NV.argmax(dim=-1, keepdim=True)
        return torch.full_like(logits_NV, -torch.inf).scatter_(-1, best_N1, 0.0)
    scores_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    if 0 < top_k < scores_NV.shape[-1]:
        threshold_N1 = scores_NV.topk(top_k, dim=-1).values[..., -1:]
        scores_NV = scores_NV.masked_fill(scores_NV < threshold_N1, -torch.inf)
    if top_p < 1.0:
        sorted_NV, order_NV = scores_NV.sort(dim=-1, descending=True)
        probs_NV = sorted_NV.softmax(dim=-1)
        outside_NV = probs_NV.cumsum(dim=-1) - probs_NV >= top_p  # the mass *before* the token already suffices
        outside_NV[..., :1].fill_(False)  # however small top_p is
        scores_NV = scores_NV.masked_fill(outside_NV.gather(-1, order_NV.argsort(dim=-1)), -torch.inf)
    return scores_NV.log_softmax(dim=-1)


unwarped_log_probs = partial(warp, temperature=1.0)


@dataclass(frozen=True)
class GumbelNoise:
    """Random numbers that depend on (seed, absolute position, token id) only.

    Autoregression and every drafter therefore sample the same token at the same position of the same text, so sampled
    decoding can be compared token for token.
    """

    # SplitMix64 on 64-bit integers is counter-based: it gives the same bits on every device and has no state.
    seed: int
    key_1: Tensor | None = None  # `key_of(seed)` in memory that captured steps read; None: made at every call

    @staticmethod
    def key_of(seed: int) -> int:
        """Return the number that a seed's noise begins with."""
        return int(splitmix64_finalise(torch.tensor(seed * 2 + 1, dtype=torch.int64, device="cpu")))

    def gumbel(self, positions_N: Tensor, vocabulary: int) -> Tensor:
        """Return standard Gumbel noise_NV: argmax(log p + noise) is a sample from p."""
        return -torch.log(-torch.log(self.uniform(positions_N, vocabulary)))

    def uniform(self, positions_N: Tensor, count: int, after: int = 0) -> Tensor:
        """Return uniform numbers_NV strictly between 0 and 1, float64: float32 could never sample a token below 6e-8.

        after: numbers of each position to skip: with V they are independent of the tokens' noise.
        """
        key = self.key_of(self.seed) if self.key_1 is None else self.key_1
        keys_N1 = splitmix64_finalise(positions_N.to(torch.int64) + key)[:, None]
        counters_V = torch.arange(after + 1, after + count + 1, device=positions_N.device) * SPLITMIX_INCREMENT
        bits_NV = splitmix64_finalise(keys_N1 + counters_V)
        # 52 bits plus one half: with 53 bits the largest number would round to 1.
        return logical_shift_right(bits_NV, 12).double().add_(0.5).mul_(2.0**-52)


def splitmix64_finalise(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 to int64 values; products wrap around as intended."""
    x = (x ^ logical_shift_right(x, 30)) * SPLITMIX_MULTIPLIER_1
    x = (x ^ logical_shift_right(x, 27)) * SPLITMIX_MULTIPLIER_2
    return x ^ logical_shift_right(x, 31)


def logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift in zeros; torch's own shift is arithmetic and would repeat the sign bit."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
