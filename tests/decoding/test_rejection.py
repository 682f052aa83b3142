"""The rejection rules: by hand, against slow twins, and 10^5 samples each against the exact distribution."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from chi_square import MIN_P_VALUE, p_value, sample_with_stop
from truths_verifiers import (
    STOP,
    kept_softmax,
    mixed_stop,
    multi_round_acceptance,
    outcome_distribution,
    separate_thresholds,
    slow_k_sequential,
    slow_multi_round,
    slow_rho,
)

from ctcdraft.decoding.sampling import GumbelNoise, warp
from ctcdraft.decoding.tree import AcceptedPath, TokenTree
from ctcdraft.decoding.verification import Rejection, k_sequential, match, multi_round, smallest_rho

SAMPLES = 100_000
P = torch.tensor([0.30, 0.05, 0.25, 0.10, 0.20, 0.10], dtype=torch.float64)
Q = torch.tensor([0.10, 0.20, 0.10, 0.25, 0.15, 0.20], dtype=torch.float64)
SHORT = torch.tensor([0.10, 0.20, 0.10, 0.25, 0.05, 0.10], dtype=torch.float64)  # stops one time in five
SURE = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
RULES = [(multi_round, 1), (multi_round, 2), (multi_round, 4), (k_sequential, 1), (k_sequential, 2), (k_sequential, 4)]


def emitted(rule, p_V, q_V, k, seed=0, samples=SAMPLES):
    """Apply the rule `samples` times and return the emitted tokens."""
    rng = torch.Generator().manual_seed(seed)
    tokens_NK = sample_with_stop(q_V, (samples, k), rng)
    uniform_NK = torch.rand(samples, k, dtype=torch.float64, generator=rng)
    accepted_N, residual_NV = rule(p_V.expand(samples, -1), q_V.expand(samples, -1), tokens_NK, uniform_NK)
    base_tokens_N = torch.multinomial(residual_NV, 1, generator=rng)[:, 0]
    return torch.where(accepted_N >= 0, tokens_NK.gather(1, accepted_N.clamp(min=0)[:, None])[:, 0], base_tokens_N)


def counts(tokens_N, size):
    return torch.bincount(tokens_N, minlength=size).tolist()


@pytest.mark.parametrize(("rule", "k"), RULES, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("q_V", [Q, SHORT, SURE, P, SURE * 0.5], ids=["q", "stops", "one_word", "equal", "seldom"])
def test_a_hundred_thousand_draws_follow_the_base(rule, k, q_V):
    assert p_value(counts(emitted(rule, P, q_V, k), 6), P.tolist()) > MIN_P_VALUE


@pytest.mark.parametrize("rule", [separate_thresholds, mixed_stop, kept_softmax])
def test_the_same_test_refuses_the_biased_rules(rule):
    """Each comes out by enumeration as a distribution other than the base's, and 10^5 samples from it are refused."""
    k, q_V = (3, Q) if rule is separate_thresholds else (1, SHORT if rule is mixed_stop else Q)
    biased_V = torch.tensor(outcome_distribution(rule, P.tolist(), q_V.tolist(), k), dtype=torch.float64)
    assert biased_V.sum() == pytest.approx(1)
    tokens_N = torch.multinomial(biased_V, SAMPLES, replacement=True, generator=torch.Generator().manual_seed(0))
    assert p_value(counts(tokens_N, 6), P.tolist()) < MIN_P_VALUE
    exact = outcome_distribution(multi_round_acceptance, P.tolist(), q_V.tolist(), k)
    assert exact == pytest.approx(P.tolist())


@pytest.mark.parametrize("rule", [multi_round, k_sequential])
def test_acceptance_thresholds_are_independent_of_the_base_tokens(rule):
    """Through the whole verifier: thresholds that share numbers with the Gumbel noise would bias the token."""
    rng, tokens = torch.Generator().manual_seed(1), []
    for position in range(4000):
        tree = TokenTree.chain(torch.tensor(0), sample_with_stop(Q, (1, 1), rng)[0])
        tree = replace(tree, draft_probs_NV=torch.stack([Q, torch.zeros_like(Q)]))
        result = Rejection(rule)(tree, P.log().expand(2, -1), GumbelNoise(3), position)
        tokens.append(AcceptedPath.of(tree, result).tokens[0])
    assert p_value(counts(torch.tensor(tokens), 6), P.tolist()) > MIN_P_VALUE


def test_the_mixed_stop_rule_by_hand():
    """A worked example; the joint rule gives exactly the base's distribution, in fractions."""
    p = [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]
    q = [Fraction(1, 2), Fraction(1, 5), Fraction(1, 20)]
    assert outcome_distribution(mixed_stop, p, q, 1) == [Fraction(3, 8), Fraction(11, 40), Fraction(7, 20)]
    for k in (1, 2, 3):
        assert outcome_distribution(multi_round_acceptance, p, q, k) == p


