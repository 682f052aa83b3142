"""Chains of draft tokens for a batch of requests: at every step the token that makes the most probable prefix.

vLLM verifies one chain per request, not a tree. The prefixes and their masses are those of `ctc/prefix_search.py` and
`ctc/conditioned_search.py`, of which only the best child is followed. All requests are searched in one sequence of
tensor operations without a question to the host, so that on an accelerator the draft costs a single transfer.

    Q requests of the step    K draft tokens    T frames    V tokens    C = V + 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.conditioned_search import continue_prefixes
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY, Topology
from ctcdraft.drafters.trees.request import LOGIT_RANGE

# Tokens_QK and the probability of every prefix, probs_QK: 0 from the first token that is not drafted.
Chains = tuple[Tensor, Tensor]
# logits_QTC, K, stops_S, the logit correction or None, its memory_QR at the roots
ChainSearch = Callable[[Tensor, int, Tensor, Any, Any], Chains]


@dataclass(frozen=True)
class Conditioning:
    """What a logit correction multiplies the frames of every request with: factor_QV of tokens, scale_QT of all."""

    factor_QV: Tensor | None  # None without a correction: one
    scale_QT: Tensor

    @classmethod
    def of(cls, correction: Any, memory_QR: Any, probs_QTV: Tensor, blank_QT: Tensor) -> Conditioning:
        if correction is None:
            return cls(None, torch.ones_like(blank_QT))
        factor_QV = correction(memory_QR).to(probs_QTV.dtype).clamp(*LOGIT_RANGE).exp_()
        normaliser_QT = torch.bmm(probs_QTV, factor_QV[..., None])[..., 0] + blank_QT
        return cls(factor_QV, normaliser_QT.reciprocal())

    def of_tokens(self, tokens_Q: Tensor) -> Tensor | float:
        """Return the factors_Q1 of one token per request."""
        return 1.0 if self.factor_QV is None else self.factor_QV.gather(1, tokens_Q[:, None])


def alignment_chains(topology: Topology) -> ChainSearch:
    """Return the search for frames whose alignments are summed over: of CTC or of a transducer."""

    def search(logits_QTC: Tensor, depth: int, stops_S: Tensor, correction: Any, memory_QR: Any) -> Chains:
        probs_QTC = logits_QTC.softmax(dim=-1, dtype=torch.float32)
        probs_QTV, blank_QT = probs_QTC[..., :-1], probs_QTC[..., -1]
        now = Conditioning.of(correction, memory_QR, probs_QTV, blank_QT)
        # Masses before every frame of texts that end in a blank, and of texts that end in their last token.
        blank_mass_QT = F.pad((blank_QT * now.scale_QT).cumprod(dim=1)[:, :-1], (1, 0), value=1.0)
        label_mass_QT = torch.zeros_like(blank_mass_QT)
        mass_Q, last_Q = blank_mass_QT.new_ones(len(logits_QTC)), None
        tokens, masses = [], []
        for number in range(min(depth, logits_QTC.shape[1])):
            either_QT = (blank_mass_QT + label_mass_QT) * now.scale_QT
            child_QV = torch.bmm(either_QT[:, None], probs_QTV)[:, 0]
            child_QV = child_QV if now.factor_QV is None else child_QV.mul_(now.factor_QV)
            if last_Q is not None and topology.merges_repeats:
                last_QT = token_probs(probs_QTV, last_Q) * now.scale_QT * now.of_tokens(last_Q)
                child_QV.scatter_(1, last_Q[:, None], (blank_mass_QT * last_QT).sum(dim=1, keepdim=True))
            best_Q, token_Q = child_QV.max(dim=1)
            mass_Q = torch.minimum(best_Q, mass_Q)  # rounding must not lift a child above its parent
            tokens.append(token_Q)
            masses.append(mass_Q)
            if number + 1 == depth:
                break
            token_QT, same_Q1 = token_probs(probs_QTV, token_Q), torch.zeros_like(token_Q[:, None], dtype=torch.bool)
            if last_Q is not None:
                same_Q1 = (token_Q == last_Q)[:, None]
            begin_QT = topology.begin_mass(blank_mass_QT, label_mass_QT, same_Q1)
            begin_QT = begin_QT * token_QT * now.scale_QT * now.of_tokens(token_Q)
            # Nothing follows a stop token.
            begin_QT = begin_QT.masked_fill((token_Q[:, None] == stops_S).any(dim=1, keepdim=True), 0)
            if correction is not None:
                memory_QR = correction.step(memory_QR, token_Q)
                now = Conditioning.of(correction, memory_QR, probs_QTV, blank_QT)
            repeat_QT = topology.repeat_mass(token_QT * now.of_tokens(token_Q)) * now.scale_QT
            blank_mass_QT, label_mass_QT = continue_prefixes(begin_QT, repeat_QT, blank_QT * now.scale_QT)
            last_Q = token_Q
        return torch.stack(tokens, dim=1), torch.stack(masses, dim=1)

    return search


def frame_chains(logits_QTC: Tensor, depth: int, stops_S: Tensor, correction: Any, memory_QR: Any) -> Chains:
    """Return the chains of frames of which frame k is draft token k (Medusa, blockwise); the blank is left out."""
    tokens: list[Tensor] = []
    log_probs: list[Tensor] = []
    for number in range(min(depth, logits_QTC.shape[1])):
        logits_QV = logits_QTC[:, number, :-1].float()
        if correction is not None:
            memory_QR = correction.step(memory_QR, tokens[-1]) if tokens else memory_QR
            logits_QV = logits_QV + correction(memory_QR).float()
        best_Q, token_Q = logits_QV.log_softmax(dim=-1).max(dim=1)
        tokens.append(token_Q)
        log_probs.append(best_Q)
    tokens_QK, probs_QK = torch.stack(tokens, dim=1), torch.stack(log_probs, dim=1).cumsum(dim=1).exp()
    is_stop_QK = torch.isin(tokens_QK, stops_S)
    return tokens_QK, probs_QK.masked_fill(is_stop_QK.cumsum(dim=1) - is_stop_QK.long() > 0, 0)


# By `interprets_as` of the tree builder that the head was trained for.
CHAIN_SEARCHES: dict[str, ChainSearch] = {
    "alignments": alignment_chains(CTC_TOPOLOGY),
    "transductions": alignment_chains(TRANSDUCER_TOPOLOGY),
    "tokens": frame_chains,
}


def token_probs(probs_QTV: Tensor, tokens_Q: Tensor) -> Tensor:
    """Return the probabilities_QT of one token per request."""
    return probs_QTV.gather(2, tokens_Q[:, None, None].expand(-1, probs_QTV.shape[1], 1))[..., 0]
