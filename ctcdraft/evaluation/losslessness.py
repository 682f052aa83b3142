"""Did the text stay the same? Answers against autoregression's, token for token. It knows no clock.

Tree and step logits differ by about 1e-5 even in float32, so where the base all but tosses a coin its word
can flip. Such a flip is told from a bug by decoding both again in float64, where it must vanish. In half precision
that proves nothing, because the two texts were never to be equal in it; but there too a margin may be too great.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.settings import DecodingSettings, Drafter
from ctcdraft.evaluation.distribution_test import ChiSquareFit, PITHistogram
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Divergence, Record
from ctcdraft.evaluation.stock_generate import generate_answer
from ctcdraft.models.base_model import BaseLM

TIE_MARGIN = 1e-4  # of logits: a smaller margin may be rounding; a larger one never is
MAX_ROUNDINGS = 8  # of the top logit
# What rounding a number of size 1 to these types may cost.
HALF_PRECISION_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class LosslessnessChecker:
    """Finds the first divergence of an answer, and says whether rounding explains it."""

    def __init__(
        self,
        base: BaseLM,
        contestants: Mapping[str, Drafter],
        settings: DecodingSettings,
        nodes: Mapping[str, int] | None = None,
    ) -> None:
        self.nodes = nodes or {}  # of those whose trees have a size of their own
        self.base = base
        self.contestants = contestants
        self.settings = settings

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
        """None where `tokens` equal autoregression's, `truth`. sampled: they may owe its law alone."""
        if tuple(tokens) == tuple(truth):
            return None
        pairs = enumerate(zip(tokens, truth, strict=False))
        # One may be the beginning of the other; then they part where the shorter one ends.
        position = next((n for n, (a, b) in pairs if a != b), min(len(tokens), len(truth)))
        if not self.settings.owes_token_identity(sampled):
            return Divergence(turn, position, None, None, owed=False)
        margin, least = self._top2_margin(prompt_L, truth[:position], seed)
        return Divergence(turn, position, margin, self._explained_by_rounding(name, margin, least, prompt_L, seed))

    def _top2_margin(self, prompt_L: Tensor, agreed: Sequence[int], seed: int) -> tuple[float | None, float]:
        """The base's best word less its second best after the agreed text: logits, or perturbed scores at T > 0. And
        the least margin, of logits, that no rounding bridges."""
        text_L = torch.cat([prompt_L, torch.tensor(agreed, dtype=prompt_L.dtype, device=prompt_L.device)])
        scores_1V = self.base.read(text_L, self.base.new_cache(len(text_L))).logits_NV
        least = rounding_bound(scores_1V)
        if self.settings.temperature > 0:
            position_1 = torch.tensor([len(text_L)], device=text_L.device)
            scores_1V = self.settings.process_logits(scores_1V)
            scores_1V = scores_1V + GumbelNoise(seed).gumbel(position_1, scores_1V.shape[-1])
        best, second = scores_1V[0].topk(2).values.tolist()
        return (best - second if isfinite(best - second) else None), least

    def _explained_by_rounding(
        self, name: str, margin: float | None, least: float, prompt_L: Tensor, seed: int
    ) -> bool | None:
        # top-k and top-p have an edge of their own: a word on it comes or goes whatever the two best differ by.
        on_an_edge = self.settings.top_k > 0 or self.settings.top_p < 1
        # Scores at a low temperature are logits / T plus noise: the rounding of the logits grows with them.
        temperature = self.settings.temperature
        scale = min(temperature, 1.0) if temperature > 0 else 1.0
        if not on_an_edge and (margin is None or margin * scale >= least):
            return False
        if self.base.dtype in HALF_PRECISION_ROUNDING:
            return None
        base, contestants = self._float64_copies
        exact_answers = [
            generate_answer(base, contestants[one], prompt_L, self._settings_for(one), base.stop_token_ids, seed).tokens
            for one in (name, AUTOREGRESSIVE)
        ]
        return exact_answers[0] == exact_answers[1]

    def _settings_for(self, name: str) -> DecodingSettings:
        return replace(self.settings, nodes=self.nodes.get(name, self.settings.nodes))

    @property
    def _float64_copies(self) -> tuple[BaseLM, dict[str, Any]]:
        """Base and drafters in float64, made anew and kept by nobody: twice the memory, which contestants that are
        asked later would find taken, and would be charged for.

        Copied together, because drafters hold on to the base's head and embedding.
        """
        base, contestants = copy.deepcopy((self.base, dict(self.contestants)))
        for copied in (base, *contestants.values()):
            if isinstance(copied, torch.nn.Module):
                copied.double()
        return base, contestants


