"""Requests to tree builders: the root, the limits of the tree, and how draft tokens are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.sampling import unwarped_log_probs
from ctcdraft.decoding.settings import LogitsProcessor
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.conditioning import ConditionedFrames

Conditioned = ConditionedFrames | None  # None: no logit correction, so the frames are the same after every prefix


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

    @classmethod
    def of(cls, context: Context, stop_ids: Sequence[int], rng: torch.Generator) -> TreeRequest:
        sampling = DraftSampling(rng, context.logits_processor)
        return cls(context.root, context.depth, context.nodes, stop_ids, sampling)

    def limit_depth(self, depth: int) -> TreeRequest:
        return replace(self, depth=min(self.depth, depth))

    def stop_ids_S(self) -> Tensor:
        return torch.tensor(self.stop_ids, dtype=torch.int64, device=self.root.device)


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
    (one path of classes, then collapsed) or "words" (frame k is draft token k).
    """

    interprets_as: str

    def __call__(self, log_probs_TC: Tensor, request: TreeRequest, conditioned: Conditioned = None) -> TokenTree: ...