def test_specinfer_by_hand():
    """p = 1/2 1/2 0, q = 1/4 1/4 1/2, sampled c, a: c is never accepted and leaves p unchanged, a always is then."""
    p = torch.tensor([[1 / 2, 1 / 2, 0.0]], dtype=torch.float64)
    q = torch.tensor([[1 / 4, 1 / 4, 1 / 2]], dtype=torch.float64)
    nearly = torch.full((1, 2), 1 - 1e-9, dtype=torch.float64)
    accepted, residual = multi_round(p, q, torch.tensor([[2, 0]]), nearly)
    assert (int(accepted), residual.tolist()) == (1, p.tolist())
    # p = 1/2 3/8 1/8, q = 1/4 1/4 1/2; c is accepted with 1/4; refused, it leaves (1/4, 1/8, 0) / (3/8) = 2/3 1/3 0.
    p = torch.tensor([[1 / 2, 3 / 8, 1 / 8]], dtype=torch.float64)
    for uniform, expected in ((0.249, 0), (0.251, -1)):
        accepted, residual = multi_round(p, q, torch.tensor([[2]]), torch.tensor([[uniform]], dtype=torch.float64))
        assert int(accepted) == expected
    assert residual[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    # c again cannot be accepted: 2/3 1/3 0 less q is 5/12 1/12 0, so 5/6 1/6 0 is left.
    accepted, residual = multi_round(p, q, torch.tensor([[2, 2]]), torch.tensor([[0.3, 0.0]], dtype=torch.float64))
    assert int(accepted) == -1
    assert residual[0].tolist() == pytest.approx([5 / 6, 1 / 6, 0])


def test_spectr_by_hand():
    """p = 1 0, q = 1/2 1/2, two samples. b = min(1/2, 1/rho); up to rho = 2 it is 1/2, so 3/4 <= rho / 2 first holds at
    rho = 3/2. The token is then always accepted (1 / (3/4) > 1): with probability 3/4 it is one of two samples."""
    p = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[1 / 2, 1 / 2]], dtype=torch.float64)
    assert smallest_rho(p, q, torch.tensor([[2]]), 2).item() == pytest.approx(3 / 2, abs=1e-5)
    # p = 3/4 1/4 with the same q: for rho <= 3/2, b = 1/2 + 1/(4 rho). 1 - (1 - b)^2 <= rho b first holds where
    # 1 - (1/2 - 1/(4 rho))^2 = rho/2 + 1/4, that is 8 rho^3 - 8 rho^2 - 4 rho + 1 = 0.
    p = torch.tensor([[3 / 4, 1 / 4]], dtype=torch.float64)
    rho = smallest_rho(p, q, torch.tensor([[2]]), 2).item()
    assert 8 * rho**3 - 8 * rho**2 - 4 * rho + 1 == pytest.approx(0, abs=1e-4)
    assert 1 < rho < 3 / 2
    # A sampled token b is accepted with p / (rho q) = 1 / (2 rho).
    for uniform, expected in ((1 / (2 * rho) - 1e-4, 0), (1 / (2 * rho) + 1e-4, -1)):
        accepted, _ = k_sequential(p, q, torch.tensor([[1, 1]]), torch.tensor([[uniform, 0.9999]], dtype=torch.float64))
        assert int(accepted) == expected


def random_case(seed):
    rng = torch.Generator().manual_seed(seed)
    size, k = 2 + seed % 4, 1 + seed % 3
    p_V = (1.5 * torch.randn(size, dtype=torch.float64, generator=rng)).softmax(-1)
    q_V = (1.5 * torch.randn(size, dtype=torch.float64, generator=rng)).softmax(-1) * (1 if seed % 2 else 0.7)
    return p_V, q_V, sample_with_stop(q_V, (k,), rng), torch.rand(k, dtype=torch.float64, generator=rng)


@pytest.mark.parametrize("seed", range(40))
def test_the_rules_equal_their_slow_twins(seed):
    p_V, q_V, tokens_K, uniform_K = random_case(seed)
    plain = p_V.tolist(), q_V.tolist(), tokens_K.tolist(), uniform_K.tolist()
    truth, distribution = slow_multi_round(*plain)
    accepted, residual = multi_round(p_V[None], q_V[None], tokens_K[None], uniform_K[None])
    assert int(accepted) == (-1 if truth is None else truth)
    assert residual[0].tolist() == pytest.approx(distribution, abs=1e-12)

    rho = smallest_rho(p_V[None], q_V[None], torch.tensor([[len(tokens_K)]]), len(tokens_K)).item()
    assert rho == pytest.approx(slow_rho(*plain[:2], len(tokens_K)), abs=2e-4)
    truth, distribution = slow_k_sequential(*plain, rho)
    accepted, residual = k_sequential(p_V[None], q_V[None], tokens_K[None], uniform_K[None])
    assert int(accepted) == (-1 if truth is None else truth)
    if truth is None and sum(distribution) > 0:
        assert residual[0].tolist() == pytest.approx(distribution, abs=1e-6)


