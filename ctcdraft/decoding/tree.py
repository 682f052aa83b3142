"""The token tree, the result of its verification, and the accepted path on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.decoding.step_operations import PADDING, ancestors_of, padded_tree

NO_TOKEN = -2  # among a node's samples: the draft sampled a stop


@dataclass(frozen=True)
class TokenTree:
    """A tree of draft tokens. Node 0 is the root: committed, but not yet read by the base."""

    tokens_N: Tensor
    parents_N: Tensor  # -1 at the root; a parent always comes before its children
    height: int  # a bound on the depth that is known without asking the device
    # Only if draft tokens were *sampled*: row n is the distribution that node n's children were sampled from. What it
    # lacks to 1 is the probability of a stop. A row of zeros was not sampled from, as below the last token of a chain
    # that was cut by a limit.
    draft_probs_NV: Tensor | None = None
    # The nodes sampled after node n, in the order of sampling, a node that was sampled twice listed twice; NO_TOKEN for
    # a stop, -1 in unused slots. Without it every draft token is one sample, and a node with probabilities but without
    # a child sampled a stop.
    sampled_nodes_NK: Tensor | None = None
    # The probability, under the draft, that a node and all nodes above it are right; None where it is not known. Not of
    # sampled draft tokens: what is drafted must not depend on whether it is likely.
    path_probs_N: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens_N)

    @classmethod
    def only_root(cls, root: Tensor) -> Self:
        """Return the tree without draft tokens, which is autoregression. root: a scalar, or [1]."""
        root_1 = root.reshape(1)
        return cls(root_1, torch.full_like(root_1, -1), height=0)

    @classmethod
    def chain(cls, root: Tensor, draft_tokens_K: Tensor) -> Self:
        """Return the tree with one path: root -> d1 -> d2 ..."""
        tokens_N = torch.cat([root.reshape(1), draft_tokens_K])
        return cls(tokens_N, torch.arange(-1, len(draft_tokens_K), device=tokens_N.device), height=len(draft_tokens_K))

    @classmethod
    def from_lists(
        cls, root: Tensor, tokens: Sequence[int], parents: Sequence[int], path_probs: Sequence[float] | None = None
    ) -> Self:
        """Return the tree of draft tokens on the host, a parent before its children; parent -1 is the root."""
        depths = [0]
        for parent in parents:
            depths.append(depths[parent + 1] + 1)
        # Reading the root's token id is free on a CPU; on a GPU it would stall the draft.
        tokens_N = torch.tensor([int(root), *tokens], device=root.device)
        parents_N = torch.tensor([-1, *(parent + 1 for parent in parents)], device=root.device)
        path_probs_N = None
        if path_probs is not None:
            path_probs_N = torch.tensor([1.0, *path_probs], dtype=torch.float64, device=root.device)
        return cls(tokens_N, parents_N, height=max(depths), path_probs_N=path_probs_N)

    @classmethod
    def from_paths(cls, root: Tensor, paths_PK: Tensor, lengths_P: Tensor, limit: int, padded: bool = False) -> Self:
        """Merge common prefixes of paths; earlier paths win when only `limit` nodes (root included) fit.

            root 7, paths  5 5 8    ->   7 - 5 - 5 - 8        nodes  7 5 5 8 9
                           5 9               \\- 9            parents -1 0 1 2 1

        paths_PK: token ids; entries beyond lengths_P are ignored. padded: return a tree of exactly `limit` nodes.
        """
        paths, depth = paths_PK.shape
        columns_K = torch.arange(depth, device=paths_PK.device)
        real_PK = columns_K < lengths_P[:, None]
        masked_tokens_PK = torch.where(real_PK, paths_PK, -1)
        # Entry (p, q, k): paths p and q agree on their first k + 1 tokens. The first such q owns the shared node.
        shared_prefix_PPK = (masked_tokens_PK[:, None] == masked_tokens_PK[None]).cumprod(dim=-1)
        first_path_PK = shared_prefix_PPK.to(torch.int8).argmax(dim=1)
        new_PK = real_PK & (first_path_PK == torch.arange(paths, device=paths_PK.device)[:, None])
        # Nodes are numbered path by path, so a parent precedes its children and the first paths win.
        node_PK = new_PK.flatten().cumsum(0).reshape(paths, depth).gather(0, first_path_PK)
        parent_PK = F.pad(node_PK[:, :-1], (1, 0))
        taken_PK = new_PK & (node_PK < limit)
        if padded:
            # By node number; paths that own no node, or none within the limit, write behind the last one.
            place_R = torch.where(taken_PK, node_PK, limit).flatten()
            columns = [(PADDING, masked_tokens_PK), (0, parent_PK)]
            tokens_N, parents_N = (
                torch.full_like(place_R[:1].expand(limit + 1), value).scatter(0, place_R, column_PK.flatten())[1:limit]
                for value, column_PK in columns
            )
            return cls.padded(root, tokens_N, parents_N, tokens_N >= 0, limit, depth)
        tokens_N = torch.cat([root.reshape(1), masked_tokens_PK[taken_PK]])
        parents_N = torch.cat([torch.full_like(root.reshape(1), -1), parent_PK[taken_PK]])
        return cls(tokens_N, parents_N, height=depth)

    @classmethod
    def padded(
        cls,
        root: Tensor,
        tokens_R: Tensor,
        parents_R: Tensor,
        scores_R: Tensor,
        nodes: int,
        height: int,
        least: float = 0.0,
        first: int = 1,
    ) -> Self:
        """Return the tree of fixed size with the draft tokens that score above `least`; below another none may.

        parents_R: numbers of draft tokens, the first one being `first`, and one less for the root.
        """
        drafted = tokens_R, parents_R, scores_R, least, first
        tokens_N, parents_N, depths_N, ancestors_NN = padded_tree(root.reshape(1), *drafted, nodes, height)
        tree = cls(tokens_N, parents_N, height)
        vars(tree).update(depths_N=depths_N, ancestors_NN=ancestors_NN)
        return tree

    @cached_property
    def ancestors_NN(self) -> Tensor:
        """True where the column is the row's ancestor or the row itself."""
        size = len(self)
        if self.tokens_N.is_cpu:
            seen_NN = np.eye(size, dtype=bool)
            for node, parent in enumerate(self.host_parents[1:], start=1):
                seen_NN[node] |= seen_NN[parent]
            return torch.from_numpy(seen_NN)
        return ancestors_of(self.parents_N[1:], self.height)

    @cached_property
    def depths_N(self) -> Tensor:
        if len(self) == 1:  # the shortcut of autoregression, which needs depths in every step
            return torch.zeros_like(self.tokens_N)
        return torch.tensor(self.host_depths) if self.tokens_N.is_cpu else self.ancestors_NN.sum(dim=1) - 1

    # Parents and depths on the host, for trees on a CPU, where a loop over nodes takes less time than a few tensor
    # operations; elsewhere this would be a host synchronisation.
    @cached_property
    def host_parents(self) -> list[int]:
        return self.parents_N.tolist()

    @cached_property
    def host_depths(self) -> list[int]:
        depths = [0]
        for parent in self.host_parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def attention_mask(self, past: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask_NM (M = past + N): a node sees all committed tokens, its ancestors and itself."""
        mask_NM = torch.zeros(len(self), past + len(self), dtype=dtype, device=self.tokens_N.device)
        mask_NM[:, past:].masked_fill_(~self.ancestors_NN, torch.finfo(dtype).min)
        return mask_NM


@dataclass(frozen=True)
class VerifyResult:
    """The accepted nodes of a tree and the bonus token, on the device."""

    path_K: Tensor  # root first; of the fixed size height + 1, -1 in unused slots
    length: Tensor  # scalar: the number of accepted nodes
    bonus: Tensor  # scalar: the base's own next token


@dataclass(frozen=True)
class AcceptedPath:
    """A verification result on the host, with exact sizes."""

    path_K: Tensor  # accepted nodes, on the device
    tokens: tuple[int, ...]  # the new tokens, the bonus token last
    tokens_K: Tensor  # the same, on the device
    has_rejected_child: bool  # the last accepted node has a child: acceptance stopped at a wrong draft token
    drafted: int  # depth of the deepest draft token

    @classmethod
    def of(cls, tree: TokenTree, result: VerifyResult) -> Self:
        """Transfer the result to the host."""
        if tree.height == 0:  # the shortcut of autoregression
            tokens_1 = result.bonus.reshape(1)
            return cls(result.path_K, (int(result.bonus),), tokens_1, has_rejected_child=False, drafted=0)
        if tree.tokens_N.is_cpu:
            path, tokens_N = result.path_K[: int(result.length)].tolist(), tree.tokens_N.tolist()
            tokens = (*(tokens_N[node] for node in path[1:]), int(result.bonus))
            is_inner, depth = path[-1] in tree.host_parents, max(tree.host_depths)
            return cls(result.path_K[: len(path)], tokens, torch.tensor(tokens), is_inner, depth)
        path_tokens_K = tree.tokens_N[result.path_K.clamp(min=0)]
        last = result.path_K.gather(0, (result.length - 1).reshape(1))  # path_K[length - 1] would wait for the device
        has_child = (tree.parents_N == last).any().to(path_tokens_K.dtype)
        # One transfer per step: each of its own would wait for the device.
        counts = torch.stack([result.length, result.bonus, has_child, tree.depths_N.max()])
        length, bonus, rejected, drafted, *path_tokens = torch.cat([counts, path_tokens_K]).tolist()
        tokens = (*path_tokens[1:length], bonus)
        tokens_K = torch.cat([path_tokens_K[1:length], result.bonus.reshape(1)])
        return cls(result.path_K[:length], tokens, tokens_K, bool(rejected), drafted)
