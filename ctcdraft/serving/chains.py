"""Chains of draft tokens for a batch of requests: at every step the token that makes the most probable prefix.

vLLM verifies one chain per request, not a tree. The prefixes and their masses are those of `ctc/prefix_search.py` and
`ctc/conditioned_search.py`, of which only the best child is followed. A few requests on a CPU are searched by machine
code, else all in one sequence of tensor operations without host synchronisation: a draft costs a single transfer.
`ctc/next_label.py` would give the same chains; it stores conditioned frames in float64, which takes twice as long.

    Q requests of the step    K draft tokens    T frames    V tokens    C = V + 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.best_first import compiled_conditioned_chains
from ctcdraft.ctc.conditioned_search import continue_prefixes
from ctcdraft.ctc.fused_conditioned import LOGIT_RANGE
from ctcdraft.ctc.next_label import gather_class
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY, Topology

MAX_COMPILED = 32  # requests: not measured beyond

# Tokens_QK and the probability of every prefix, probs_QK: 0 from the first token that is not drafted.
Chains = tuple[Tensor, Tensor]
# logits_QTC, K, stops_S, the logit correction or None, its memory_QR at the roots
ChainSearch = Callable[[Tensor, int, Tensor, Any, Any], Chains]


def conditioning(correction: Any, memory_QR: Any, probs_QTV: Tensor, blank_QT: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a logit correction multiplies the frames of every request with: factor_QV of tokens, scale_QT of all.

    See `ConditionedFrames.factors`. Without a correction both are one.
    """
    if correction is None:
        return torch.ones_like(blank_QT[:, :1]).expand(-1, probs_QTV.shape[2]), torch.ones_like(blank_QT)
    factor_QV = correction(memory_QR).to(probs_QTV.dtype).clamp(*LOGIT_RANGE).exp_()
    return factor_QV, (torch.bmm(probs_QTV, factor_QV[..., None])[..., 0] + blank_QT).reciprocal()


def alignment_chains(topology: Topology) -> ChainSearch:
    """Return the search for frames whose alignments are summed over: of CTC or of a transducer."""

    def search(logits_QTC: Tensor, depth: int, stops_S: Tensor, correction: Any, memory_QR: Any) -> Chains:
        if correction is not None and len(logits_QTC) <= MAX_COMPILED:
            given = logits_QTC, correction, memory_QR, depth, stops_S, topology.merges_repeats
            if (chains := compiled_conditioned_chains(*given)) is not None:
                return chains
        probs_QTC = logits_QTC.softmax(dim=-1, dtype=torch.float32)
        probs_QTV, blank_QT = probs_QTC[..., :-1], probs_QTC[..., -1]
        factor_QV, scale_QT = conditioning(correction, memory_QR, probs_QTV, blank_QT)
        # Masses before every frame of texts that end in a blank, and of texts that end in their last token.
        blank_mass_QT = F.pad((blank_QT * scale_QT).cumprod(dim=1)[:, :-1], (1, 0), value=1.0)
        label_mass_QT = torch.zeros_like(blank_mass_QT)
        # Any token serves as the root's: no mass ends in a token yet, so a repeat is like any other token.
        mass_Q, last_Q = torch.ones_like(blank_QT[:, 0]), stops_S.new_zeros(len(blank_QT))
        tokens, masses = [], []
        for number in range(min(depth, logits_QTC.shape[1])):
            child_QV = torch.bmm(((blank_mass_QT + label_mass_QT) * scale_QT)[:, None], probs_QTV)[:, 0] * factor_QV
            if topology.merges_repeats:
                repeats_QT = blank_mass_QT * scale_QT * gather_class(probs_QTV, last_Q)
                repeat_Q1 = repeats_QT.sum(dim=1, keepdim=True) * factor_QV.gather(1, last_Q[:, None])
                child_QV.scatter_(1, last_Q[:, None], repeat_Q1)
            best_Q, token_Q = child_QV.max(dim=1)
            mass_Q = torch.minimum(best_Q, mass_Q)  # rounding must not lift a child above its parent
            tokens.append(token_Q)
            masses.append(mass_Q)
            if number + 1 == depth:
                break
            token_Q1, token_QT = token_Q[:, None], gather_class(probs_QTV, token_Q)
            begin_QT = topology.begin_mass(blank_mass_QT, label_mass_QT, (token_Q == last_Q)[:, None])
            begin_QT = begin_QT * token_QT * scale_QT * factor_QV.gather(1, token_Q1)
            # Nothing follows a stop token.
            begin_QT = begin_QT.masked_fill((token_Q1 == stops_S).any(dim=1, keepdim=True), 0)
            if correction is not None:
                memory_QR = correction.step(memory_QR, token_Q)
                factor_QV, scale_QT = conditioning(correction, memory_QR, probs_QTV, blank_QT)
            repeat_QT = topology.repeat_mass(token_QT * factor_QV.gather(1, token_Q1)) * scale_QT
            blank_mass_QT, label_mass_QT = continue_prefixes(begin_QT, repeat_QT, blank_QT * scale_QT)
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
