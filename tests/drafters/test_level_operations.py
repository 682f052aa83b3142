"""One level of a token tree: kernels against definitions, equal log-probabilities and stop tokens included."""

from __future__ import annotations

import torch
from fused_parts import SEEDS, check_operation, random_integer, runs_kernels

from ctcdraft.drafters.trees.level_operations import best_children, best_nodes, place_level

pytestmark = runs_kernels


def random_log_probs(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Return log-probabilities of which many are equal and some -inf."""
    log_probs = torch.randn(shape, generator=rng).log_softmax(-1) if random_integer(rng, 0, 1) else -torch.ones(shape)
    return log_probs.masked_fill(torch.rand(shape, generator=rng) < 0.3, -torch.inf)


def check_levels(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    stops_S = torch.randint(0, 9, (random_integer(rng, 0, 3),), generator=rng)
    rows, children, count = random_integer(rng, 1, 8), random_integer(rng, 1, 8), random_integer(rng, 1, 20)
    best_KW = random_log_probs(rng, rows, children).sort(descending=True).values
    tokens_KW = torch.stack([torch.randperm(9, generator=rng)[:children] for _ in range(rows)])
    log_probs_K, nodes_K = random_log_probs(rng, rows), torch.randint(0, 30, (rows,), generator=rng)
    limits = random_integer(rng, 1, 40), count, random_integer(rng, 1, 20)
    overflown_KW = best_KW.clone()
    overflown_KW[: random_integer(rng, 0, 1)] = torch.nan
    check_operation(best_children, overflown_KW, tokens_KW, log_probs_K, nodes_K, stops_S, *limits)

    size = random_integer(rng, 1, 40)
    parents_R = torch.tensor([random_integer(rng, 0, n) for n in range(size)])
    joint_R = random_log_probs(rng, size)
    for candidate, parent in enumerate(parents_R.tolist()):
        if parent:
            joint_R[candidate] = min(joint_R[candidate], joint_R[parent - 1])
    check_operation(best_nodes, torch.randint(0, 9, (size,), generator=rng), parents_R, joint_R, count)

    nodes = random_integer(rng, 2, 20)
    above = random_integer(rng, 1, nodes - 1)  # nodes of the levels above, the rest is new
    nodes_J = torch.arange(above, nodes)
    parents_N = torch.tensor([-1, *(random_integer(rng, 0, min(n, above) - 1) for n in range(1, nodes))])
    new = (
        torch.randint(0, rows, nodes_J.shape, generator=rng),
        torch.randint(0, children + 1, nodes_J.shape, generator=rng),
    )
    next_nodes_K = nodes_J[: random_integer(rng, 0, len(nodes_J))]
    tokens_N, real_N = torch.randint(0, 9, (nodes,), generator=rng), torch.rand(nodes, generator=rng) < 0.7
    tree = tokens_N, real_N, random_log_probs(rng, nodes)
    check_operation(place_level, best_KW, tokens_KW, parents_N, nodes_J, *new, next_nodes_K, stops_S, *tree)


@SEEDS
def test_kernels_do_what_is_defined(seeds):
    for seed in seeds:
        check_levels(seed)
