"""Slow reference implementations of the rejection rules, and biased rules known from other projects.

Plain Python, so Fractions give exact results. A sample is (token or STOP, threshold).
"""

import itertools
import math

STOP = -2


def slow_residual(p, q):
    """(p - q)+ normalised; p itself where nothing is left."""
    left = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    return [x / sum(left) for x in left] if sum(left) else list(p)


def slow_multi_round(p, q, tokens, uniforms):
    """Which sample is accepted (None for none), and the distribution of the base's token."""
    for number, (token, uniform) in enumerate(zip(tokens, uniforms, strict=True)):
        if token >= 0 and uniform * q[token] < p[token]:
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


def slow_k_sequential(p, q, tokens, uniforms, rho):
    common = [min(b, a / rho) for a, b in zip(p, q, strict=True)]
    for number, (token, uniform) in enumerate(zip(tokens, uniforms, strict=True)):
        if token >= 0 and uniform * rho * q[token] < p[token]:
            return number, None
    b = sum(common)
    some = 1 - (1 - b) ** len(tokens)
    left = [a - c * some / b for a, c in zip(p, common, strict=True)] if b else list(p)
    return None, [max(x, 0) / sum(max(y, 0) for y in left) if sum(max(y, 0) for y in left) else 0 for x in left]


def outcome_distribution(rule, p, q, k):
    """The exact output distribution of a rule, by enumerating every sequence of k samples.

    rule(p, q, tokens) -> ([probability that sample i is accepted if none before it was], the distribution if none is).
    """
    out = [0 * p[0]] * len(p)
    stop = 1 - sum(q)
    for tokens in itertools.product([*range(len(p)), STOP], repeat=k):
        reach = math.prod(stop if token == STOP else q[token] for token in tokens)
        if not reach:
            continue
        accepted, distribution = rule(p, q, tokens)
        for token, probability in zip(tokens, accepted, strict=True):
            if token != STOP:
                out[token] += reach * probability
            reach *= 1 - probability
        out = [x + reach * y for x, y in zip(out, distribution, strict=True)]
    return out


def multi_round_acceptance(p, q, tokens):
    """SpecInfer's rule for `outcome_distribution`."""
    accepted = []
    for token in tokens:
        accepted.append(min(1, p[token] / q[token]) if token != STOP else 0)
        p = slow_residual(p, q)
    return accepted, p


# --- known to be biased ------------------------------------------------------------------------------------


def separate_thresholds(p, q, tokens):
    """Every sample has its own threshold against the whole p; the first accepted one wins."""
    return [min(1, p[token] / q[token]) if token != STOP else 0 for token in tokens], slow_residual(p, q)


def mixed_stop(p, q, tokens):
    """Tokens are tested against q conditional on not stopping, and a stop samples from p minus that."""
    mass = sum(q)
    conditional = [x / mass for x in q]
    (token,) = tokens
    return [min(1, p[token] / conditional[token]) if token != STOP else 0], slow_residual(p, conditional)


def kept_softmax(p, q, tokens):
    """The draft token is the argmax of q, whatever was sampled, and is judged as if it had been sampled from q."""
    best = max(range(len(q)), key=lambda token: q[token])
    assert len(tokens) == 1
    probability = min(1, p[best] / q[best])
    # `outcome_distribution` would emit the sampled token on acceptance, so the whole outcome is put into the residual.
    left = slow_residual(p, q)
    return [0], [probability * (token == best) + (1 - probability) * left[token] for token in range(len(p))]
