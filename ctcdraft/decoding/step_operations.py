"""Operations between the drafter's and the base's layers in a step of fixed shapes: tree, cache rows, verification.

Their kernels are in `triton_step.py`. Here, as everywhere, a node that is padding is a child of the root.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.fused import fused

PADDING = -1  # token of a node that only fills a tree to its fixed size: a child of the root, never accepted
COUNTS = 4  # numbers before the tokens in a report: see StepReport
KERNELS = "ctcdraft.decoding.triton_step"


@fused(KERNELS, launches=1)
def padded_tree(
    root_1: Tensor, tokens_R: Tensor, parents_R: Tensor, scores_R: Tensor, least: float, first: int, nodes: int,
    height: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return tokens_N, parents_N, depths_N and ancestors_NN of the tree of the draft tokens with a score above `least`.

    parents_R: numbers of draft tokens, the first being `first`, and first - 1 for the root.
    ancestors_NN is true where the column is the row's ancestor or the row itself.
    """
    missing, real_R = (0, nodes - 1 - len(tokens_R)), scores_R > least
    tokens_N = torch.cat([root_1, F.pad(torch.where(real_R, tokens_R, PADDING), missing, value=PADDING)])
    below_root_R = F.pad(torch.where(real_R, parents_R + (1 - first), 0), missing)
    parents_N = torch.cat([torch.full_like(root_1, -1), below_root_R])
    ancestors_NN = ancestors_of(below_root_R, height)
    return tokens_N, parents_N, ancestors_NN.sum(dim=1) - 1, ancestors_NN


def ancestors_of(parents_R: Tensor, height: int) -> Tensor:
    """Return ancestors_NN, given the parents of all nodes but the root."""
    drafted = len(parents_R)
    step_NN = torch.eye(drafted + 1, device=parents_R.device)
    step_NN[1:].scatter_(1, parents_R[:, None], 1.0)
    for _ in range(max(min(height, drafted) - 1, 0).bit_length()):  # each squaring doubles the reach
        step_NN = (step_NN @ step_NN).clamp_(max=1.0)
    return step_NN > 0


