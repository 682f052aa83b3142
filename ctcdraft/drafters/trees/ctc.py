"""Trees from frames of CTC or of a transducer: distinct texts without blanks and without unmerged repeats.

Prefix search sums over the alignments of every text; `Collapse` takes a fixed set of alignments and collapses them, as
the paper does. Nothing after this module sees CTC.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import log

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.ctc.alignment import collapse
from ctcdraft.ctc.best_first import MAX_BEST_FIRST_NODES, compiled_conditioned_search, compiled_search
from ctcdraft.ctc.conditioned_search import PrefixStates, conditioned_prefix_search
from ctcdraft.ctc.fused_conditioned import fused_conditioned_search
from ctcdraft.ctc.prefix_search import Prefixes, RankedNodes, fused_prefix_search, prefix_search, pruned_mass
from ctcdraft.ctc.topology import CTC_TOPOLOGY, TRANSDUCER_TOPOLOGY, Topology
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.trees.request import Conditioned, ConditionedFrames, TreeRequest, UnconditionedFrames
from ctcdraft.drafters.trees.static import Choice, cheapest
from ctcdraft.errors import check_float, check_int


class PrefixSearch:
    """The most probable prefixes, each summed over all alignments that collapse to it.

    Args:
        tokens_per_frame: how many tokens of each frame are considered, the most probable ones; all of them where a
            logit correction conditions the frames.
    """

    fixed_shapes = True
    interprets_as = "alignments"

    def __init__(self, tokens_per_frame: int) -> None:
        self.tokens_per_frame = check_int(tokens_per_frame, "drafter.tree.tokens_per_frame")

    def pruned_mass(self, log_probs_TC: Tensor) -> Tensor:
        """Return the probability of the alignments with a token that is not considered."""
        return pruned_mass(log_probs_TC, log_probs_TC.shape[-1] - 1, self.tokens_per_frame)

    def __call__(self, log_probs_TC: Tensor, request: TreeRequest, conditioned: Conditioned = None) -> TokenTree:
        if conditioned is not None:
            return conditioned_tree(log_probs_TC, conditioned, request, CTC_TOPOLOGY)
        root, depth = request.root, min(request.depth, len(log_probs_TC))
        if depth < 1:
            return TokenTree.only_root(root)
        blank, stops = log_probs_TC.shape[-1] - 1, tuple(request.stop_ids)
        if request.padded:
            limits = request.nodes - 1, self.tokens_per_frame, request.stop_ids_S(), depth
            return padded_tree(fused_prefix_search(log_probs_TC, blank, *limits, 0.0), request, depth)
        arguments = (
            log_probs_TC, blank, request.nodes - 1, self.tokens_per_frame, stops, depth, request.min_path_prob
        )  # fmt: skip
        few = log_probs_TC.is_cpu and request.nodes <= MAX_BEST_FIRST_NODES
        if few and (found := compiled_search(*arguments)) is not None:
            return TokenTree.from_lists(root, *found)
        return tree_from_prefixes(prefix_search(*arguments), root, depth)


class TransducerSearch:
    """The most probable prefixes of a transducer, each summed over all alignments that emit it: a frame emits one token
    or none, and repeated tokens never merge."""

    fixed_shapes = True
    interprets_as = "transductions"

    def __call__(self, log_probs_TC: Tensor, request: TreeRequest, conditioned: Conditioned = None) -> TokenTree:
        states = UnconditionedFrames.empty(log_probs_TC) if conditioned is None else conditioned
        return conditioned_tree(log_probs_TC, states, request, TRANSDUCER_TOPOLOGY)


def conditioned_tree(log_probs_TC: Tensor, states: PrefixStates, request: TreeRequest, topology: Topology) -> TokenTree:
    """Return the most probable texts of frames that depend on the prefix."""
    root, depth = request.root, min(request.depth, len(log_probs_TC))
    if depth < 1:
        return TokenTree.only_root(root)
    if request.padded:
        limits = request.nodes - 1, request.stop_ids_S(), depth
        ranked = fused_conditioned_search(log_probs_TC, states, *limits, topology)
        return padded_tree(ranked, request, depth)
    arguments = log_probs_TC, states, request.nodes - 1, request.stop_ids, depth, topology, request.min_path_prob
    few = log_probs_TC.is_cpu and request.nodes <= MAX_BEST_FIRST_NODES
    if few and (found := compiled_conditioned_search(*arguments)) is not None:
        return TokenTree.from_lists(root, *found)
    return tree_from_prefixes(conditioned_prefix_search(*arguments), root, depth)


def padded_tree(ranked: RankedNodes, request: TreeRequest, depth: int) -> TokenTree:
    tokens_R, parents_R, masses_R = ranked
    limits = len(tokens_R) + 1, depth, request.min_path_prob
    return TokenTree.padded(request.root, tokens_R, parents_R, masses_R, *limits, first=0)


def tree_from_prefixes(prefixes: Prefixes, root: Tensor, depth: int) -> TokenTree:
    tokens_N = torch.cat([root.reshape(1), prefixes.tokens_N])
    parents_N = torch.cat([torch.full_like(root.reshape(1), -1), prefixes.parents_N + 1])
    return TokenTree(tokens_N, parents_N, depth, path_probs_N=F.pad(prefixes.masses_N, (1, 0), value=1.0))


class Collapse:
    """The paper's tree (Wen et al. 2024, section 3.3): a fixed set of alignments, then merge repeats, drop blanks.

    An alignment names one rank per frame. The `raw_paths` alignments are those of highest probability if each rank
    below the best costs a factor `rank_decay` and frames are independent. Several collapse to the same text, so the
    tree has fewer nodes than it might have.
    """

    fixed_shapes = True
    interprets_as = "raw frames"

    def __init__(self, raw_paths: int, ranks: int, rank_decay: float) -> None:
        self.raw_paths = check_int(raw_paths, "drafter.tree.raw_paths")
        self.ranks = check_int(ranks, "drafter.tree.ranks")
        self.rank_decay = check_float(rank_decay, "drafter.tree.rank_decay", above=0, most=1)

    def __call__(self, log_probs_TC: Tensor, request: TreeRequest, conditioned: Conditioned = None) -> TokenTree:
        depth = request.depth
        if depth < 1:
            return TokenTree.only_root(request.root)
        frames, classes = log_probs_TC.shape
        ranks = min(self.ranks, classes)
        ranks_PT = rank_sequences(frames, ranks, self.raw_paths, self.rank_decay, log_probs_TC.device)
        if conditioned is None:
            best_TR = log_probs_TC.topk(ranks, dim=-1).indices
            classes_PT = best_TR[torch.arange(frames, device=best_TR.device), ranks_PT]
        else:
            classes_PT = conditioned_classes(conditioned, ranks_PT, ranks, classes - 1)
        labels_PT, lengths_P = collapse(classes_PT, blank=classes - 1)
        lengths_P = torch.minimum(lengths_P.clamp(max=depth), lengths_to_stop(labels_PT, request.stop_ids_S()))
        return TokenTree.from_paths(request.root, labels_PT[:, :depth], lengths_P, request.nodes, request.padded)


def conditioned_classes(conditioned: ConditionedFrames, ranks_PT: Tensor, ranks: int, blank: int) -> Tensor:
    """Return the classes_PT at these ranks, every frame conditioned on the labels of its own path before it."""
    rows_P = torch.zeros_like(ranks_PT[:, 0])  # all paths start from the one row of the empty prefix
    previous_P, frames = torch.full_like(rows_P, blank), []
    for frame, ranks_P in enumerate(ranks_PT.T):
        best_KR = conditioned.class_scores(frame).topk(ranks, dim=1).indices
        classes_P = best_KR[rows_P, ranks_P]
        frames.append(classes_P)
        is_new_label_P = (classes_P != blank) & (classes_P != previous_P)
        # A blank or a repeat leaves the text as it is; its row is extended by token 0 and then thrown away.
        extended = conditioned.extend(torch.where(is_new_label_P, classes_P, 0), rows_P)
        memory_PR = torch.where(is_new_label_P[:, None], extended.memory_KR, conditioned.memory_KR[rows_P])
        conditioned = replace(conditioned, memory_KR=memory_PR)
        rows_P, previous_P = torch.arange(len(ranks_PT), device=rows_P.device), classes_P
    return torch.stack(frames, dim=1)


def lengths_to_stop(labels_PT: Tensor, stops_S: Tensor) -> Tensor:
    """Return lengths_P up to and including the first stop token: nothing may be drafted below it."""
    ends_PT = torch.isin(labels_PT, stops_S)
    return (ends_PT.cumsum(dim=1) - ends_PT.long() == 0).sum(dim=1)


@cache  # a search in Python whose arguments do not change between drafts
def rank_sequences(frames: int, ranks: int, paths: int, decay: float, device: torch.device) -> Tensor:
    """Return the `paths` rank sequences_PT of least cost, best first. Rank r in frame t (both from 0) costs

        r * -log(decay) + t / 1000, if r > 0.

    The second term breaks ties in favour of changes in early frames, on which more of the text depends.
    Two frames, three ranks, four paths:   0 0   1 0   0 1   2 0
    """

    def cost(sequence: Choice) -> float:
        return sum(rank * -log(decay) + 1e-3 * frame for frame, rank in enumerate(sequence) if rank > 0)

    def successors(sequence: Choice) -> Iterator[Choice]:
        for frame, rank in enumerate(sequence):
            if rank + 1 < ranks:
                yield (*sequence[:frame], rank + 1, *sequence[frame + 1 :])

    return torch.tensor(cheapest((0,) * frames, cost, successors, paths), device=device)
