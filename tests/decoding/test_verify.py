"""`match` on tensors: the walk against its slow twin, and its law against the exact distribution."""

import math

import pytest
import torch
from truths import slow_match, slow_warp

from ctcdraft.decoding.sampling import GumbelNoise, warp
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match


def random_tree(rng: torch.Generator, size: int, words: int) -> TokenTree:
    """Any tree whose siblings are distinct."""
    tokens, parents = [int(torch.randint(words, (1,), generator=rng))], [-1]
    while len(tokens) < size:
        parent = int(torch.randint(len(tokens), (1,), generator=rng))
        word = int(torch.randint(words, (1,), generator=rng))
        if (word, parent) not in zip(tokens, parents, strict=True):
            tokens.append(word)
            parents.append(parent)
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), height=size - 1)


@pytest.mark.parametrize("seed", range(60))
def test_the_walk_equals_the_slow_twin(seed):
    rng = torch.Generator().manual_seed(seed)
    tree = random_tree(rng, size=int(torch.randint(1, 14, (1,), generator=rng)), words=3)
    logits = torch.randn(len(tree), 3, generator=rng)
    verdict = match(tree, warp(logits, 0.0), None, root_position=5)
    path, bonus = slow_match(tree.tokens_N.tolist(), tree.parents_N.tolist(), logits.argmax(-1).tolist())
    assert verdict.path_K[: verdict.length].tolist() == path
    assert (verdict.path_K[verdict.length :] == -1).all()
    assert verdict.bonus == bonus


def test_a_sampled_walk_draws_what_autoregression_draws():
    """The word after a text is drawn with the noise of its position, whatever the tree looks like."""
    rng = torch.Generator().manual_seed(3)
    noise = GumbelNoise(11)
    laws = {(): torch.randn(6, generator=rng)}
    for first in range(6):
        laws[(first,)] = torch.randn(6, generator=rng)

    def draw(prefix, position):
        root = TokenTree.only_root(torch.tensor(0))
        return int(match(root, warp(laws[prefix][None], 1.0), noise, position - 1).bonus)

    expected = [draw((), 8)]
    expected.append(draw((expected[0],), 9))
    tree = TokenTree.from_paths(torch.tensor(0), torch.arange(6)[:, None], torch.ones(6, dtype=torch.int64), 9)
    logits = torch.stack([laws[()], *(laws[(first,)] for first in range(6))])
    verdict = match(tree, warp(logits, 1.0), noise, root_position=7)
    assert verdict.length == 2
    assert [int(tree.tokens_N[verdict.path_K[1]]), int(verdict.bonus)] == expected


def chi_square(counts, probabilities, samples_drafts):
    return sum(
        (n - samples_drafts * p) ** 2 / (samples_drafts * p)
        for n, p in zip(counts, probabilities, strict=True)
        if p > 0
    )


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.8)])
def test_two_words_follow_the_exact_law(temperature, top_k, top_p):
    """10^5 texts of two words through a tree that guesses some of them: 16 outcomes against their product."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, generator=rng)
    laws = [slow_warp(row, temperature, top_k, top_p) for row in logits.tolist()]
    exact = [laws[0][a] * laws[1 + a][b] for a in range(4) for b in range(4)]
    tree = TokenTree(torch.tensor([9, 2, 0, 1]), torch.tensor([-1, 0, 0, 1]), height=2)
    rows = torch.stack([logits[0], logits[3], logits[1], logits[0]])  # node 3's word is never needed
    log_probs = warp(rows, temperature, top_k, top_p)
    draws, counts = 100_000, [0] * 16
    first = torch.stack([(log_probs[0] + g).argmax() for g in GumbelNoise(5).gumbel(torch.arange(1, draws + 1), 4)])
    for word, times in zip(*first.unique(return_counts=True), strict=True):
        assert abs(int(times) / draws - laws[0][int(word)]) < 5 * math.sqrt(0.25 / draws)
    for seed in range(4000):  # the verifier itself, one call a text
        verdict = match(tree, log_probs, GumbelNoise(seed), root_position=0)
        words = tree.tokens_N[verdict.path_K[1 : verdict.length]].tolist() + [int(verdict.bonus)]
        if len(words) == 1:  # the guess failed: the next pass reads the word that was said
            row = warp(logits[1 + words[0]][None], temperature, top_k, top_p)
            words.append(int(match(TokenTree.only_root(torch.tensor(0)), row, GumbelNoise(seed), 1).bonus))
        counts[words[0] * 4 + words[1]] += 1
    cells = sum(p > 0 for p in exact)
    assert sum(n for n, p in zip(counts, exact, strict=True) if p == 0) == 0
    assert chi_square(counts, exact, 4000) < cells + 4.5 * math.sqrt(2 * cells)  # about 1 in 10^5 by chance