def test_more_samples_are_accepted_more_often():
    """More samples are accepted more often; with one sample both rules are the same."""
    accepted = {}
    for rule, k in RULES:
        rng = torch.Generator().manual_seed(7)
        tokens_NK = sample_with_stop(Q, (SAMPLES, k), rng)
        uniform_NK = torch.rand(SAMPLES, k, dtype=torch.float64, generator=rng)
        accepted[rule, k] = (
            (rule(P.expand(SAMPLES, -1), Q.expand(SAMPLES, -1), tokens_NK, uniform_NK)[0] >= 0).double().mean()
        )
    overlap = float(torch.minimum(P, Q).sum())
    for rule in (multi_round, k_sequential):
        assert float(accepted[rule, 1]) == pytest.approx(overlap, abs=0.01)
        assert accepted[rule, 1] + 0.05 < accepted[rule, 2] < accepted[rule, 4]


# --- whole trees ------------------------------------------------------------------------------------------------


def sampled_chain(seed, vocabulary=5, depth=3, stop=0.0):
    """One sampled chain with the distribution after every token; a sampled stop ends the chain."""
    rng = torch.Generator().manual_seed(seed)
    table_VV = torch.randn(vocabulary + 1, vocabulary, generator=torch.Generator().manual_seed(99)).double().softmax(-1)
    chain, distributions = [], torch.zeros(depth + 1, vocabulary, dtype=torch.float64)
    for level in range(depth):
        distributions[level] = table_VV[chain[-1] if chain else vocabulary] * (1 - stop)
        token = int(sample_with_stop(distributions[level], (1,), rng))
        if token == STOP:
            break
        chain.append(token)
    tree = TokenTree.chain(torch.tensor(0), torch.tensor(chain, dtype=torch.int64))
    return TokenTree(tree.tokens_N, tree.parents_N, tree.height, distributions[: len(tree)])


@pytest.mark.parametrize(("rule", "stop"), [(multi_round, 0.0), (multi_round, 0.3), (k_sequential, 0.3)])
def test_chains_follow_the_distribution_of_whole_texts(rule, stop):
    """Two tokens through the whole verifier, the second in a step of its own where the first is the base's."""
    base_VV = torch.randn(6, 5, generator=torch.Generator().manual_seed(5)).double().softmax(-1)
    exact = [float(base_VV[5, a] * base_VV[a, b]) for a in range(5) for b in range(5)]
    verify, counts_seen = Rejection(rule), [0] * 25
    for seed in range(1500):
        tree = sampled_chain(seed, stop=stop)
        rows = torch.stack([base_VV[5], *(base_VV[int(token)] for token in tree.tokens_N[1:])])
        result = verify(tree, rows.log(), GumbelNoise(seed), 7)
        tokens = [*tree.tokens_N[result.path_K[1 : result.length]].tolist(), int(result.bonus)]
        if len(tokens) == 1:
            second = sampled_chain(10_000 + seed, stop=stop)  # any draft that is independent of the later thresholds
            rows = torch.stack([base_VV[tokens[0]], *(base_VV[int(token)] for token in second.tokens_N[1:])])
            result = verify(second, rows.log(), GumbelNoise(seed), 8)
            tokens += [*second.tokens_N[result.path_K[1 : result.length]].tolist(), int(result.bonus)]
        counts_seen[tokens[0] * 5 + tokens[1]] += 1
    assert p_value(counts_seen, exact) > MIN_P_VALUE


def test_what_was_not_sampled_is_read_by_match():
    rng = torch.Generator().manual_seed(1)
    tree = TokenTree.from_paths(torch.tensor(0), torch.tensor([[1, 2], [3, 2]]), torch.tensor([2, 2]), 9)
    for seed in range(50):
        log_probs = warp(torch.randn(len(tree), 4, generator=rng), 1.0)
        ours, theirs = (verify(tree, log_probs, GumbelNoise(seed), 3) for verify in (Rejection(multi_round), match))
        assert torch.equal(ours.path_K, theirs.path_K)
        assert ours.bonus == theirs.bonus


def test_below_a_chain_cut_by_its_limit_the_base_samples_what_autoregression_samples():
    """A row of zeros was not sampled from, so nothing is subtracted from p."""
    distribution = torch.tensor([[0.25] * 4, [0.0] * 4], dtype=torch.float64)
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    tree = TokenTree(torch.tensor([0, 2]), torch.tensor([-1, 0]), 1, distribution)
    reached = 0
    for seed in range(200):
        result = Rejection(multi_round)(tree, warp(logits, 1.0), GumbelNoise(seed), 3)
        if int(result.length) == 2:
            alone = match(TokenTree.only_root(torch.tensor(2)), warp(logits[1:], 1.0), GumbelNoise(seed), 4)
            assert result.bonus == alone.bonus
            reached += 1
    assert reached > 5
