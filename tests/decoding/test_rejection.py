"""The rejection rules: by pencil, against slow twins, and 10^5 draws each against the exact law."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from laws import MIN_P_VALUE, p_value, sample_with_stop
from truths_verifiers import (
    STOP,
    kept_softmax_chances,
    mixed_stop_chances,
    multi_round_chances,
    outcome_distribution,
    own_coins_chances,
    slow_k_sequential,
    slow_multi_round,
    slow_rho,
)

from ctcdraft.decoding.rejection import Rejection, k_sequential, multi_round, smallest_rho
from ctcdraft.decoding.sampling import GumbelNoise, warp
from ctcdraft.decoding.tree import AcceptedPath, TokenTree
from ctcdraft.decoding.verification import match

DRAWS = 100_000
P = torch.tensor([0.30, 0.05, 0.25, 0.10, 0.20, 0.10], dtype=torch.float64)
Q = torch.tensor([0.10, 0.20, 0.10, 0.25, 0.15, 0.20], dtype=torch.float64)
SHORT = torch.tensor([0.10, 0.20, 0.10, 0.25, 0.05, 0.10], dtype=torch.float64)  # stops one time in five
SURE = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
RULES = [(multi_round, 1), (multi_round, 2), (multi_round, 4), (k_sequential, 1), (k_sequential, 2), (k_sequential, 4)]


def emitted(rule, p_V, q_V, k, seed=0, samples_drafts=DRAWS):
    """What the rule says, `samples_drafts` times: the words themselves."""
    rng = torch.Generator().manual_seed(seed)
    words_NK = sample_with_stop(q_V, (samples_drafts, k), rng)
    coins_NK = torch.rand(samples_drafts, k, dtype=torch.float64, generator=rng)
    stands_N, rest_NV = rule(p_V.expand(samples_drafts, -1), q_V.expand(samples_drafts, -1), words_NK, coins_NK)
    own_N = torch.multinomial(rest_NV, 1, generator=rng)[:, 0]
    return torch.where(stands_N >= 0, words_NK.gather(1, stands_N.clamp(min=0)[:, None])[:, 0], own_N)


def counts(words_N, size):
    return torch.bincount(words_N, minlength=size).tolist()


@pytest.mark.parametrize(("rule", "k"), RULES, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("q_V", [Q, SHORT, SURE, P, SURE * 0.5], ids=["q", "stops", "one_word", "equal", "seldom"])
def test_a_hundred_thousand_draws_follow_the_base(rule, k, q_V):
    assert p_value(counts(emitted(rule, P, q_V, k), 6), P.tolist()) > MIN_P_VALUE


@pytest.mark.parametrize("chances", [own_coins_chances, mixed_stop_chances, kept_softmax_chances])
def test_the_same_test_refuses_the_biased_rules(chances):
    """Each comes out by enumeration as another law than the base's, and 10^5 draws from it are refused."""
    k, q_V = (3, Q) if chances is own_coins_chances else (1, SHORT if chances is mixed_stop_chances else Q)
    biased_V = torch.tensor(outcome_distribution(chances, P.tolist(), q_V.tolist(), k), dtype=torch.float64)
    assert biased_V.sum() == pytest.approx(1)
    words_N = torch.multinomial(biased_V, DRAWS, replacement=True, generator=torch.Generator().manual_seed(0))
    assert p_value(counts(words_N, 6), P.tolist()) < MIN_P_VALUE
    exact = outcome_distribution(multi_round_chances, P.tolist(), q_V.tolist(), k)
    assert exact == pytest.approx(P.tolist())


@pytest.mark.parametrize("rule", [multi_round, k_sequential])
def test_the_coins_owe_nothing_to_the_words_of_the_base(rule):
    """Through the whole verifier: a coin among the numbers that draw the base's own word would bias that word."""
    rng, words = torch.Generator().manual_seed(1), []
    for place in range(4000):
        tree = TokenTree.chain(torch.tensor(0), sample_with_stop(Q, (1, 1), rng)[0])
        tree = replace(tree, draft_probs_NV=torch.stack([Q, torch.zeros_like(Q)]))
        verdict = Rejection(rule)(tree, P.log().expand(2, -1), GumbelNoise(3), place)
        words.append(AcceptedPath.of(tree, verdict).tokens[0])
    assert p_value(counts(torch.tensor(words), 6), P.tolist()) > MIN_P_VALUE


def test_the_mixed_stop_rule_by_pencil():
    """The blueprint's example; the joint rule gives the base's law back, in whole fractions."""
    p = [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]
    q = [Fraction(1, 2), Fraction(1, 5), Fraction(1, 20)]
    assert outcome_distribution(mixed_stop_chances, p, q, 1) == [Fraction(3, 8), Fraction(11, 40), Fraction(7, 20)]
    for k in (1, 2, 3):
        assert outcome_distribution(multi_round_chances, p, q, k) == p


