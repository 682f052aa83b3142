"""Operations between the layers of a step: kernels against definitions, and definitions against the exact shapes."""

from __future__ import annotations

import pytest
import torch
from fused_parts import SEEDS, check_operation, random_integer, runs_kernels

from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.step_operations import (
    COUNTS,
    PADDING,
    commit_matches,
    level_rows,
    move_rows,
    padded_tree,
    text_rows,
    tree_rows,
)
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match_on_host

pytestmark = runs_kernels


def random_tree(rng: torch.Generator, most: int):
    """Return the arguments of padded_tree: few tokens, so that many match; some nodes are padding."""
    nodes = random_integer(rng, 1, most)
    drafted, first = random_integer(rng, 0, nodes - 1), random_integer(rng, 0, 1)
    parents = [random_integer(rng, 0, n) for n in range(drafted)]
    parents = [max(n - random_integer(rng, 0, 2), 0) for n in range(drafted)] if random_integer(rng, 0, 1) else parents
    scores = torch.rand(drafted, generator=rng)
    for node, parent in enumerate(parents):  # a child is no likelier than its parent
        if parent:
            scores[node] = min(scores[node], scores[parent - 1])
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    least = (0.0, 0.05, float("-inf"))[random_integer(rng, 0, 2)]
    scores = scores > 0.2 if random_integer(rng, 0, 2) == 0 else scores
    tokens_R = torch.tensor([parents[:n].count(parent) for n, parent in enumerate(parents)], dtype=torch.int64)
    parents_R = torch.tensor(parents, dtype=torch.int64) + first - 1
    return torch.tensor([3]), tokens_R, parents_R, scores, least, first, nodes, max(depths)


def check_tree_and_commit(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    arguments = random_tree(rng, 1 if seed % 10 == 0 else 40)
    tokens_N, parents_N, depths_N, ancestors_NN = check_operation(padded_tree, *arguments)
    nodes, height = len(tokens_N), arguments[-1]
    tree = TokenTree(tokens_N, parents_N, height)
    assert torch.equal(tree.ancestors_NN, ancestors_NN)
    assert torch.equal(tree.depths_N, depths_N)

    length_1, base_tokens_N = torch.tensor([random_integer(rng, 1, 30)]), torch.randint(0, 4, (nodes,), generator=rng)
    visible = random_integer(rng, 80, 300)
    check_operation(tree_rows, length_1, depths_N, ancestors_NN, visible, 35)
    fresh = [torch.full((size,), 9) for size in (1, height + 3, 1, 1, COUNTS + height + 3)]
    written = [*fresh, length_1.clone()]
    path_K, source_K, target_K = check_operation(
        commit_matches, tokens_N, parents_N, depths_N, ancestors_NN, base_tokens_N, *written, height
    )
    commit_matches(tokens_N, parents_N, depths_N, ancestors_NN, base_tokens_N, *written, height)
    root_1, new_tokens_P, count_1, last_1, report_R, after_1 = written
    result = match_on_host(tree, torch.nn.functional.one_hot(base_tokens_N, 5).float(), None, 0)
    count = int(result.length)
    assert path_K.tolist() == result.path_K.clamp(min=0).tolist()
    assert (int(count_1), int(last_1), int(after_1 - length_1)) == (count, count - 1, count)
    tokens = [*tokens_N[result.path_K[1:count]].tolist(), int(result.bonus)]
    assert new_tokens_P[:count].tolist() == tokens == report_R[COUNTS : COUNTS + count].tolist()
    assert (int(root_1), new_tokens_P[height + 1 :].tolist()) == (tokens[-1], [9, 9])
    real = [node for node in range(nodes) if tokens_N[node] != PADDING]
    child = any(int(parents_N[node]) == int(result.path_K[count - 1]) for node in real)
    assert report_R[:COUNTS].tolist() == [count, int(child), max(int(depths_N[n]) for n in real), len(real)]
    assert (source_K - path_K - length_1).abs().max() == 0
    assert target_K.tolist() == list(range(int(length_1), int(length_1) + height + 1))


def check_rows(seed: int) -> None:
    """Levels against those of exact shapes, rows of text by hand, and moved rows."""
    rng = torch.Generator().manual_seed(seed)
    length, visible, above = random_integer(rng, 1, 40), random_integer(rng, 90, 400), random_integer(rng, 1, 12)
    length_1 = torch.tensor([length])
    above_XR = torch.rand(above, random_integer(rng, 0, 20), generator=rng) < 0.5
    parents_K = torch.randint(0, above, (random_integer(rng, 1, 12),), generator=rng)
    level = length_1, above_XR, parents_K, random_integer(rng, 1, 5), visible, 42
    rows_K, position_ids_K, mask_KM, seen_KR = check_operation(level_rows, *level)
    exact = KVCache(1, 100)
    exact.crop(length + above_XR.shape[1])
    positions, mask, seen = exact.append_level(level[3], above_XR, parents_K)
    assert position_ids_K.tolist() == positions.clamp(max=41).tolist()
    assert torch.equal(seen, seen_KR)
    assert torch.equal(mask, mask_KM[:, : mask.shape[1]])
    assert not mask_KM[:, mask.shape[1] :].any()
    assert rows_K.tolist() == [length + above_XR.shape[1] + k for k in range(len(parents_K))]

    text, drafted, causal = random_integer(rng, 1, 9), random_integer(rng, 0, 9), random_integer(rng, 0, 1) == 1
    real = random_integer(rng, 1, text)
    limits = visible, 1000, 42
    rows_N, position_ids_N, mask_NM = check_operation(
        text_rows, length_1, torch.tensor([real]), text, drafted, causal, *limits
    )
    drafted_rows = [length + real + n for n in range(drafted)]
    assert rows_N.tolist() == [length + n if n < real else 999 for n in range(text)] + drafted_rows
    assert position_ids_N.tolist() == [min(p, 41) for p in [*range(length, length + text), *drafted_rows]]
    last = [*range(length, length + text), *(drafted_rows if causal else [length + real + drafted - 1] * drafted)]
    assert mask_NM.sum(1).tolist() == [one + 1 for one in last]

    layers, heads, width = random_integer(rng, 1, 3), random_integer(rng, 1, 3), random_integer(rng, 1, 70)
    buffers = [torch.randn(layers, 1, heads, 60, width, generator=rng) for _ in range(2)]
    size = random_integer(rng, 1, 20)
    target_K = length_1 + torch.arange(size)
    source_K = length_1 + torch.rand(size, generator=rng).cumsum(0).long().clamp(min=0)
    check_operation(move_rows, *buffers, source_K, target_K)


@SEEDS
@pytest.mark.parametrize("check", [check_tree_and_commit, check_rows])
def test_kernels_do_what_is_defined(check, seeds):
    for seed in seeds:
        check(seed)
