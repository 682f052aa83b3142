"""From frames to chains that are *drawn*, with the law of every word. What is drawn can be rejected exactly.

`prefix_search` names the likeliest texts; here chance names them, and what it draws from goes along in the tree, so
that `decoding.rejection` gives the base's own law at any temperature and accepts more than `match` would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ctcdraft.ctc.law import Labels
from ctcdraft.decoding.tree import STOP, TokenTree
from ctcdraft.errors import InputError


class Speech(Protocol):
    """K texts being said: the joint law of the next word and of saying nothing, and one word more on each."""

    def law(self) -> tuple[Tensor, Tensor]: ...

    def say(self, words_K: Tensor) -> Self: ...


class DrawnLabels:
    """Chains of labels from the exact CTC law: every alignment summed, and the end of the text a draw like others.

    chains: how many are drawn; each has its share of the nodes, and those that begin alike are merged.
    """

    def __init__(self, chains: int) -> None:
        if chains < 1:
            raise InputError(f"drafter.paths.chains={chains}: a drawn draft needs at least one chain")
        self.chains = chains

    def __call__(
        self, log_probs_TC: Tensor, root: Tensor, depth: int, nodes: int, stops: Sequence[int], rng: torch.Generator
    ) -> TokenTree:
        chains = max(min(self.chains, nodes - 1), 1)
        depth = min(depth, len(log_probs_TC), (nodes - 1) // chains)
        speech = Labels.none(log_probs_TC.double().exp(), log_probs_TC.shape[-1] - 1, chains)
        return drawn_tree(root, speech, chains, depth, stops, rng)


def drawn_tree(
    root: Tensor, speech: Any, chains: int, depth: int, stops: Sequence[int], rng: torch.Generator
) -> TokenTree:
    """`chains` chains of up to `depth` words, each word drawn from the law behind those before it; then merged.

    A chain ends where nothing is drawn, and below a stop word nothing is asked. How much is drawn must not depend on
    what is drawn in any other way: a chain that were cut because another is long would not follow its law.
    """
    if depth < 1:
        return TokenTree.only_root(root)
    ends = torch.tensor(stops, dtype=torch.int64, device=root.device)
    alive_K = torch.ones(chains, dtype=torch.bool, device=root.device)
    words, laws, asked = [], [], []
    for level in range(depth):
        law_KV, stop_K = speech.law()
        drawn_K = race(torch.cat([law_KV, stop_K[:, None]], dim=1), rng)
        says_K = alive_K & (drawn_K < law_KV.shape[1])
        words.append(torch.where(says_K, drawn_K, STOP))
        laws.append(law_KV)
        asked.append(alive_K)
        alive_K = says_K & ~torch.isin(drawn_K, ends)
        if level + 1 < depth:
            speech = speech.say(words[-1].clamp(min=0))
    return merged(root, torch.stack(words, 1), torch.stack(laws, 1), torch.stack(asked, 1))


def race(law_KX: Tensor, rng: torch.Generator) -> Tensor:
    """One draw a row: the first of exponential clocks that run at the rate of the probabilities. float64: in float32
    what is drawn would not have the law that is handed on."""
    clocks_KX = torch.empty_like(law_KX).exponential_(generator=rng)
    return (law_KX / clocks_KX).argmax(dim=1)


def merged(root: Tensor, words_KD: Tensor, laws_KDV: Tensor, asked_KD: Tensor) -> TokenTree:
    """Chains that begin alike share nodes; which chain drew what, and from which law, stays on record.

        chains  a b   ->   root - a - b      draws after the root: a a c, in the order of the chains
                a stop          \\- c         after a: b STOP

    words_KD: STOP where nothing was drawn, anything where asked_KD is not.
    """
    chains, depth = words_KD.shape
    says_KD = asked_KD & (words_KD >= 0)
    tree = TokenTree.from_paths(root, words_KD, says_KD.sum(1), limit=chains * depth + 1)
    size = len(tree)
    laws_NV = laws_KDV.new_zeros(size, laws_KDV.shape[-1])
    draws_NK = torch.full((size, chains), -1, dtype=torch.int64, device=root.device)
    rows_K = torch.arange(chains, device=root.device)
    node_K = torch.zeros_like(rows_K)
    for level in range(depth):
        here_KN = (tree.parents_N == node_K[:, None]) & (tree.tokens_N == words_KD[:, level, None])
        child_K = torch.where(says_KD[:, level], here_KN.int().argmax(1), STOP)
        asked_K = asked_KD[:, level]
        laws_NV[node_K[asked_K]] = laws_KDV[asked_K, level]
        draws_NK[node_K[asked_K], rows_K[asked_K]] = child_K[asked_K]
        node_K = torch.where(says_KD[:, level], child_K, node_K)
    return TokenTree(tree.tokens_N, tree.parents_N, tree.height, laws_NV, draws_NK)