def test_specinfer_by_pencil():
    """p = 1/2 1/2 0, q = 1/4 1/4 1/2; drawn c, then a: c never stands and leaves p as it was, a then surely does."""
    p = torch.tensor([[1 / 2, 1 / 2, 0.0]], dtype=torch.float64)
    q = torch.tensor([[1 / 4, 1 / 4, 1 / 2]], dtype=torch.float64)
    nearly = torch.full((1, 2), 1 - 1e-9, dtype=torch.float64)
    stands, rest = multi_round(p, q, torch.tensor([[2, 0]]), nearly)
    assert (int(stands), rest.tolist()) == (1, p.tolist())
    # p = 1/2 3/8 1/8, q = 1/4 1/4 1/2; c stands with 1/4; refused, it leaves (1/4, 1/8, 0) / (3/8) = 2/3 1/3 0.
    p = torch.tensor([[1 / 2, 3 / 8, 1 / 8]], dtype=torch.float64)
    for coin, expected in ((0.249, 0), (0.251, -1)):
        stands, rest = multi_round(p, q, torch.tensor([[2]]), torch.tensor([[coin]], dtype=torch.float64))
        assert int(stands) == expected
    assert rest[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    # c again cannot stand: 2/3 1/3 0 less q is 5/12 1/12 0, so 5/6 1/6 0 is left.
    stands, rest = multi_round(p, q, torch.tensor([[2, 2]]), torch.tensor([[0.3, 0.0]], dtype=torch.float64))
    assert int(stands) == -1
    assert rest[0].tolist() == pytest.approx([5 / 6, 1 / 6, 0])


def test_spectr_by_pencil():
    """p = 1 0, q = 1/2 1/2, two draws. b = min(1/2, 1/rho); up to rho = 2 it is 1/2, so 3/4 <= rho / 2 first holds at
    rho = 3/2. The word then stands always (1 / (3/4) > 1): with probability 3/4 one of two draws is it."""
    p = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[1 / 2, 1 / 2]], dtype=torch.float64)
    assert smallest_rho(p, q, torch.tensor([[2]]), 2).item() == pytest.approx(3 / 2, abs=1e-5)
    # p = 3/4 1/4 with the same q: for rho <= 3/2, b = 1/2 + 1/(4 rho). 1 - (1 - b)^2 <= rho b first holds where
    # 1 - (1/2 - 1/(4 rho))^2 = rho/2 + 1/4, that is 8 rho^3 - 8 rho^2 - 4 rho + 1 = 0.
    p = torch.tensor([[3 / 4, 1 / 4]], dtype=torch.float64)
    rho = smallest_rho(p, q, torch.tensor([[2]]), 2).item()
    assert 8 * rho**3 - 8 * rho**2 - 4 * rho + 1 == pytest.approx(0, abs=1e-4)
    assert 1 < rho < 3 / 2
    # b a word that is drawn stands with p / (rho q) = 1 / (2 rho).
    for coin, expected in ((1 / (2 * rho) - 1e-4, 0), (1 / (2 * rho) + 1e-4, -1)):
        stands, _ = k_sequential(p, q, torch.tensor([[1, 1]]), torch.tensor([[coin, 0.9999]], dtype=torch.float64))
        assert int(stands) == expected


def random_case(seed):
    rng = torch.Generator().manual_seed(seed)
    size, k = 2 + seed % 4, 1 + seed % 3
    p_V = (1.5 * torch.randn(size, dtype=torch.float64, generator=rng)).softmax(-1)
    q_V = (1.5 * torch.randn(size, dtype=torch.float64, generator=rng)).softmax(-1) * (1 if seed % 2 else 0.7)
    return p_V, q_V, sample_with_stop(q_V, (k,), rng), torch.rand(k, dtype=torch.float64, generator=rng)


@pytest.mark.parametrize("seed", range(40))
def test_the_rules_equal_their_slow_twins(seed):
    p_V, q_V, words_K, coins_K = random_case(seed)
    plain = p_V.tolist(), q_V.tolist(), words_K.tolist(), coins_K.tolist()
    truth, law = slow_multi_round(*plain)
    stands, rest = multi_round(p_V[None], q_V[None], words_K[None], coins_K[None])
    assert int(stands) == (-1 if truth is None else truth)
    assert rest[0].tolist() == pytest.approx(law, abs=1e-12)

    rho = smallest_rho(p_V[None], q_V[None], torch.tensor([[len(words_K)]]), len(words_K)).item()
    assert rho == pytest.approx(slow_rho(*plain[:2], len(words_K)), abs=2e-4)
    truth, law = slow_k_sequential(*plain, rho)
    stands, rest = k_sequential(p_V[None], q_V[None], words_K[None], coins_K[None])
    assert int(stands) == (-1 if truth is None else truth)
    if truth is None and sum(law) > 0:
        assert rest[0].tolist() == pytest.approx(law, abs=1e-6)


