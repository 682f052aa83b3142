"""A tree of guesses and what was decided about it. It knows tokens and parents; it has never heard of CTC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

NO_TOKEN = -2  # among a node's draws: the draft chose to say nothing more


@dataclass(frozen=True)
class TokenTree:
    """Node 0 is the root: committed, certain, not yet read by the base. The others are guesses.

    tokens_N: the words. parents_N: the node each one continues, -1 at the root; a parent always comes before
    its children. height: a bound on the depth that is known without asking the device.
    draft_probs_NV: only when guesses were *drawn*: row n is the law that node n's child was drawn from. What it
    lacks to 1 is the probability of drawing nothing; where nothing was asked for, below the last guess of a chain
    that was cut for room, the row is 0. draws_NK: the nodes drawn after node n, in the order of drawing, one that
    was drawn twice standing there twice; STOP where the draft chose to say nothing, -1 in free slots. Without it
    every guess is one draw, and a node with a law but without a child drew nothing.
    """

    tokens_N: Tensor
    parents_N: Tensor
    height: int
    draft_probs_NV: Tensor | None = None
    sampled_nodes_NK: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens_N)

    @classmethod
    def only_root(cls, root: Tensor) -> Self:
        """The tree without guesses, which is autoregression. root: a scalar, or [1]."""
        root_1 = root.reshape(1)
        return cls(root_1, torch.full_like(root_1, -1), height=0)

    @classmethod
    def chain(cls, root: Tensor, draft_tokens_K: Tensor) -> Self:
        """One guess after the other: root -> g1 -> g2 ..."""
        tokens_N = torch.cat([root.reshape(1), draft_tokens_K])
        return cls(tokens_N, torch.arange(-1, len(draft_tokens_K), device=tokens_N.device), height=len(draft_tokens_K))

    @classmethod
    def from_lists(cls, root: Tensor, tokens: Sequence[int], parents: Sequence[int]) -> Self:
        """Guesses that were made on the host, a parent before its children; -1 says that the root is the parent.

        Asking for the root's number is free on a CPU; on a GPU it would stall the draft.
        """
        depths = [0]
        for parent in parents:
            depths.append(depths[parent + 1] + 1)
        tokens_N = torch.tensor([int(root), *tokens], device=root.device)
        parents_N = torch.tensor([-1, *(parent + 1 for parent in parents)], device=root.device)
        return cls(tokens_N, parents_N, height=max(depths))

    @classmethod
    def from_paths(cls, root: Tensor, paths_PK: Tensor, lengths_P: Tensor, limit: int) -> Self:
        """Merge paths that begin alike; earlier paths win when only `limit` nodes (root included) fit.

            root 7, paths  5 5 8    ->   7 - 5 - 5 - 8        nodes  7 5 5 8 9
                           5 9               \\- 9            parents -1 0 1 2 1

        paths_PK: words; what lies beyond lengths_P is ignored. Tensors in, tensors out.
        """
        paths, depth = paths_PK.shape
        columns_K = torch.arange(depth, device=paths_PK.device)
        real_PK = columns_K < lengths_P[:, None]
        masked_tokens_PK = torch.where(real_PK, paths_PK, -1)
        # Entry (p, q, k): paths p and q agree on their first k + 1 words. The first such q speaks for all.
        shared_prefix_PPK = (masked_tokens_PK[:, None] == masked_tokens_PK[None]).cumprod(dim=-1)
        first_path_PK = shared_prefix_PPK.to(torch.int8).argmax(dim=1)
        new_PK = real_PK & (first_path_PK == torch.arange(paths, device=paths_PK.device)[:, None])
        # Path by path, so that a parent precedes its children and the first paths get the room there is.
        node_PK = new_PK.flatten().cumsum(0).reshape(paths, depth)
        node_PK = node_PK.gather(0, first_path_PK)
        parent_PK = torch.nn.functional.pad(node_PK[:, :-1], (1, 0))
        taken_PK = new_PK & (node_PK < limit)
        tokens_N = torch.cat([root.reshape(1), masked_tokens_PK[taken_PK]])
        parents_N = torch.cat([torch.full_like(root.reshape(1), -1), parent_PK[taken_PK]])
        return cls(tokens_N, parents_N, height=depth)

    @cached_property
    def ancestors_NN(self) -> Tensor:
        """True where column is row's ancestor or row itself."""
        size = len(self)
        step_NN = torch.eye(size, device=self.tokens_N.device)
        if size > 1:
            step_NN[torch.arange(1, size, device=step_NN.device), self.parents_N[1:]] = 1.0
        for _ in range(max(min(self.height, size - 1) - 1, 0).bit_length()):  # each squaring doubles the reach
            step_NN = (step_NN @ step_NN).clamp_(max=1.0)
        return step_NN > 0

    @cached_property
    def depths_N(self) -> Tensor:
        """Words between the root and the node: 0 at the root."""
        if len(self) == 1:  # autoregression asks for nothing else, every pass
            return torch.zeros_like(self.tokens_N)
        return self.ancestors_NN.sum(dim=1) - 1

    def attention_mask(self, past: int, dtype: torch.dtype) -> Tensor:
        """The additive mask_NM (M = past + N): everything committed, the node's ancestors, the node."""
        mask_NM = torch.zeros(len(self), past + len(self), dtype=dtype, device=self.tokens_N.device)
        mask_NM[:, past:].masked_fill_(~self.ancestors_NN, torch.finfo(dtype).min)
        return mask_NM


@dataclass(frozen=True)
class VerifyResult:
    """What the base made of a tree: the accepted nodes, root first, and the word it adds itself.

    path_K has the fixed size height + 1, with -1 in free slots; length (a scalar tensor) says how many are
    accepted; bonus is the base's own next word.
    """

    path_K: Tensor
    length: Tensor
    bonus: Tensor


@dataclass(frozen=True)
class AcceptedPath:
    """A verdict on the host: exact sizes, ready to be acted upon.

    path_K: accepted nodes, on the device. tokens: the new words, bonus last; tokens_K: the same, on the device.
    open: a guess hung below the last accepted node, so acceptance stopped there for a wrong word, not for want of
    one. drafted: depth of the deepest guess.
    """

    path_K: Tensor
    tokens: tuple[int, ...]
    tokens_K: Tensor
    has_rejected_child: bool
    drafted: int

    @classmethod
    def of(cls, tree: TokenTree, verdict: VerifyResult) -> Self:
        """The one transfer to the host of a pass."""
        if tree.height == 0:
            return cls(
                verdict.path_K, (int(verdict.bonus),), verdict.bonus.reshape(1), has_rejected_child=False, drafted=0
            )
        path_tokens_K = tree.tokens_N[verdict.path_K.clamp(min=0)]
        last = verdict.path_K[verdict.length - 1]
        is_open = (tree.parents_N == last).any()
        packed = torch.stack([verdict.length, verdict.bonus, is_open.to(path_tokens_K.dtype), tree.depths_N.max()])
        length, bonus, below, drafted, *path_tokens = torch.cat([packed, path_tokens_K]).tolist()
        tokens = (*path_tokens[1:length], bonus)
        tokens_K = torch.tensor(tokens, device=path_tokens_K.device)
        return cls(verdict.path_K[:length], tokens, tokens_K, bool(below), drafted)
