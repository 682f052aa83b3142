"""From frames to a tree of distinct texts. Here CTC ends: what comes out holds no blank and no unmerged repeat.

The prefix search as one CUDA graph. It knows frames and shapes, not who drafts with them.
"""

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
from ctcdraft.ctc.best_first_conditioned import best_first_conditioned_search
from ctcdraft.ctc.conditioned_search import PrefixStates, conditioned_prefix_search
from ctcdraft.ctc.prefix_search import (
    Prefixes,
    RankedNodes,
    drop_impossible,
    prefix_search,
    pruned_mass,
    static_prefix_search,
)
from ctcdraft.ctc.topology import CTC_TOPOLOGY, Topology
from ctcdraft.decoding.static_shapes import capture_cuda_graph
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.conditioning import ConditionedFrames
from ctcdraft.errors import InputError, check_float, check_int

# Classes and frames, nodes, words a frame, words that end a text, depth
GraphKey = tuple[tuple[int, ...], int, int, tuple[int, ...], int]


class CUDAGraphPrefixSearch:
    """A graph for every shape that is asked for: level by level the search is some two hundred small kernels, which
    take longer to launch than to run. One number comes back to the host, how many nodes there are. On a CPU the same
    search runs eagerly."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, tuple[Any, Tensor, RankedNodes]] = {}

    def __deepcopy__(self, memo: dict) -> CUDAGraphPrefixSearch:
        return CUDAGraphPrefixSearch()  # a graph cannot be copied

    def __call__(
        self, log_probs_TC: Tensor, blank: int, nodes: int, words_per_frame: int, stops: tuple[int, ...], depth: int
    ) -> Prefixes:
        if not log_probs_TC.is_cuda:
            stops_S = log_probs_TC.new_tensor(stops).long()
            return drop_impossible(static_prefix_search(log_probs_TC, blank, nodes, words_per_frame, stops_S, depth))
        key = (tuple(log_probs_TC.shape), nodes, words_per_frame, stops, depth)
        if key not in self._graphs:
            static_log_probs_TC = log_probs_TC.clone()
            stops_S = log_probs_TC.new_tensor(stops).long()  # before: nothing may come from the host meanwhile
            graph, out = capture_cuda_graph(
                lambda: static_prefix_search(static_log_probs_TC, blank, nodes, words_per_frame, stops_S, depth)
            )
            self._graphs[key] = graph, static_log_probs_TC, out
        graph, static_log_probs_TC, out = self._graphs[key]
        static_log_probs_TC.copy_(log_probs_TC)
        graph.replay()
        return drop_impossible(out)


# Up to here searching one prefix at a time is the cheaper way on a CPU. Measured by benchmarks/decoding.py, 8 frames of
# 32,001 classes, one thread, sharpness 3: 0.6 ms against 1.1 at 16 nodes, 1.27 against 1.45 at 64, 1.67 against 1.61 at
# 96; on sharper frames and on flatter ones it is no slower even at 128.
MAX_BEST_FIRST_NODES = 64

# (log_probs_TC with the blank as last class, root, greatest depth, nodes with the root, words that end a text,
# the chance, of which only paths that draw make use; with a correction also the frames that listen)
FrameTreeBuilder = Callable[..., TokenTree]


class PrefixSearch:
    """The n most probable prefixes, each summed over all alignments that collapse to it.

    words_per_frame: only the most probable words of each frame are considered; where frames listen, all are. The nodes
    come out distinct and with their parents, so there is nothing left to merge.
    """

    interprets_as = "alignments"

    def __init__(self, words_per_frame: int) -> None:
        self.words_per_frame = check_int(words_per_frame, "drafter.paths.words_per_frame")
        self.graph_search: CUDAGraphPrefixSearch | None = None

    def fixed(self) -> PrefixSearch:
        """The same for a base whose reads are captured: whole trees are searched as one graph, too. Shallower ones,
        where an answer ends, are few, and each depth would be a graph of its own."""
        same = PrefixSearch(self.words_per_frame)
        same.graph_search = CUDAGraphPrefixSearch()
        return same

    def pruned_mass(self, log_probs_TC: Tensor) -> Tensor:
        """The probability of the alignments that use a word which is not considered."""
        return pruned_mass(log_probs_TC, log_probs_TC.shape[-1] - 1, self.words_per_frame)

    def __call__(
        self,
        log_probs_TC: Tensor,
        root: Tensor,
        depth: int,
        nodes: int,
        stops: Sequence[int],
        sampling: Any = None,
        listening: ConditionedFrames | None = None,
    ) -> TokenTree:
        depth = min(depth, len(log_probs_TC))
        if depth < 1:
            return TokenTree.only_root(root)
        if listening is not None:
            return conditioned_tree(log_probs_TC, listening, root, depth, nodes, stops, CTC_TOPOLOGY)
        blank = log_probs_TC.shape[-1] - 1
        if log_probs_TC.is_cpu and nodes <= MAX_BEST_FIRST_NODES:
            few = best_first_search(log_probs_TC, blank, nodes - 1, self.words_per_frame, stops, depth)
            return TokenTree.from_lists(root, *few)
        if self.graph_search is not None and depth == len(log_probs_TC):
            found = self.graph_search(log_probs_TC, blank, nodes - 1, self.words_per_frame, tuple(stops), depth)
        else:
            found = prefix_search(log_probs_TC, blank, nodes - 1, self.words_per_frame, stops, depth)
        return tree_from_prefixes(found, root, depth)


def conditioned_tree(
    log_probs_TC: Tensor,
    states: PrefixStates,
    root: Tensor,
    depth: int,
    nodes: int,
    stops: Sequence[int],
    topology: Topology,
) -> TokenTree:
    """The n most probable texts of frames that listen, at least one word deep."""
    arguments = log_probs_TC, states, nodes - 1, stops, depth, topology
    if log_probs_TC.is_cpu and nodes <= MAX_BEST_FIRST_NODES:
        return TokenTree.from_lists(root, *best_first_conditioned_search(*arguments))
    return tree_from_prefixes(conditioned_prefix_search(*arguments), root, depth)


def tree_from_prefixes(found: Prefixes, root: Tensor, depth: int) -> TokenTree:
    tokens_N = torch.cat([root.reshape(1), found.tokens_N])
    parents_N = torch.cat([torch.full_like(root.reshape(1), -1), found.parents_N + 1])
    return TokenTree(tokens_N, parents_N, depth)


class Collapse:
    """The paper's way (Wen et al. 2024, section 3.3): a fixed set of raw paths, then merge repeats, drop blanks.

    Every raw path names one rank per frame and all have T frames. `raw_paths` of them are fixed beforehand:
    those least unlikely when each rank below the best costs a factor `rank_decay` and each frame is
    independent. Many collapse to the same text; the tree then has fewer nodes than it might.
    """

    interprets_as = "raw frames"

    def __init__(self, raw_paths: int, ranks: int, rank_decay: float) -> None:
        self.raw_paths = check_int(raw_paths, "drafter.paths.raw_paths")
        self.ranks = check_int(ranks, "drafter.paths.ranks")
        self.rank_decay = check_float(rank_decay, "drafter.paths.rank_decay")
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
        listening: ConditionedFrames | None = None,
    ) -> TokenTree:
        if depth < 1:
            return TokenTree.only_root(root)
        frames, classes = log_probs_TC.shape
        ranks_PT = rank_sequences(frames, min(self.ranks, classes), self.raw_paths, self.rank_decay)
        ranks_PT = ranks_PT.to(log_probs_TC.device)
        if listening is None:
            best_TR = log_probs_TC.topk(min(self.ranks, classes), dim=-1).indices
            frames_PT = best_TR[torch.arange(frames, device=best_TR.device), ranks_PT]
        else:
            frames_PT = conditioned_classes(listening, ranks_PT, classes - 1)
        labels_PT, lengths_P = collapse(frames_PT, blank=classes - 1)
        lengths_P = torch.minimum(lengths_P.clamp(max=depth), lengths_to_stop(labels_PT, stops))
        return TokenTree.from_paths(root, labels_PT[:, :depth], lengths_P, limit=nodes)


def conditioned_classes(conditioned: ConditionedFrames, ranks_PT: Tensor, blank: int) -> Tensor:
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


def lengths_to_stop(labels_PT: Tensor, stops: Sequence[int]) -> Tensor:
    """Lengths_P up to and including the first stop word: nothing may hang below it."""
    ends_PT = torch.isin(labels_PT, torch.tensor(stops, dtype=labels_PT.dtype, device=labels_PT.device))
    return (ends_PT.cumsum(dim=1) - ends_PT.long() == 0).sum(dim=1)


@lru_cache(maxsize=32)
def rank_sequences(frames: int, ranks: int, paths: int, decay: float) -> Tensor:
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
