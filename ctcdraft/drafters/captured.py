"""The prefix search as one CUDA graph. It knows frames and shapes, not who drafts with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ctcdraft.ctc.prefix import Prefixes, Ranked, fixed_prefix_search, prefixes_of
from ctcdraft.decoding.fixed import captured

# Classes and frames, nodes, words a frame, words that end a text, depth
Key = tuple[tuple[int, ...], int, int, tuple[int, ...], int]


class CapturedSearch:
    """A graph for every shape that is asked for: level by level the search is some two hundred small kernels, which
    take longer to launch than to run. One number comes back to the host, how many nodes there are. On a CPU the same
    search runs eagerly."""

    def __init__(self) -> None:
        self._graphs: dict[Key, tuple[Any, Tensor, Ranked]] = {}

    def __deepcopy__(self, memo: dict) -> CapturedSearch:
        return CapturedSearch()  # a graph cannot be copied

    def __call__(
        self, log_probs_TC: Tensor, blank: int, nodes: int, words_per_frame: int, stops: tuple[int, ...], depth: int
    ) -> Prefixes:
        if not log_probs_TC.is_cuda:
            stops_S = log_probs_TC.new_tensor(stops).long()
            return prefixes_of(fixed_prefix_search(log_probs_TC, blank, nodes, words_per_frame, stops_S, depth))
        key = (tuple(log_probs_TC.shape), nodes, words_per_frame, stops, depth)
        if key not in self._graphs:
            static_log_probs_TC = log_probs_TC.clone()
            stops_S = log_probs_TC.new_tensor(stops).long()  # before: nothing may come from the host meanwhile
            graph, out = captured(lambda: fixed_prefix_search(static_log_probs_TC, blank, nodes, words_per_frame, stops_S, depth))
            self._graphs[key] = graph, static_log_probs_TC, out
        graph, static_log_probs_TC, out = self._graphs[key]
        static_log_probs_TC.copy_(log_probs_TC)
        graph.replay()
        return prefixes_of(out)