@fused(KERNELS, launches=1)
def tree_rows(
    length_1: Tensor, depths_K: Tensor, seen_KR: Tensor, visible: int, positions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows_K, position ids_K and mask_KM of the last K of R drafted rows behind a text of this length.

    seen_KR: which drafted rows each of the K new ones sees, itself included. M = `visible` rows are attended to.
    """
    if seen_KR.numel() == 1:  # autoregression: the rest would cost the baseline five operations per step
        mask_1M = torch.arange(visible, device=length_1.device) <= length_1
        return length_1.clone(), (length_1 + depths_K).clamp(max=positions - 1), mask_1M[None]
    rows_R = length_1 + torch.arange(seen_KR.shape[1], device=length_1.device)
    mask_KM = (torch.arange(visible, device=length_1.device) < length_1).repeat(len(seen_KR), 1)
    mask_KM.index_copy_(1, rows_R, seen_KR)
    return rows_R[-len(seen_KR) :].clone(), (length_1 + depths_K).clamp(max=positions - 1), mask_KM


@fused(KERNELS, launches=1)
def level_rows(
    length_1: Tensor, above_XR: Tensor, parents_K: Tensor, depth: int, visible: int, positions: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows_K, position ids_K and mask_KM of a level of drafted rows, and which drafted rows_KR it sees.

    above_XR: what the level above sees. The newest token of the text has depth 0.
    """
    count = len(parents_K)
    own_KK = torch.eye(count, dtype=torch.bool, device=length_1.device)
    seen_KR = torch.cat([above_XR[parents_K], own_KK], dim=1)
    depths_K = torch.full_like(parents_K, depth - 1)
    return *tree_rows.definition(length_1, depths_K, seen_KR, visible, positions), seen_KR


@fused(KERNELS, launches=1)
def text_rows(
    length_1: Tensor, real_1: Tensor, text: int, drafted: int, causal: bool, visible: int, capacity: int, positions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows_N, position ids_N and mask_NM of `text` rows, of which real_1 are real, and `drafted` ones behind
    these. A row of text sees what is before it; drafted rows see all text, and each other or (causal) those before.

    Rows of text that are not real are all written to the last row of the cache.
    """
    offsets_N = torch.arange(text, device=length_1.device)
    rows_N = torch.where(offsets_N < real_1, length_1 + offsets_N, capacity - 1)
    last_N = length_1 + offsets_N
    if drafted:
        drafted_R = real_1 + torch.arange(drafted, device=length_1.device)
        offsets_N, rows_N = torch.cat([offsets_N, drafted_R]), torch.cat([rows_N, length_1 + drafted_R])
        own_R = drafted_R if causal else (real_1 + drafted - 1).expand(drafted)
        last_N = torch.cat([last_N, length_1 + own_R])
    mask_NM = torch.arange(visible, device=length_1.device) <= last_N[:, None]
    return rows_N, (length_1 + offsets_N).clamp(max=positions - 1), mask_NM


def deepest_match(
    tokens_N: Tensor, parents_N: Tensor, depths_N: Tensor, ancestors_NN: Tensor, base_tokens_N: Tensor
) -> Tensor:
    """Return the deepest node, [1], whose path has the base's own tokens; of equals the first."""
    agrees_N = tokens_N == base_tokens_N[parents_N]
    agrees_N[:1].fill_(True)  # the root is committed; its parent, -1, stood for the last node
    accepted_N = (ancestors_NN <= agrees_N).all(dim=1)  # <= of truth values is "implies"
    # One element and not a scalar, for which torch would ask the device.
    return (depths_N * accepted_N).argmax(dim=0, keepdim=True)


@fused(KERNELS, launches=1, writes=("root_1", "new_tokens_P", "count_1", "last_1", "report_R", "length_1"))
def commit_matches(
    tokens_N: Tensor, parents_N: Tensor, depths_N: Tensor, ancestors_NN: Tensor, base_tokens_N: Tensor,
    root_1: Tensor, new_tokens_P: Tensor, count_1: Tensor, last_1: Tensor, report_R: Tensor, length_1: Tensor,
    height: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Commit the longest path whose tokens are the base's own, as `verification.match` does, and the bonus token.

    Return the path_K of accepted nodes (0 in unused slots), the cache rows_K where they are and those where they
    belong. Written are the new root, the new tokens, their number and that less one, the report, the text's length.
    """
    if len(tokens_N) == 1:  # autoregression, as above
        for written in (root_1, new_tokens_P[:1], report_R[COUNTS : COUNTS + 1]):
            written.copy_(base_tokens_N)
        for written, value in ((report_R[:1], 1), (report_R[1:3], 0), (report_R[3:4], 1), (count_1, 1), (last_1, 0)):
            written.fill_(value)
        target_1 = length_1.clone()
        length_1.add_(1)
        return torch.zeros_like(target_1), target_1, target_1.clone()
    node_1 = deepest_match(tokens_N, parents_N, depths_N, ancestors_NN, base_tokens_N)
    depth_1, bonus_1 = depths_N.gather(0, node_1), base_tokens_N.gather(0, node_1)
    slots_N = torch.where(ancestors_NN.index_select(0, node_1)[0], depths_N, height + 1)
    path = torch.zeros(height + 2, dtype=torch.int64, device=tokens_N.device)
    path_K = path.scatter_(0, slots_N, torch.arange(len(tokens_N), device=tokens_N.device))[:-1]
    target_K = length_1 + torch.arange(height + 1, device=tokens_N.device)
    source_K = length_1 + path_K
    new_K = F.pad(tokens_N[path_K[1:]], (0, 1)).scatter_(0, depth_1, bonus_1)
    real_N = tokens_N >= 0
    has_child_1 = ((parents_N == node_1) & real_N).any(dim=0, keepdim=True)
    counts = [depth_1 + 1, has_child_1, (depths_N * real_N).max()[None], real_N.sum(0, keepdim=True), new_K]
    report_R[: COUNTS + height + 1].copy_(torch.cat(counts))
    root_1.copy_(bonus_1)
    new_tokens_P[: height + 1].copy_(new_K)
    last_1.copy_(depth_1)
    count_1.copy_(depth_1 + 1)
    length_1.add_(depth_1 + 1)
    return path_K.clone(), source_K, target_K


@fused(KERNELS, launches=1, writes=("keys", "values"))
def move_rows(keys: Tensor, values: Tensor, source_K: Tensor, target_K: Tensor) -> None:
    """Copy cache rows of all layers, of buffers [LAYERS, 1, H, rows, d]."""
    for buffer in (keys, values):
        buffer.index_copy_(3, target_K, buffer.index_select(3, source_K))