def test_more_draws_stand_more_often():
    """What several draws are for; and one draw is the same rule in both."""
    stands = {}
    for rule, k in RULES:
        rng = torch.Generator().manual_seed(7)
        words_NK = sample_with_stop(Q, (DRAWS, k), rng)
        coins_NK = torch.rand(DRAWS, k, dtype=torch.float64, generator=rng)
        stands[rule, k] = (rule(P.expand(DRAWS, -1), Q.expand(DRAWS, -1), words_NK, coins_NK)[0] >= 0).double().mean()
    overlap = float(torch.minimum(P, Q).sum())
    for rule in (multi_round, k_sequential):
        assert float(stands[rule, 1]) == pytest.approx(overlap, abs=0.01)
        assert stands[rule, 1] + 0.05 < stands[rule, 2] < stands[rule, 4]


# --- whole trees ------------------------------------------------------------------------------------------------


def chain_of_laws(seed, words=5, depth=3, stop=0.0):
    """One drawn chain: a law behind every word, drawn from it; a draw of nothing ends the chain."""
    rng = torch.Generator().manual_seed(seed)
    table_VV = torch.randn(words + 1, words, generator=torch.Generator().manual_seed(99)).double().softmax(-1)
    said, laws = [], torch.zeros(depth + 1, words, dtype=torch.float64)
    for level in range(depth):
        laws[level] = table_VV[said[-1] if said else words] * (1 - stop)
        word = int(sample_with_stop(laws[level], (1,), rng))
        if word == STOP:
            break
        said.append(word)
    tree = TokenTree.chain(torch.tensor(0), torch.tensor(said, dtype=torch.int64))
    return TokenTree(tree.tokens_N, tree.parents_N, tree.height, laws[: len(tree)])


@pytest.mark.parametrize(("rule", "stop"), [(multi_round, 0.0), (multi_round, 0.3), (k_sequential, 0.3)])
def test_chains_follow_the_law_of_whole_texts(rule, stop):
    """Two words through real verdicts, the second drawn in a pass of its own where the first was the base's."""
    base_VV = torch.randn(6, 5, generator=torch.Generator().manual_seed(5)).double().softmax(-1)
    exact = [float(base_VV[5, a] * base_VV[a, b]) for a in range(5) for b in range(5)]
    verify, seen = Rejection(rule), [0] * 25
    for seed in range(1500):
        tree = chain_of_laws(seed, stop=stop)
        rows = torch.stack([base_VV[5], *(base_VV[int(word)] for word in tree.tokens_N[1:])])
        verdict = verify(tree, rows.log(), GumbelNoise(seed), 7)
        words = [*tree.tokens_N[verdict.path_K[1 : verdict.length]].tolist(), int(verdict.bonus)]
        if len(words) == 1:
            second = chain_of_laws(10_000 + seed, stop=stop)  # any draft that does not look at the coins to come
            rows = torch.stack([base_VV[words[0]], *(base_VV[int(word)] for word in second.tokens_N[1:])])
            verdict = verify(second, rows.log(), GumbelNoise(seed), 8)
            words += [*second.tokens_N[verdict.path_K[1 : verdict.length]].tolist(), int(verdict.bonus)]
        seen[words[0] * 5 + words[1]] += 1
    assert p_value(seen, exact) > MIN_P_VALUE


def test_what_was_not_drawn_is_read_by_match():
    rng = torch.Generator().manual_seed(1)
    tree = TokenTree.from_paths(torch.tensor(0), torch.tensor([[1, 2], [3, 2]]), torch.tensor([2, 2]), 9)
    for seed in range(50):
        log_probs = warp(torch.randn(len(tree), 4, generator=rng), 1.0)
        ours, theirs = (verify(tree, log_probs, GumbelNoise(seed), 3) for verify in (Rejection(multi_round), match))
        assert torch.equal(ours.path_K, theirs.path_K)
        assert ours.bonus == theirs.bonus


def test_below_a_chain_cut_for_room_the_base_draws_what_autoregression_draws():
    """A row of zeros asks for nothing, so nothing is taken off p: with the noise of its position."""
    law = torch.tensor([[0.25] * 4, [0.0] * 4], dtype=torch.float64)
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    tree = TokenTree(torch.tensor([0, 2]), torch.tensor([-1, 0]), 1, law)
    reached = 0
    for seed in range(200):
        verdict = Rejection(multi_round)(tree, warp(logits, 1.0), GumbelNoise(seed), 3)
        if int(verdict.length) == 2:
            alone = match(TokenTree.only_root(torch.tensor(2)), warp(logits[1:], 1.0), GumbelNoise(seed), 4)
            assert verdict.bonus == alone.bonus
            reached += 1
    assert reached > 5
