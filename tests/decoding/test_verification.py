"""`match`: against its slow twin, and its output against the exact distribution."""

import math

import pytest
import torch
from truths import slow_match, slow_warp

from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.sampling import GumbelNoise, warp
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match, match_on_device, match_on_host


def random_tree(rng: torch.Generator, size: int, vocabulary: int) -> TokenTree:
    """Any tree whose siblings are distinct."""
    tokens, parents = [int(torch.randint(vocabulary, (1,), generator=rng))], [-1]
    while len(tokens) < size:
        parent = int(torch.randint(len(tokens), (1,), generator=rng))
        token = int(torch.randint(vocabulary, (1,), generator=rng))
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), height=size - 1)


@pytest.mark.parametrize("way", [match, match_on_host, match_on_device])
@pytest.mark.parametrize("seed", range(60))
def test_the_walk_equals_the_slow_twin(seed, way):
    rng = torch.Generator().manual_seed(seed)
    tree = random_tree(rng, size=int(torch.randint(1, 14, (1,), generator=rng)), vocabulary=3)
    logits = torch.randn(len(tree), 3, generator=rng)
    result = way(tree, warp(logits, 0.0), None, root_position=5)
    path, bonus = slow_match(tree.tokens_N.tolist(), tree.parents_N.tolist(), logits.argmax(-1).tolist())
    assert result.path_K[: result.length].tolist() == path
    assert (result.path_K[result.length :] == -1).all()
    assert result.bonus == bonus


@pytest.mark.parametrize("seed", range(20))
def test_host_and_device_draw_the_same_tokens(seed):
    rng, noise = torch.Generator().manual_seed(seed), GumbelNoise(seed)
    tree = random_tree(rng, size=20, vocabulary=3)
    log_probs_NV = torch.randn(20, 3, generator=rng).log_softmax(-1)
    host, device = (way(tree, log_probs_NV, noise, 5) for way in (match_on_host, match_on_device))
    assert all(torch.equal(getattr(host, name), getattr(device, name)) for name in ("path_K", "length", "bonus"))


@pytest.mark.parametrize("path", [[0], [0, 1, 2, 3], [0, 1, 4], [0, 2, 3], [0, 3]])
def test_the_rows_of_the_path_are_kept_in_order(path):
    cache, rows = KVCache(2, capacity=8), torch.arange(8.0).view(1, 1, 8, 1)
    for layer in range(2):
        cache.update(rows + layer, rows - layer, layer)
    cache.keep_path(3, torch.tensor(path))
    kept = torch.cat([torch.arange(3.0), 3.0 + torch.tensor(path)])
    assert cache.length == len(kept)
    for layer, (keys, values) in enumerate(cache.layer_buffers):
        assert torch.equal(keys[0, 0, : len(kept), 0], kept + layer)
        assert torch.equal(values[0, 0, : len(kept), 0], kept - layer)


def test_a_sampled_walk_draws_what_autoregression_draws():
    """The token after a text is sampled with the noise of its position, whatever the tree looks like."""
    rng = torch.Generator().manual_seed(3)
    noise = GumbelNoise(11)
    distributions = {(): torch.randn(6, generator=rng)}
    for first in range(6):
        distributions[(first,)] = torch.randn(6, generator=rng)

    def draw(prefix, position):
        root = TokenTree.only_root(torch.tensor(0))
        return int(match(root, warp(distributions[prefix][None], 1.0), noise, position - 1).bonus)

    expected = [draw((), 8)]
    expected.append(draw((expected[0],), 9))
    tree = TokenTree.from_paths(torch.tensor(0), torch.arange(6)[:, None], torch.ones(6, dtype=torch.int64), 9)
    logits = torch.stack([distributions[()], *(distributions[(first,)] for first in range(6))])
    result = match(tree, warp(logits, 1.0), noise, root_position=7)
    assert result.length == 2
    assert [int(tree.tokens_N[result.path_K[1]]), int(result.bonus)] == expected


def chi_square(counts, probabilities, samples):
    return sum((n - samples * p) ** 2 / (samples * p) for n, p in zip(counts, probabilities, strict=True) if p > 0)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.8)])
def test_two_tokens_follow_the_exact_distribution(temperature, top_k, top_p):
    """10^5 texts of two tokens through a tree that drafts some of them: 16 outcomes against their product."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, generator=rng)
    distributions = [slow_warp(row, temperature, top_k, top_p) for row in logits.tolist()]
    exact = [distributions[0][a] * distributions[1 + a][b] for a in range(4) for b in range(4)]
    tree = TokenTree(torch.tensor([9, 2, 0, 1]), torch.tensor([-1, 0, 0, 1]), height=2)
    rows = torch.stack([logits[0], logits[3], logits[1], logits[0]])  # node 3's token is never needed
    log_probs = warp(rows, temperature, top_k, top_p)
    samples, counts = 100_000, [0] * 16
    first = torch.stack([(log_probs[0] + g).argmax() for g in GumbelNoise(5).gumbel(torch.arange(1, samples + 1), 4)])
    for token, times in zip(*first.unique(return_counts=True), strict=True):
        assert abs(int(times) / samples - distributions[0][int(token)]) < 5 * math.sqrt(0.25 / samples)
    for seed in range(4000):  # the verifier itself, one call a text
        result = match(tree, log_probs, GumbelNoise(seed), root_position=0)
        tokens = tree.tokens_N[result.path_K[1 : result.length]].tolist() + [int(result.bonus)]
        if len(tokens) == 1:  # the draft token was rejected: the next step reads the committed token
            row = warp(logits[1 + tokens[0]][None], temperature, top_k, top_p)
            tokens.append(int(match(TokenTree.only_root(torch.tensor(0)), row, GumbelNoise(seed), 1).bonus))
        counts[tokens[0] * 4 + tokens[1]] += 1
    cells = sum(p > 0 for p in exact)
    assert sum(n for n, p in zip(counts, exact, strict=True) if p == 0) == 0
    assert chi_square(counts, exact, 4000) < cells + 4.5 * math.sqrt(2 * cells)  # about 1 in 10^5 by chance
