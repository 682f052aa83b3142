"""Prefix search: the most probable prefixes of the collapsed text, level by level in batched tensor operations.

A prefix is a beginning of the collapsed text; its probability sums over every alignment whose collapse begins so,
whatever the later frames are (prefix search decoding, Graves 2012, "Supervised sequence labelling with recurrent
neural networks", section 7.5). Its mass is split by whether the last frame is a blank (Hannun et al. 2014,
"First-pass large vocabulary continuous speech recognition").

All of it is float64 in linear space: with a few tens of frames a prefix worth keeping is far above 1e-300, and sums
of products then are plain matrix products. What underflows counts as impossible.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.fused import fused

# Ranking replaces the low bits of a float64 by the index, so that no two children tie and one topk is deterministic.
# The price: probabilities within 2e-9 of each other (29 significant bits) count as equal.
INDEX_BITS = 24
MAX_CHILDREN = 1 << INDEX_BITS

# Tokens, parents and masses of nodes, the impossible ones (mass 0) last.
RankedNodes = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Prefixes:
    """Distinct non-empty texts, most probable first; a parent always comes before its children."""

    tokens_N: Tensor
    parents_N: Tensor  # index into these arrays; -1 below the empty prefix
    masses_N: Tensor  # P(the collapsed text begins with this node's text), float64


def prefix_search(
    log_probs_TC: Tensor,
    blank: int,
    nodes: int,
    tokens_per_frame: int,
    stop_token_ids: Collection[int] = (),
    depth: int | None = None,
    min_mass: float = 0.0,
) -> Prefixes:
    """Return the `nodes` most probable prefixes of at most `depth` tokens, those below `min_mass` left out.

    Two frames, each p(a) = 1/2, p(b) = 1/4, p(blank) = 1/4, and nodes = 3:

        a    1/2 (at once) + 1/8 (blank, a)  =  5/8
        b    1/4           + 1/16            =  5/16
        a b  1/8                                        (b a is as likely, but b ranks below a)

    No prefix is more probable than its parent, so the best n of all are among the best n of each depth, and these
    among the children of the best n one depth up. Nothing is placed below a stop token, impossible prefixes are left
    out, and fewer come back where fewer are possible. Equally probable prefixes (see INDEX_BITS) are ordered by depth,
    then by their parents, then by token id.

    Args:
        log_probs_TC: normalised over C.
        tokens_per_frame: candidate tokens are the union of every frame's best so many; their probabilities are those
            of the full distribution all the same.
    """
    tokens_W = _candidate_tokens(log_probs_TC, blank, tokens_per_frame)
    probs_TW, blank_T = log_probs_TC[:, tokens_W].double().exp(), log_probs_TC[:, blank].double().exp()
    stops_S = tokens_W.new_tensor(list(stop_token_ids))
    depth = len(log_probs_TC) if depth is None else depth
    return drop_improbable(_search_levels(probs_TW, blank_T, tokens_W, stops_S, nodes, depth), min_mass)


@fused("ctcdraft.ctc.triton_prefix", launches=2)
def fused_prefix_search(
    log_probs_TC: Tensor, blank: int, nodes: int, tokens_per_frame: int, stops_S: Tensor, depth: int, min_mass: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `prefix_search` with exactly `nodes` nodes, those that are missing with mass 0 and last.

    Without host synchronisation, for a CUDA graph: `drop_improbable` then counts the nodes. stops_S: int64, on the
    device of the frames.
    """
    check_blank(log_probs_TC, blank)
    few = min(tokens_per_frame, log_probs_TC.shape[1] - 1)
    tokens_W = _top_tokens(log_probs_TC, blank, few).flatten().sort().values
    # A token that several frames choose is a candidate several times, all but the first with mass 0: how many different
    # ones there are is not known without asking the device.
    duplicate_W = F.pad(tokens_W[1:] == tokens_W[:-1], (1, 0))
    probs_TW = log_probs_TC[:, tokens_W].double().exp().masked_fill(duplicate_W, 0)
    blank_T = log_probs_TC[:, blank].double().exp()
    tokens_N, parents_N, masses_N = _search_levels(probs_TW, blank_T, tokens_W, stops_S, nodes, depth)
    if (missing := nodes - len(tokens_N)) > 0:
        tokens_N, parents_N = F.pad(tokens_N, (0, missing)), F.pad(parents_N, (0, missing), value=-1)
        masses_N = F.pad(masses_N, (0, missing))
    return tokens_N, parents_N, masses_N if min_mass == 0 else masses_N.masked_fill(masses_N < min_mass, 0)


