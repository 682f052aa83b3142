"""Did the text stay the same? Answers against autoregression's, token for token. It knows no clock.

Tree and step logits differ by about 1e-5 even in float32, so where the base all but tosses a coin its word
can flip. Such a flip is told from a bug by decoding both again in float64, where it must vanish.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ctcdraft.base import BaseLM
from ctcdraft.decoding.loop import Drafter, Settings
from ctcdraft.decoding.sampling import Noise
from ctcdraft.evaluation.fit import Fit, Marks
from ctcdraft.evaluation.outside import generate
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Divergence, Record

TIE = 1e-4  # of logits: a smaller margin may be rounding; a larger one never is
HALF = (torch.bfloat16, torch.float16)


class Judge:
    """Finds the first divergence of an answer, and says whether rounding explains it."""

    def __init__(self, base: BaseLM, contestants: Mapping[str, Drafter], settings: Settings) -> None:
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
        drawn: bool = False,
    ) -> Divergence | None:
        """None where `tokens` equal autoregression's, `truth`. drawn: they may owe its law alone."""
        if tuple(tokens) == tuple(truth):
            return None
        pairs = enumerate(zip(tokens, truth, strict=False))
        # One may be the beginning of the other; then they part where the shorter one ends.
        position = next((n for n, (a, b) in pairs if a != b), min(len(tokens), len(truth)))
        if not self.settings.same_words(drawn):
            return Divergence(turn, position, None, None)
        margin = self._margin(prompt_L, truth[:position], seed)
        return Divergence(turn, position, margin, self._rounding(name, margin, prompt_L, seed))

    def _margin(self, prompt_L: Tensor, agreed: Sequence[int], seed: int) -> float | None:
        """The base's best word less its second best after the agreed text: logits, or perturbed scores at T > 0."""
        text_L = torch.cat([prompt_L, torch.tensor(agreed, dtype=prompt_L.dtype, device=prompt_L.device)])
        scores_1V = self.base.read(text_L, self.base.new_cache(len(text_L))).logits_NV
        if self.settings.temperature > 0:
            position_1 = torch.tensor([len(text_L)], device=text_L.device)
            scores_1V = self.settings.law(scores_1V)
            scores_1V = scores_1V + Noise(seed).gumbel(position_1, scores_1V.shape[-1])
        best, second = scores_1V[0].topk(2).values.tolist()
        return best - second if isfinite(best - second) else None

    def _rounding(self, name: str, margin: float | None, prompt_L: Tensor, seed: int) -> bool | None:
        if self.base.dtype in HALF:
            return None
        # top-k and top-p have an edge of their own: a word on it comes or goes whatever the two best differ by.
        on_an_edge = self.settings.top_k > 0 or self.settings.top_p < 1
        # Scores at a low temperature are logits / T plus noise: the rounding of the logits grows with them.
        temperature = self.settings.temperature
        scale = min(temperature, 1.0) if temperature > 0 else 1.0
        if not on_an_edge and (margin is None or margin * scale >= TIE):
            return False
        base, contestants = self._exact
        again = [
            generate(base, contestants[one], prompt_L, self.settings, base.stop_tokens, seed).tokens
            for one in (name, AUTOREGRESSIVE)
        ]
        return again[0] == again[1]

    @cached_property
    def _exact(self) -> tuple[BaseLM, dict[str, Any]]:
        """Base and drafters in float64, made when first needed: twice the memory, once.

        Copied together, because drafters hold on to the base's head and embedding.
        """
        base, contestants = copy.deepcopy((self.base, dict(self.contestants)))
        for copied in (base, *contestants.values()):
            if isinstance(copied, torch.nn.Module):
                copied.double()
        return base, contestants


def certificate(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Counts over questions: a question is equal when all its turns are, and `rounding` is not among the equal.

    chi_square, p_value and tv tell how the words that were said fit the base's law, where they owe it that and not
    autoregression's own words (see law.py); null_tv is autoregression's own tv, which chance alone makes. by_draft:
    the same of words that a draft was drawn for, in the order of what its law favours; null where there were none.
    """
    unequal = [found for record in records if (found := record.divergences.get(name, ()))]
    asked = [one.rounding for found in unequal for one in found]
    explained = sum(all(one.rounding for one in found) for found in unequal)
    ours, theirs = (
        sum((record.marks[one] for record in records if one in record.marks), Marks.none())
        for one in (name, AUTOREGRESSIVE)
    )
    fit, null, by_draft = Fit.of(ours.by_base), Fit.of(theirs.by_base), Fit.of(ours.by_draft)
    return {
        "unit": "question",
        "prompts": len(records),
        "equal": len(records) - len(unequal),
        "rounding": None if asked and None in asked else explained,
        "first_divergence_margins": [one.margin for found in unequal for one in found],
        "chi_square": fit and fit.chi_square,
        "p_value": fit and fit.p_value,
        "tv": fit and fit.tv,
        "null_tv": null and null.tv,
        "tokens": fit and fit.tokens,
        "by_draft": by_draft and vars(by_draft),
    }
