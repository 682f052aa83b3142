"""From frames to a tree of distinct texts. Here CTC ends: what comes out holds no blank and no unmerged repeat."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import log
from typing import Any

import torch
from torch import Tensor

from ctcdraft.ctc.alignment import collapse
from ctcdraft.ctc.best_first import best_first_search
from ctcdraft.ctc.best_first_listening import best_first_listening
from ctcdraft.ctc.listening import Texts, listening_search
from ctcdraft.ctc.prefix import Prefixes, prefix_search, words_lost
from ctcdraft.ctc.transitions import MERGING, Transitions
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.captured import CapturedSearch
from ctcdraft.drafters.listening import Listening
from ctcdraft.errors import InputError, number, whole

# Up to here searching one prefix at a time is the cheaper way on a CPU. Measured by benchmarks/decoding.py, 8 frames of
# 32,001 classes, one thread, sharpness 3: 0.6 ms against 1.1 at 16 nodes, 1.27 against 1.45 at 64, 1.67 against 1.61 at
# 96; on sharper frames and on flatter ones it is no slower even at 128.
FEW_NODES = 64

# (log_probs_TC with the blank as last class, root, greatest depth, nodes with the root, words that end a text,
# the chance, of which only paths that draw make use; with a correction also the frames that listen)
Paths = Callable[..., TokenTree]


class PrefixSearch:
    """The n most probable prefixes, each summed over all alignments that collapse to it.

    words_per_frame: only the most probable words of each frame are considered; where frames listen, all are. The nodes
    come out distinct and with their parents, so there is nothing left to merge.
    """

    interprets_as = "alignments"

    def __init__(self, words_per_frame: int) -> None:
        self.words_per_frame = whole(words_per_frame, "drafter.paths.words_per_frame")
        self.graph_search: CapturedSearch | None = None

    def fixed(self) -> PrefixSearch:
        """The same for a base whose reads are captured: whole trees are searched as one graph, too. Shallower ones,
        where an answer ends, are few, and each depth would be a graph of its own."""
        same = PrefixSearch(self.words_per_frame)
        same.graph_search = CapturedSearch()
        return same

    def pruned_mass(self, log_probs_TC: Tensor) -> Tensor:
        """The probability of the alignments that use a word which is not considered."""
        return words_lost(log_probs_TC, log_probs_TC.shape[-1] - 1, self.words_per_frame)

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Any = None,
        listening: Listening | None = None,
    ) -> TokenTree:
        depth = min(depth, len(log_probs_TC))
        if depth < 1:
            return TokenTree.only_root(root)
        if listening is not None:
            return tree_of_listening(log_probs_TC, listening, root, depth, nodes, stops, MERGING)
        blank = log_probs_TC.shape[-1] - 1
        if log_probs_TC.is_cpu and nodes <= FEW_NODES:
            few = best_first_search(log_probs_TC, blank, nodes - 1, self.words_per_frame, stops, depth)
            return TokenTree.from_lists(root, *few)
        if self.graph_search is not None and depth == len(log_probs_TC):
            found = self.graph_search(log_probs_TC, blank, nodes - 1, self.words_per_frame, tuple(stops), depth)
        else:
            found = prefix_search(log_probs_TC, blank, nodes - 1, self.words_per_frame, stops, depth)
        return tree_of(found, root, depth)


def tree_of_listening(
    log_probs_TC: Tensor,
    states: Texts,
    root: Tensor,
    depth: int,
    nodes: int,
    stops: Sequence[int],
    transitions: Transitions,
) -> TokenTree:
    """The n most probable texts of frames that listen, at least one word deep."""
    arguments = log_probs_TC, states, nodes - 1, stops, depth, transitions
    if log_probs_TC.is_cpu and nodes <= FEW_NODES:
        return TokenTree.from_lists(root, *best_first_listening(*arguments))
    return tree_of(listening_search(*arguments), root, depth)


def tree_of(found: Prefixes, root: Tensor, depth: int) -> TokenTree:
    tokens_N = torch.cat([root.reshape(1), found.tokens_N])
    parents_N = torch.cat([torch.full_like(root.reshape(1), -1), found.parents_N + 1])
    return TokenTree(tokens_N, parents_N, depth)


class Collapse:
    """The paper's way (Wen et al. 2024, section 3.3): a fixed set of raw paths, then merge repeats, drop blanks.

    Every raw path names one rank per frame and all have T frames. `raw_paths` of them are fixed beforehand:
    those least unlikely when each rank below the best costs a factor `rank_decay` and each frame is
    independent. Many collapse to the same text; the tree then has fewer nodes than it might.
    """

    reads = "raw frames"

    def __init__(self, raw_paths: int, ranks: int, rank_decay: float) -> None:
        self.raw_paths = whole(raw_paths, "drafter.paths.raw_paths")
        self.ranks = whole(ranks, "drafter.paths.ranks")
        self.rank_decay = number(rank_decay, "drafter.paths.rank_decay")
        if not 0 < rank_decay <= 1:
            raise InputError(
                f"drafter.paths.rank_decay={rank_decay}: a rank is less likely than the one before by this factor, "
                "which lies above 0 and reaches to 1"
            )

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Any = None,
        listening: Listening | None = None,
    ) -> TokenTree:
        if depth < 1:
            return TokenTree.only_root(root)
        frames, classes = log_probs_TC.shape
        ranks_PT = fixed_ranks(frames, min(self.ranks, classes), self.raw_paths, self.rank_decay)
        ranks_PT = ranks_PT.to(log_probs_TC.device)
        if listening is None:
            best_TR = log_probs_TC.topk(min(self.ranks, classes), dim=-1).indices
            frames_PT = best_TR[torch.arange(frames, device=best_TR.device), ranks_PT]
        else:
            frames_PT = listened(listening, ranks_PT, classes - 1)
        labels_PT, lengths_P = collapse(frames_PT, blank=classes - 1)
        lengths_P = torch.minimum(lengths_P.clamp(max=depth), until_stop(labels_PT, stops))
        return TokenTree.from_paths(root, labels_PT[:, :depth], lengths_P, limit=nodes)


def listened(conditioned: Listening, ranks_PT: Tensor, blank: int) -> Tensor:
    """Classes_PT of the ranks where every frame listens to what its own path has said before it."""
    paths = len(ranks_PT)
    rows_P, previous_P = ranks_PT.new_zeros(paths), ranks_PT.new_full((paths,), blank)
    frames = []
    for frame, ranks_P in enumerate(ranks_PT.T):
        best_KR = conditioned.class_scores(frame).topk(int(ranks_PT.max()) + 1, dim=1).indices
        classes_P = best_KR[rows_P, ranks_P]
        frames.append(classes_P)
        is_new_label_P = (classes_P != blank) & (classes_P != previous_P)
        after = conditioned.extend(torch.where(is_new_label_P, classes_P, 0), rows_P)
        memory_PR = torch.where(is_new_label_P[:, None], after.memory_KR, conditioned.memory_KR[rows_P])
        conditioned = replace(conditioned, memory_KR=memory_PR)
        rows_P, previous_P = torch.arange(paths, device=rows_P.device), classes_P
    return torch.stack(frames, dim=1)


def until_stop(labels_PT: Tensor, stops: Sequence[int]) -> Tensor:
    """Lengths_P up to and including the first stop word: nothing may hang below it."""
    ends_PT = torch.isin(labels_PT, torch.tensor(stops, dtype=labels_PT.dtype, device=labels_PT.device))
    return (ends_PT.cumsum(dim=1) - ends_PT.long() == 0).sum(dim=1)


@lru_cache(maxsize=32)
def fixed_ranks(frames: int, ranks: int, paths: int, decay: float) -> Tensor:
    """The `paths` rank sequences_PT of least cost, best first: rank r in frame t (from 0) costs

        r * -log(decay) + t * a thousandth, if r > 0,

    so that among equals a change in an early frame, which more of the text hangs on, comes first.
    Two frames, three ranks, four paths:   0 0   1 0   0 1   2 0
    """
    step = -log(decay)

    def cost(sequence: tuple[int, ...]) -> float:
        return sum(rank * step + 1e-3 * frame for frame, rank in enumerate(sequence) if rank > 0)

    start = (0,) * frames
    heap, seen = [(0.0, start)], {start}
    chosen: list[tuple[int, ...]] = []
    while heap and len(chosen) < paths:
        _, sequence = heapq.heappop(heap)
        chosen.append(sequence)
        for frame in range(frames):
            longer = (*sequence[:frame], sequence[frame] + 1, *sequence[frame + 1 :])
            if longer[frame] < ranks and longer not in seen:
                seen.add(longer)
                heapq.heappush(heap, (cost(longer), longer))
    return torch.tensor(chosen)