def drop_improbable(ranked: RankedNodes, min_mass: float = 0.0) -> Prefixes:
    """Return the nodes with a positive mass of at least `min_mass`, which come first."""
    masses_N = ranked[2]
    count = int(((masses_N > 0) & (masses_N >= min_mass)).sum())
    return Prefixes(*(column_N[:count] for column_N in ranked))


def _search_levels(
    probs_TW: Tensor, blank_T: Tensor, tokens_W: Tensor, stops_S: Tensor, nodes: int, depth: int
) -> RankedNodes:
    """Search over these candidate tokens."""
    frames, width = probs_TW.shape
    if nodes * width > MAX_CHILDREN:
        raise ValueError(
            f"{nodes} nodes times {width} tokens are more than the {MAX_CHILDREN} children a level can rank; "
            "lower nodes or tokens_per_frame"
        )
    stops_W = (tokens_W[:, None] == stops_S).any(1)
    runs_WTT, blank_runs_TT = run_products(probs_TW.T), run_products(blank_T)

    # Row 0 is the empty prefix. Any candidate serves as its last token: no mass ends in a token, so a repeat is like
    # any other token.
    ends_in_blank_KT, ends_in_label_KT = empty_prefix_masses(blank_runs_TT)
    last_K, max_mass_K = tokens_W.new_zeros(1), probs_TW.new_ones(1)
    levels = [(tokens_W[:0], tokens_W[:0], max_mass_K[:0])]
    parent_row, best_of_all_N = 0, max_mass_K[:0]
    for level in range(min(depth, frames)):
        either_KT = ends_in_blank_KT + ends_in_label_KT
        children_KW = either_KT @ probs_TW
        repeat_K = (ends_in_blank_KT * probs_TW.T[last_K]).sum(1)
        children_KW.scatter_(1, last_K[:, None], repeat_K[:, None])
        # Rounding must not lift a child above its parent: the parent could be cut and the child kept.
        children_R = torch.minimum(children_KW, max_mass_K[:, None]).flatten()

        best_K = top_masses(children_R, nodes)
        parent_K, token_K, mass_K = best_K // width, best_K % width, children_R[best_K]
        levels.append((tokens_W[token_K], parent_K + parent_row, mass_K))
        parent_row += len(last_K)
        if level + 1 == min(depth, frames):
            break
        if mass_K.is_cpu:  # on a GPU this question would stall every level
            if len(best_of_all_N) == nodes and mass_K[0] <= best_of_all_N[-1]:
                break  # no deeper node can be among the best
            best_of_all_N = torch.cat([best_of_all_N, mass_K]).topk(min(nodes, len(best_of_all_N) + len(mass_K))).values

        repeats_K1 = (token_K == last_K[parent_K])[:, None]
        begin_KT = torch.where(repeats_K1, ends_in_blank_KT[parent_K], either_KT[parent_K])
        # Both masses are first-order recurrences in t, hence products with a triangular matrix.
        ends_in_label_KT = (begin_KT[:, :, None] * runs_WTT[token_K]).sum(1)
        ends_in_blank_KT = ends_in_label_KT @ blank_runs_TT
        last_K, max_mass_K = token_K, mass_K.masked_fill(stops_W[token_K], 0)

    tokens_R, rows_R, mass_R = (torch.cat(parts) for parts in zip(*levels, strict=True))
    return select_nodes(tokens_R, rows_R, mass_R, nodes)


