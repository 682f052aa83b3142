"""Losslessness check: answers compared with autoregression's, token for token.

Logits of a tree forward pass and of a one-token forward pass differ by about 1e-5 even in float32, so a token can
change where the base model's two best scores are nearly equal. To tell such a near tie from a bug, both answers are
decoded again in float64, where the difference must vanish. In half precision float32 decides, see half_precision.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ctcdraft.drafters.adaptive import AdaptiveDrafter
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.distribution_test import ChiSquareFit, PITHistogram
from ctcdraft.evaluation.half_precision import is_rounding, scores
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Divergence, Record

TIE_MARGIN = 1e-4  # of logits in float32: a larger margin is never explained by rounding
MAX_ROUNDINGS = 8  # rounding errors of the top logit that a margin may consist of in half precision
HALF_PRECISION_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # largest relative rounding errors


class LosslessnessChecker:
    """Finds the first divergence of an answer, and decides whether rounding explains it."""

    def __init__(self, setup: EvaluationSetup) -> None:
        self.setup, self.base, self.settings = setup, setup.base, setup.settings

    def compare(
        self,
        name: str,
        tokens: Sequence[int],
        truth: Sequence[int],
        prompt_L: Tensor,
        turn: int,
        seed: int,
        sampled: bool = False,
    ) -> Divergence | None:
        """Return where `tokens` first differ from autoregression's, `truth`; None if they are equal."""
        if tuple(tokens) == tuple(truth):
            return None
        pairs = enumerate(zip(tokens, truth, strict=False))
        # If one is a prefix of the other, they differ where the shorter one ends.
        position = next((n for n, (a, b) in pairs if a != b), min(len(tokens), len(truth)))
        if not self.settings.owes_token_identity(sampled):
            return Divergence(turn, position, None, None, owed=False)
        margin, least = self._top2_margin(prompt_L, truth[:position], seed)
        rounding = None
        if self.base.dtype in HALF_PRECISION_ROUNDING:
            rounding = is_rounding(self.setup, name, prompt_L, (tokens, truth), seed)
        if rounding is None:
            rounding = self._explained_by_rounding(name, margin, least, prompt_L, seed)
        return Divergence(turn, position, margin, rounding)

    def _top2_margin(self, prompt_L: Tensor, agreed: Sequence[int], seed: int) -> tuple[float | None, float]:
        """Return the margin of the base model's two best tokens after the common text, and the rounding bound.

        It is of logits, or at a temperature above 0 of scores with Gumbel noise; None if only one of them is finite.
        """
        text_L = torch.cat([prompt_L, torch.tensor(agreed, dtype=prompt_L.dtype, device=prompt_L.device)])
        scores_1V = self.base.read(text_L, self.base.new_cache(len(text_L))).logits_NV
        least = rounding_bound(scores_1V)
        best, second = scores(self.settings, scores_1V, len(text_L), seed)[0].topk(2).values.tolist()
        return (best - second if isfinite(best - second) else None), least

    def _explained_by_rounding(
        self, name: str, margin: float | None, least: float, prompt_L: Tensor, seed: int
    ) -> bool | None:
        # Rounding can move a token across the top-k or top-p cut, however large the margin of the two best is.
        truncated = self.settings.top_k > 0 or self.settings.top_p < 1
        # Scores are logits / T plus noise, so at T < 1 the rounding error of the logits is magnified by 1 / T.
        temperature = self.settings.temperature
        scale = min(temperature, 1.0) if temperature > 0 else 1.0
        if not truncated and (margin is None or margin * scale >= least):
            return False
        if self.base.dtype in HALF_PRECISION_ROUNDING:
            return None
        exact = self._float64_copy()
        ours, theirs = (exact.answer(each, prompt_L, seed).tokens for each in (name, AUTOREGRESSIVE))
        return ours == theirs

    def _float64_copy(self) -> EvaluationSetup:
        """Return a copy of base model and drafters in float64."""
        # Together, because drafters share the base model's lm_head and embedding. The caller does not keep the copy: it
        # takes twice the memory, which would count as the peak memory of the contestants that run later.
        base, contestants = copy.deepcopy((self.base, dict(self.setup.contestants)))
        drafters = [one.drafter if isinstance(one, AdaptiveDrafter) else one for one in contestants.values()]
        for copied in (base, *drafters):
            if isinstance(copied, torch.nn.Module):
                copied.double()
        return replace(self.setup, base=base, contestants=contestants)


