"""Inputs of tree builders: limits of the tree, random numbers, step functions, label-conditioned frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ctcdraft.ctc.fused_conditioned import LOGIT_RANGE
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.sampling import unwarped_log_probs
from ctcdraft.decoding.settings import LogitsProcessor
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.nn.compiled_step import compiled_log_softmax
from ctcdraft.nn.logit_correction import LogitCorrection


@dataclass(frozen=True)
class DraftSampling:
    """Random numbers of the draft, and the logits processor of decoding (temperature, top-k, top-p).

    Draft tokens are sampled with the processor that base tokens are sampled with (Leviathan et al. 2023; Chen et al.
    2023). Without it rejection sampling would reject tokens even if the draft distribution were the base's own.
    """

    rng: torch.Generator
    logits_processor: LogitsProcessor = unwarped_log_probs

    def warp_probs(self, probs_KV: Tensor) -> Tensor:
        """Return the distributions_KV to sample from, float64, after temperature, top-k and top-p.

        What a row lacks to 1 is the probability of ending the draft. It is kept: only the tokens are warped.

        T = 1/2:   .4 .2, end .4   ->   .48 .12, end .4
        """
        token_mass_K1 = probs_KV.sum(dim=1, keepdim=True)
        warped_KV = self.logits_processor(probs_KV.double().log()).exp()
        return torch.where(token_mass_K1 > 0, warped_KV * token_mass_K1, 0.0)


@dataclass(frozen=True)
class TreeRequest:
    """Root and limits of one token tree."""

    root: Tensor  # newest committed token, a scalar
    depth: int  # maximal number of draft tokens on a path; below 1 the tree is the root alone
    nodes: int  # maximal number of nodes, the root included
    stop_ids: Sequence[int] = ()  # tokens below which nothing is drafted
    sampling: DraftSampling | None = None  # needed by builders that sample their draft tokens
    min_path_prob: float = 0.0  # only a saving: prefix and compiled per-frame searches leave out nodes below it
    padded: bool = False  # return trees of exactly `nodes` nodes, without host synchronisation

    @classmethod
    def of(cls, context: Context, stop_ids: Sequence[int], rng: torch.Generator) -> TreeRequest:
        sampling = DraftSampling(rng, context.logits_processor)
        limits = context.min_path_prob, context.padded
        return cls(context.root, context.depth, context.nodes, stop_ids, sampling, *limits)

    def limit_depth(self, depth: int) -> TreeRequest:
        return replace(self, depth=min(self.depth, depth))

    def stop_ids_S(self) -> Tensor:
        return resident_ids(tuple(self.stop_ids), self.root.device)


@cache  # copied to an accelerator once; a copy in every draft would wait for it
def resident_ids(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Return token ids as a tensor, which must not be written to."""
    with torch.inference_mode(False):  # usable in every mode
        return torch.tensor(ids, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class ConditionedFrames:
    """The frames of one anchor, conditioned on K draft prefixes by a logit correction.

    The correction of a prefix is added to the token logits of every frame, the blank's logit stays, and the frame is
    normalised again over all classes:

        p_t(w | prefix) = p_t(w) exp(c_prefix(w)) / Z_t(prefix)        p_t(blank | prefix) = p_t(blank) / Z_t(prefix)

    This includes frames that repeat the last token of the prefix, because that token is part of the prefix.
    """

    log_probs_TC: Tensor  # without correction, the blank as last class
    token_probs_TV: Any  # the same as probabilities, kept because every level of a search multiplies them again
    blank_T: Any  # None, like these, on an accelerator, where searches of fixed shapes do not read them
    correction: LogitCorrection
    memory_KR: Tensor  # state of the correction after each prefix

    @classmethod
    def empty(cls, log_probs_TC: Tensor, correction: LogitCorrection, memory_1R: Tensor) -> Self:
        """Return the frames after the empty prefix."""
        if not log_probs_TC.is_cpu:
            return cls(log_probs_TC, None, None, correction, memory_1R)
        return cls(log_probs_TC, log_probs_TC[:, :-1].exp(), log_probs_TC[:, -1].exp(), correction, memory_1R)

    @classmethod
    def of_logits(cls, logits_TC: Tensor, correction: LogitCorrection, memory_1R: Tensor) -> Self:
        """Return the same, given logits_TC."""
        if (compiled := compiled_log_softmax(logits_TC)) is not None:
            return cls(*compiled, correction, memory_1R)
        return cls.empty(logits_TC.log_softmax(dim=-1, dtype=torch.float32), correction, memory_1R)

    def extend(self, tokens_K: Tensor, rows_K: Tensor) -> Self:
        """Return the prefixes in these rows, each with one more token."""
        return replace(self, memory_KR=self.correction.extend(self.memory_KR, rows_K, tokens_K))

    def arrays(self) -> Sequence[Any] | None:
        """Return arrays for a search of alignments; None where there are none."""
        correction = self.correction.alignment_arrays() if self.is_float32() else None
        return correction and (self.token_probs_TV.numpy(), self.memory_KR[0].numpy(), *correction)

    def is_float32(self) -> bool:
        return self.log_probs_TC.dtype == self.memory_KR.dtype == torch.float32

    def correction_weight(self) -> Tensor:
        return self.correction.out.weight

    @cached_property
    def correction_KV(self) -> Tensor:
        return self.correction(self.memory_KR).to(self.log_probs_TC.dtype)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return what the prefixes multiply the frames with: factor_KV of the tokens and scale_KT of all classes.

        p_t(w | prefix) = p_t(w) * factor * scale,   p_t(blank | prefix) = p_t(blank) * scale
        """
        factor_KV = self.correction_KV.clamp(*LOGIT_RANGE).exp_()
        probs_TV, blank_T = self.class_probs()
        normaliser_KT = (factor_KV @ probs_TV.T).add_(blank_T)
        return factor_KV, normaliser_KT.reciprocal_()

    def probs(self) -> Tensor:
        """Return the frames after every prefix: probabilities_KTC with the blank as last class."""
        factor_KV, scale_KT = self.factors()
        probs_TV, blank_T = self.class_probs()
        token_probs_KTV = probs_TV * factor_KV[:, None] * scale_KT[..., None]
        return torch.cat([token_probs_KTV, (blank_T * scale_KT)[..., None]], dim=-1)

    def class_probs(self) -> tuple[Tensor, Tensor]:
        if self.token_probs_TV is None:
            return self.log_probs_TC[:, :-1].exp(), self.log_probs_TC[:, -1].exp()
        return self.token_probs_TV, self.blank_T

    def token_log_probs(self, frame: int) -> Tensor:
        """Return log-probabilities_KV of one frame without its blank, normalised over the tokens."""
        return (self.log_probs_TC[frame, :-1] + self.correction_KV).log_softmax(dim=-1)

    def class_scores(self, frame: int) -> Tensor:
        """Return logits_KC of one frame, which rank the classes; they are not normalised."""
        blank_K1 = self.log_probs_TC[frame, -1:].expand(len(self.memory_KR), 1)
        return torch.cat([self.log_probs_TC[frame, :-1] + self.correction_KV, blank_K1], dim=1)


@dataclass(frozen=True)
class UnconditionedFrames:
    """The same interface for K prefixes that do not change the frames: all factors are one."""

    frames: int
    zeros_VR: Tensor  # the correction's weight and memories: a rank of one
    memory_KR: Tensor

    @classmethod
    def empty(cls, log_probs_TC: Tensor) -> Self:
        zeros_VR = torch.zeros_like(log_probs_TC[:1, :-1]).T
        return cls(len(log_probs_TC), zeros_VR, zeros_VR[:1])

    def extend(self, tokens_K: Tensor, rows_K: Tensor) -> Self:
        return replace(self, memory_KR=self.zeros_VR[:1].expand(len(tokens_K), 1))

    def factors(self) -> tuple[Tensor, Tensor]:
        ones_K1 = self.memory_KR + 1
        return ones_K1.expand(-1, len(self.zeros_VR)), ones_K1.expand(-1, self.frames)

    def arrays(self) -> None:
        return None

    def correction_weight(self) -> Tensor:
        return self.zeros_VR


Conditioned = ConditionedFrames | None  # None: no logit correction, so the frames are the same after every prefix


class StepFunction(Protocol):
    """Next-token distributions of a few prefixes at once, one call per level of the tree.

    Called with tokens_K, the tokens just chosen, and rows_K, the rows of the previous call that they continue; the
    first call has the root alone. Returns log_probs_KV of the next token and keeps the state of this call only.
    """

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor: ...


class StepTreeBuilder(Protocol):
    """Builds a tree from next-token distributions that depend on the draft tokens before them."""

    def __call__(self, step_function: StepFunction, request: TreeRequest) -> TokenTree: ...


class FrameTreeBuilder(Protocol):
    """Builds a tree from the frames of one anchor, log_probs_TC with the blank as last class.

    interprets_as: "alignments" (CTC), "transductions" (one label per frame or none, no merging), "raw frames"
    (one path of classes, then collapsed) or "tokens" (frame k is draft token k).
    """

    interprets_as: str

    def __call__(self, log_probs_TC: Tensor, request: TreeRequest, conditioned: Conditioned = None) -> TokenTree: ...