def pruned_mass(log_probs_TC: Tensor, blank: int, tokens_per_frame: int) -> Tensor:
    """Return the probability that an alignment uses a token that is no candidate of prefix_search.

    One frame, p(a) = 1/2, p(b) = 1/4, p(blank) = 1/4, tokens_per_frame = 1  ->  1/4
    """
    classes_W = F.pad(_candidate_tokens(log_probs_TC, blank, tokens_per_frame), (0, 1), value=blank)
    return 1 - log_probs_TC[:, classes_W].double().exp().sum(1).prod().clamp(max=1)


def _candidate_tokens(log_probs_TC: Tensor, blank: int, tokens_per_frame: int) -> Tensor:
    """Return the union of every frame's best tokens, ascending."""
    check_blank(log_probs_TC, blank)
    if tokens_per_frame < 1:
        raise ValueError(f"tokens_per_frame must be >= 1, got {tokens_per_frame}")
    classes = log_probs_TC.shape[1]
    if tokens_per_frame >= classes - 1:
        all_C = torch.arange(classes, device=log_probs_TC.device)
        return torch.cat([all_C[:blank], all_C[blank + 1 :]])
    return _top_tokens(log_probs_TC, blank, tokens_per_frame).unique()


def _top_tokens(log_probs_TC: Tensor, blank: int, tokens_per_frame: int) -> Tensor:
    """Return every frame's best tokens: where the blank is among the best classes, one more class replaces it."""
    best_TW = log_probs_TC.topk(tokens_per_frame + 1, dim=1).indices
    return torch.where(best_TW[:, :-1] == blank, best_TW[:, -1:], best_TW[:, :-1])


def check_blank(log_probs_TC: Tensor, blank: int) -> None:
    classes = log_probs_TC.shape[1]
    if not 0 <= blank < classes:
        raise ValueError(f"blank is class {blank}, but the frames have classes 0 to {classes - 1}")


def run_products(probs_XT: Tensor) -> Tensor:
    """Return the probability of a run of one class: runs[i, j] is the product over frames i .. j-1, 0 for j <= i.

    p = 1/2 1/4 1/8  ->  0  1/2  1/8
                         0   0   1/4
                         0   0    0      column j is the state *before* frame j
    """
    frames = probs_XT.shape[-1]
    later_TT = torch.ones(frames, frames, dtype=torch.bool, device=probs_XT.device).triu(1)
    before_X1T = F.pad(probs_XT[..., :-1], (1, 0))[..., None, :]
    return torch.where(later_TT, before_X1T, 1).cumprod(-1) * later_TT


def empty_prefix_masses(blank_runs_TT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masses of the empty prefix before each frame: of blanks only, and 0 for ending in a token."""
    blank_1T = blank_runs_TT[:1].clone()
    blank_1T[:, 0] = 1
    return blank_1T, torch.zeros_like(blank_1T)


def top_masses(mass_R: Tensor, count: int) -> Tensor:
    """Return indices of the largest masses, in order; the earlier one wins where 29 significant bits are equal."""
    # Later children get smaller low bits.
    tie_break_R = torch.arange(MAX_CHILDREN - 1, MAX_CHILDREN - 1 - len(mass_R), -1, device=mass_R.device)
    # The bits of a non-negative float, read as an integer, are in the order of the floats.
    rounded_R = (mass_R.view(torch.int64) + MAX_CHILDREN // 2) & -MAX_CHILDREN
    return (rounded_R | tie_break_R).topk(min(count, len(mass_R))).indices


def select_nodes(tokens_R: Tensor, rows_R: Tensor, mass_R: Tensor, nodes: int) -> RankedNodes:
    """Return the best nodes of all levels. Parents are rows: 0 is the empty prefix and becomes -1, r + 1 is entry r."""
    best_N = top_masses(mass_R, nodes)
    node_R = tokens_R.new_full((len(tokens_R) + 1,), -1)
    node_R[best_N + 1] = torch.arange(len(best_N), device=best_N.device)
    return tokens_R[best_N], node_R[rows_R[best_N]], mass_R[best_N]
