"""Is a sample of this law? One chi-square for all that is drawn, and for the biased rules it must refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from ctcdraft.ctc.next_label import PrefixBatch
from ctcdraft.decoding.tree import TokenTree


def p_value(counts: Sequence[float], probs: Sequence[float]) -> float:
    """The chance of counts at least as far from the law; cells that expect fewer than 5 are thrown together.

    A count where the law has nothing gives 0.
    """
    draws = sum(counts)
    pairs = sorted(zip(probs, counts, strict=True))
    if any(count for p, count in pairs if p == 0):
        return 0.0
    expected, seen = [0.0], [0.0]
    for p, count in pairs:
        expected[-1] += draws * p
        seen[-1] += count
        if expected[-1] >= 5:
            expected.append(0.0)
            seen.append(0.0)
    # What is left over at the end joins the last full cell.
    spare, extra = expected.pop(), seen.pop()
    expected[-1] += spare
    seen[-1] += extra
    statistic = sum((n - e) ** 2 / e for n, e in zip(seen, expected, strict=True))
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


MIN_P_VALUE = 1e-5  # a true law fails once in 10^5 seeds; all seeds are fixed


def sample_with_stop(probs_V: torch.Tensor, shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Words drawn from law_V; what it lacks to one comes out as -2, the draft's STOP."""
    full_V = torch.cat([probs_V, (1 - probs_V.sum()).clamp(min=0)[None]])
    tokens = torch.multinomial(full_V, int(torch.tensor(shape).prod()), replacement=True, generator=rng).reshape(shape)
    return torch.where(tokens == len(probs_V), -2, tokens)


def path_tokens(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The words from below the root to the node."""
    return tuple(tree.tokens_N[tree.ancestors_NN[node]].tolist()[1:])


def assert_draft_probs(tree: TokenTree, law_of_text: Callable, depth: int) -> None:
    """Every row that was asked for is the law behind its node's text."""
    for node in range(len(tree)):
        text = path_tokens(tree, node)
        wanted = law_of_text(text) if len(text) < depth else [0.0] * tree.draft_probs_NV.shape[1]
        assert tree.draft_probs_NV[node].tolist() == pytest.approx(wanted, abs=1e-10, rel=0)


def exact_next_label_distribution(
    log_probs_TC: torch.Tensor, blank: int, text: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact law behind one text of class ids: words_V, and the chance that it ends there; 0 if it cannot begin."""
    labels = PrefixBatch.empty(log_probs_TC.exp(), blank, 1)
    for token in text:
        labels = labels.extend(torch.tensor([token]))
    probs_1V, stop_1 = labels.next_distribution()
    return probs_1V[0], stop_1[0]
