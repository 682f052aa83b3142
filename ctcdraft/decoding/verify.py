"""Which guesses stand. It knows a tree and the base's law at every node; not how the guesses were made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ctcdraft.decoding.sampling import Noise
from ctcdraft.decoding.tree import TokenTree, Verdict

# (tree, the base's log-probabilities_NV after each node, noise, position of the root). Without noise the law is
# one-hot: only the best word of each row counts, and rows need not be normalised.
Verifier = Callable[[TokenTree, Tensor, Noise | None, int], Verdict]


def match(tree: TokenTree, log_probs_NV: Tensor, noise: Noise | None, root_position: int) -> Verdict:
    """Let the base speak at every node; walk on while a child says the same; the first other word is the bonus.

        root the          base after `the`: cat     cat is a child: accepted
        |- cat            base after `cat`: sat     no child says sat: bonus sat
        |   |- is
        |- dog            commits: cat sat

    Exact for any deterministic tree and any law, greedy or sampled, and needs no draft probabilities: the
    words that come out are the base's own draws, whatever was guessed. Where noise is keyed by position they
    are the very draws autoregression makes. (A drawn chain is read the same way, at a lower acceptance than
    `rejection` gives it.)
    """
    base_tokens_N = draw(log_probs_NV, noise, root_position, tree)
    if len(tree) == 1:  # nothing to walk along; what follows would cost autoregression ten operations a pass
        return Verdict(tree.depths_N, base_tokens_N.new_ones(()), base_tokens_N[0])
    agrees_N = tree.tokens_N == base_tokens_N[tree.parents_N]
    agrees_N[0] = True
    accepted_N = (tree.ancestors_NN <= agrees_N).all(dim=1)  # <= of truths is "implies": who is above it, agrees
    last = (tree.depths_N * accepted_N).argmax()
    return Verdict(path_to(tree, last), tree.depths_N[last] + 1, base_tokens_N[last])


def draw(log_probs_NV: Tensor, noise: Noise | None, root_position: int, tree: TokenTree) -> Tensor:
    """The base's word after each node, by Gumbel-max with noise keyed by the word's position; without noise the
    most probable one. Siblings share one row of noise."""
    if noise is None:
        return log_probs_NV.argmax(dim=-1)
    first = root_position + 1
    positions_R = torch.arange(first, first + tree.height + 1, device=log_probs_NV.device)
    gumbel_RV = noise.gumbel(positions_R, log_probs_NV.shape[-1])
    return (log_probs_NV + gumbel_RV[tree.depths_N]).argmax(dim=-1)


def path_to(tree: TokenTree, node: Tensor) -> Tensor:
    """The nodes from the root to `node` as path_K (K = height + 1), -1 in free slots."""
    size = len(tree)
    slots_N = torch.where(tree.ancestors_NN[node], tree.depths_N, tree.height + 1)
    path = torch.full((tree.height + 2,), -1, dtype=torch.int64, device=slots_N.device)
    return path.scatter_(0, slots_N, torch.arange(size, device=slots_N.device))[:-1]
