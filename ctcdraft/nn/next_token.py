"""Scores of a few tokens after every prefix of the labels: what a distribution restricted to these tokens needs."""

from __future__ import annotations

from torch import Tensor

from ctcdraft.nn.alignment_scores import AlignmentScores
from ctcdraft.nn.chunks import in_chunks
from ctcdraft.nn.draft_vocab import head_rows, mask_absent_labels, restrict_rows
from ctcdraft.nn.heads import Emissions
from ctcdraft.nn.linear_logsumexp import blank_logits, token_logits


def next_token_log_probs(emissions: Emissions, scores: AlignmentScores, tokens_BASW: Tensor) -> Tensor:
    """Return log-probabilities [B, A, T, S, W] of W tokens each after s = 0 .. S - 1 labels, in every frame.

    scores: those of the labels, whose log-normalisers are used again.
    """
    head, lm_head, correction = emissions.head, emissions.head.words, emissions.correction

    def score_chunk(states_XTD: Tensor, tokens_XSW: Tensor, blank_XTP: Tensor, *memories_XPR: Tensor) -> Tensor:
        rows_XSW, absent_XSW = head_rows(lm_head, tokens_XSW)
        bias_V, flat_XY = getattr(lm_head, "bias", None), rows_XSW.flatten(1)
        logits_XTSW = token_logits(states_XTD, lm_head.weight, bias_V, flat_XY).unflatten(2, rows_XSW.shape[1:])
        # The blank's logit is not corrected, so it differs from the blank's score by the normaliser.
        blank_XT1 = blank_logits(states_XTD, head.blank_D, head.blank_bias)[..., None]
        normaliser_XTS = blank_XT1 - (blank_XTP if correction is None else blank_XTP[..., :-1])
        if correction is not None:
            memories_Y1R, rows_YW = memories_XPR[0][:, :-1].flatten(0, 1)[:, None], rows_XSW.flatten(0, 1)
            added_Y1W = token_logits(memories_Y1R, restrict_rows(lm_head, correction.out.weight), None, rows_YW)
            logits_XTSW = logits_XTSW + added_Y1W.view(rows_XSW.shape)[:, None]
        return mask_absent_labels(logits_XTSW - normaliser_XTS[..., None], absent_XSW)

    memories = () if scores.memories_BAPR is None else (scores.memories_BAPR,)
    size = 4 * emissions.states_BATD.shape[-1] * tokens_BASW[0, 0].numel()  # of the rows of the lm_head
    return in_chunks(score_chunk, size, emissions.states_BATD, tokens_BASW, scores.blank_BATP, *memories)
