"""Chi-square tests of samples against exact distributions, and helpers for sampled token trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from ctcdraft.ctc.next_label import PrefixBatch
from ctcdraft.decoding.tree import TokenTree


def p_value(counts: Sequence[float], probs: Sequence[float]) -> float:
    """Return the p-value of the counts; cells that expect fewer than 5 are merged. An impossible cell gives 0."""
    samples = sum(counts)
    pairs = sorted(zip(probs, counts, strict=True))
    if any(count for p, count in pairs if p == 0):
        return 0.0
    expected, seen = [0.0], [0.0]
    for p, count in pairs:
        expected[-1] += samples * p
        seen[-1] += count
        if expected[-1] >= 5:
            expected.append(0.0)
            seen.append(0.0)
    # The remainder joins the last full cell.
    spare, extra = expected.pop(), seen.pop()
    expected[-1] += spare
    seen[-1] += extra
    statistic = sum((n - e) ** 2 / e for n, e in zip(seen, expected, strict=True))
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


MIN_P_VALUE = 1e-5  # a correct sampler fails for one in 10^5 seeds; all seeds are fixed


def sample_with_stop(probs_V: torch.Tensor, shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Return tokens sampled from probs_V; what it lacks to 1 is the probability of -2, a stop."""
    full_V = torch.cat([probs_V, (1 - probs_V.sum()).clamp(min=0)[None]])
    tokens = torch.multinomial(full_V, int(torch.tensor(shape).prod()), replacement=True, generator=rng).reshape(shape)
    return torch.where(tokens == len(probs_V), -2, tokens)


def path_tokens(tree: TokenTree, node: int) -> tuple[int, ...]:
    """Return the tokens from below the root to the node."""
    return tuple(tree.tokens_N[tree.ancestors_NN[node]].tolist()[1:])


def assert_draft_probs(tree: TokenTree, distribution_after: Callable, depth: int) -> None:
    """Assert that every row that was sampled from is the distribution after its node's text."""
    for node in range(len(tree)):
        text = path_tokens(tree, node)
        wanted = distribution_after(text) if len(text) < depth else [0.0] * tree.draft_probs_NV.shape[1]
        assert tree.draft_probs_NV[node].tolist() == pytest.approx(wanted, abs=1e-10, rel=0)


def exact_next_label_distribution(
    log_probs_TC: torch.Tensor, blank: int, text: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact probs_V of the next class id after a text, and of stopping; 0 after an impossible prefix."""
    labels = PrefixBatch.empty(log_probs_TC.exp(), blank, 1)
    for token in text:
        labels = labels.extend(torch.tensor([token]))
    probs_1V, stop_1 = labels.next_distribution()
    return probs_1V[0], stop_1[0]