def rounding_bound(logits_1V: Tensor) -> float:
    """The least margin between two logits that is no rounding error, by their type and the size of the greatest.

    In half precision what 8 roundings of the top logit may cost: where that is 16, 0.5 in bfloat16 and 0.06 in
    float16. That is generous on purpose. States are rounded in every layer, which a tree and a step do in different
    orders, and what is left of it in the logits is one or two such roundings, growing with the root of the depth; a
    wrong mask, position or cache row costs whole units of logits. A fault that is hidden below stays undecided.
    """
    unit = HALF_PRECISION_ROUNDING.get(logits_1V.dtype)
    if unit is None:
        return TIE_MARGIN
    logits_1V = logits_1V.double()
    top = logits_1V.max()
    # The mean counts because logits may lie around any value: a top one of 0 does not round exactly.
    size = max(float(top.abs()), float(top - logits_1V.mean()))
    return MAX_ROUNDINGS * unit * size


def losslessness_metrics(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Counts over questions: a question is equal when all its turns are, and `rounding` is not among the equal.

    owed: the questions that differ where words are owed: wrong, which no rounding explains, undecided, because in half
    precision nobody can tell, and explained by rounding.

    chi_square, p_value and tv tell how the words that were said fit the base's law, at temperatures above 0; where
    guesses were drawn that is all they owe (see law.py). null_tv is autoregression's own tv, which chance alone makes.
    by_draft: the same of words that a draft was drawn for, in the order of what its law favours; null where there were
    none.
    """
    unequal = [found for record in records if (found := record.divergences.get(name, ()))]
    owed = [of_one for found in unequal if (of_one := [one.rounding for one in found if one.owed])]
    wrong = sum(False in of_one for of_one in owed)
    undecided = sum(None in of_one and False not in of_one for of_one in owed)
    explained = len(owed) - wrong - undecided
    ours, theirs = (
        sum((record.marks[one] for record in records if one in record.marks), PITHistogram.empty())
        for one in (name, AUTOREGRESSIVE)
    )
    fit, null, by_draft = (
        ChiSquareFit.from_counts(ours.by_base),
        ChiSquareFit.from_counts(theirs.by_base),
        ChiSquareFit.from_counts(ours.by_draft),
    )
    return {
        "unit": "question",
        "prompts": len(records),
        "equal": len(records) - len(unequal),
        "rounding": None if any(one.rounding is None for found in unequal for one in found) else explained,
        "owed": {"wrong": wrong, "undecided": undecided, "explained": explained},
        "first_divergence_margins": [one.margin for found in unequal for one in found],
        "chi_square": fit and fit.chi_square,
        "p_value": fit and fit.p_value,
        "tv": fit and fit.tv,
        "null_tv": null and null.tv,
        "tokens": fit and fit.tokens,
        "by_draft": by_draft and vars(by_draft),
    }


def other_kernels_null(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> dict[str, Any] | None:
    """How often autoregression by other kernels leaves autoregression's text too, in half precision: what may be
    expected of `row` where nothing is wrong. None without such a row, for that row itself, and where words are a law.
    """
    if (
        row["drafter"] == AUTOREGRESSIVE
        or row["other_kernels"]
        or getattr(torch, row["dtype"]) not in HALF_PRECISION_ROUNDING
    ):
        return None
    others = [other for other in rows if other["other_kernels"]]
    if not others:
        return None
    found = others[0]["lossless"]
    margins = found["first_divergence_margins"]
    return {"drafter": others[0]["drafter"], "different": sum(found["owed"].values()), "margins": margins}