def rounding_bound(logits_1V: Tensor) -> float:
    """Return the smallest margin between two logits that rounding cannot explain, by their dtype and size.

    In half precision it is 8 rounding errors of the top logit: for a logit of 16, 0.5 in bfloat16 and 0.06 in float16.
    """
    unit = HALF_PRECISION_ROUNDING.get(logits_1V.dtype)
    if unit is None:
        return TIE_MARGIN
    # Generous on purpose. Hidden states are rounded in every layer, in different orders for a tree and for one token,
    # which leaves one or two such errors in the logits, growing with the square root of the depth; a wrong mask,
    # position id or cache row changes logits by whole units. A bug with a smaller effect remains undecided.
    logits_1V = logits_1V.double()
    top = logits_1V.max()
    # Logits may be shifted by a constant, so a top logit near 0 does not mean small rounding errors: use the spread.
    size = max(float(top.abs()), float(top - logits_1V.mean()))
    return MAX_ROUNDINGS * unit * size


def losslessness_metrics(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Return the `lossless` field of a report row. The unit is a question, which is equal if all its turns are.

    `rounding`: questions that differ by rounding only. `owed`: questions that differ although token identity is
    promised, as wrong, undecided (half precision) or explained by rounding.

    At temperatures above 0, `chi_square`, `p_value` and `tv` (total variation) measure how well the tokens fit the
    base model's distribution; for sampled drafts nothing more is promised (see distribution_test.py). `null_tv` is
    autoregression's own tv, which is due to chance. `by_draft`: the same for tokens that a draft was sampled for, in
    the order of draft over base probability; None if there are none.
    """
    unequal = [divergences for record in records if (divergences := record.divergences.get(name, ()))]
    owed = [roundings for question in unequal if (roundings := [each.rounding for each in question if each.owed])]
    wrong = sum(False in roundings for roundings in owed)
    undecided = sum(None in roundings and False not in roundings for roundings in owed)
    explained = len(owed) - wrong - undecided
    marks = ([record.marks[each] for record in records if each in record.marks] for each in (name, AUTOREGRESSIVE))
    ours, theirs = (sum(histograms, PITHistogram.empty()) for histograms in marks)
    fit, null, by_draft = map(ChiSquareFit.from_counts, (ours.by_base, theirs.by_base, ours.by_draft))
    return {
        "unit": "question",
        "prompts": len(records),
        "equal": len(records) - len(unequal),
        "rounding": None if any(each.rounding is None for question in unequal for each in question) else explained,
        "owed": {"wrong": wrong, "undecided": undecided, "explained": explained},
        "first_divergence_margins": [each.margin for question in unequal for each in question],
        "chi_square": fit and fit.chi_square,
        "p_value": fit and fit.p_value,
        "tv": fit and fit.tv,
        "null_tv": null and null.tv,
        "tokens": fit and fit.tokens,
        "by_draft": by_draft and vars(by_draft),
    }


def other_kernels_null(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how often autoregression with other kernels differs from autoregression, in half precision.

    That is the number of differences to expect in `row` if nothing is wrong. None if no such row was measured, for
    that row itself, for autoregression, and in float32.
    """
    others = [other for other in rows if other["other_kernels"]]
    is_half = getattr(torch, row["dtype"]) in HALF_PRECISION_ROUNDING
    if not others or not is_half or row["drafter"] == AUTOREGRESSIVE or row["other_kernels"]:
        return None
    lossless = others[0]["lossless"]
    margins = lossless["first_divergence_margins"]
    return {"drafter": others[0]["drafter"], "different": sum(lossless["owed"].values()), "margins": margins}
