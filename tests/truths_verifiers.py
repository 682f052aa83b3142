"""Slow, obvious twins of the rejection rules, and the biased rules of the field.

Plain Python; Fractions go in where exactness is asked for. A draw is (word or STOP, coin).
"""

import itertools
import math

STOP = -2


def slow_residual(p, q):
    """(p - q)+ normalised; p itself where nothing is left."""
    left = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    return [x / sum(left) for x in left] if sum(left) else list(p)


def slow_multi_round(p, q, words, coins):
    """Which draw stands (None for none), and the law of the base's own word."""
    for number, (word, coin) in enumerate(zip(words, coins, strict=True)):
        if word >= 0 and coin * q[word] < p[word]:
            return number, p
        p = slow_residual(p, q)
    return None, p


def slow_rho(p, q, k):
    """The smallest rho on a fine grid from 1 to k that satisfies SpecTr's condition."""
    steps = 20_000
    for step in range(steps + 1):
        rho = 1 + (k - 1) * step / steps
        b = sum(min(b, a / rho) for a, b in zip(p, q, strict=True))
        if 1 - (1 - b) ** k <= rho * b + 1e-12:
            return rho
    raise AssertionError("k itself always satisfies it")


def slow_k_sequential(p, q, words, coins, rho):
    common = [min(b, a / rho) for a, b in zip(p, q, strict=True)]
    for number, (word, coin) in enumerate(zip(words, coins, strict=True)):
        if word >= 0 and coin * rho * q[word] < p[word]:
            return number, None
    b = sum(common)
    some = 1 - (1 - b) ** len(words)
    left = [a - c * some / b for a, c in zip(p, common, strict=True)] if b else list(p)
    return None, [max(x, 0) / sum(max(y, 0) for y in left) if sum(max(y, 0) for y in left) else 0 for x in left]


def outcome_distribution(rule, p, q, k):
    """What comes out of a rule, exactly: every sequence of k draws, each coin by the probability that it stands.

    rule(p, q, words) -> ([probability that draw i stands, given that none before it did], the law if none does).
    """
    out = [0 * p[0]] * len(p)
    stop = 1 - sum(q)
    for words in itertools.product([*range(len(p)), STOP], repeat=k):
        reach = math.prod(stop if word == STOP else q[word] for word in words)
        if not reach:
            continue
        stands, law = rule(p, q, words)
        for word, chance in zip(words, stands, strict=True):
            if word != STOP:
                out[word] += reach * chance
            reach *= 1 - chance
        out = [x + reach * y for x, y in zip(out, law, strict=True)]
    return out


def multi_round_chances(p, q, words):
    """SpecInfer's rule for `law_of`."""
    stands = []
    for word in words:
        stands.append(min(1, p[word] / q[word]) if word != STOP else 0)
        p = slow_residual(p, q)
    return stands, p


# --- known to be biased ------------------------------------------------------------------------------------


def own_coins_chances(p, q, words):
    """Best of several rows: every row is judged with its own coin against the whole p; the first that stands wins."""
    return [min(1, p[word] / q[word]) if word != STOP else 0 for word in words], slow_residual(p, q)


def mixed_stop_chances(p, q, words):
    """Words are judged by the law conditional on not stopping, and a stop draws from what that law leaves of p."""
    said = sum(q)
    conditional = [x / said for x in q]
    (word,) = words
    return [min(1, p[word] / conditional[word]) if word != STOP else 0], slow_residual(p, conditional)


def kept_softmax_chances(p, q, words):
    """The guess is the argmax of q, whatever was drawn, and is judged as if it had been drawn from q."""
    best = max(range(len(q)), key=lambda word: q[word])
    assert len(words) == 1
    chance = min(1, p[best] / q[best])
    # `law_of` gives a standing draw to the word drawn, so the whole outcome goes into the law here.
    left = slow_residual(p, q)
    return [0], [chance * (word == best) + (1 - chance) * left[word] for word in range(len(p))]
