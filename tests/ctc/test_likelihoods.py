"""Likelihoods of texts and of all their prefixes, independent and conditioned, against every alignment."""

from __future__ import annotations

import math

import pytest
import torch
from truths import beginnings, slow_prefix_probability
from truths_heads import independent, slow_conditioned_texts

from ctcdraft.ctc.forward import likelihoods, log_likelihood


def windows(seed: int, count: int, labels: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    lengths_X = torch.randint(labels + 1, (count,), generator=rng)
    labels_XS = torch.randint(vocabulary, (count, labels), generator=rng)
    return labels_XS.masked_fill(torch.arange(labels) >= lengths_X[:, None], -1), lengths_X


def conditioned_frames(seed: int, frames: int, vocabulary: int):
    """log p_t(class | last token, or none): [T, vocabulary + 1 contexts, C], normalised, blank last."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(frames, vocabulary + 1, vocabulary + 1, dtype=torch.float64, generator=rng)
    return logits.log_softmax(-1)


def objective_scores(log_probs_TUC, labels_XS):
    """The scores of an objective: label, hold and blank, where the context is the last token (or V: none)."""
    frames, contexts, _ = log_probs_TUC.shape
    previous_XP = torch.cat([torch.full_like(labels_XS[:, :1], contexts - 1), labels_XS.clamp(min=0)], dim=1)
    log_probs_XTPC = log_probs_TUC[:, previous_XP].movedim(1, 0)
    at_XTS1 = labels_XS.clamp(min=0)[:, None, :, None].expand(-1, frames, -1, 1)
    label = log_probs_XTPC[:, :, :-1].gather(-1, at_XTS1)[..., 0]
    hold = log_probs_XTPC[:, :, 1:].gather(-1, at_XTS1)[..., 0]
    return label, hold, log_probs_XTPC[..., -1]


def close_to(log_prob: float, probability: float) -> bool:
    return math.isclose(math.exp(log_prob), probability, abs_tol=1e-12)


def test_prefix_by_hand():
    label_TS = torch.tensor([[1 / 2], [1 / 4]], dtype=torch.float64).log()
    blank_TP = torch.tensor([[1 / 2], [3 / 4]], dtype=torch.float64).log()
    likelihood = likelihoods(label_TS, label_TS, blank_TP, torch.tensor([0]), torch.tensor(1))
    assert likelihood.text_X.exp().item() == pytest.approx(5 / 8)
    assert likelihood.prefix_XS.exp().tolist() == pytest.approx([5 / 8])


@pytest.mark.parametrize("seed", range(12))
def test_every_prefix_of_independent_frames(seed):
    frames, vocabulary = 1 + seed % 5, 2 + seed % 2
    rng = torch.Generator().manual_seed(seed)
    log_probs_TC = (2 * torch.randn(frames, vocabulary + 1, dtype=torch.float64, generator=rng)).log_softmax(-1)
    labels_XS, lengths_X = windows(seed, 8, 3, vocabulary)
    label = log_probs_TC[:, labels_XS.clamp(min=0)].movedim(1, 0)
    blank = log_probs_TC[None, :, -1:].expand(8, -1, -1)
    likelihood = likelihoods(label, label, blank, labels_XS, lengths_X)
    assert torch.equal(likelihood.text_X, log_likelihood(label, blank[..., 0], labels_XS, lengths_X))
    for window in range(8):
        for s in range(int(lengths_X[window])):
            prefix = labels_XS[window, : s + 1].tolist()
            truth = slow_prefix_probability(log_probs_TC.exp().tolist(), prefix, blank=vocabulary)
            assert close_to(float(likelihood.prefix_XS[window, s]), truth)


@pytest.mark.parametrize("seed", range(12))
def test_every_alignment_of_conditioned_frames(seed):
    frames, vocabulary = 1 + seed % 5, 2 + seed % 2
    log_probs_TUC = conditioned_frames(seed, frames, vocabulary)
    labels_XS, lengths_X = windows(seed, 8, 3, vocabulary)
    likelihood = likelihoods(*objective_scores(log_probs_TUC, labels_XS), labels_XS, lengths_X)

    def frame_distribution(frame, text):
        return log_probs_TUC[frame, text[-1] if text else vocabulary].exp().tolist()

    texts = slow_conditioned_texts(frame_distribution, frames, vocabulary + 1, blank=vocabulary)
    assert sum(texts.values()) == pytest.approx(1)
    masses = beginnings(texts)
    for window in range(8):
        text = tuple(labels_XS[window, : lengths_X[window]].tolist())
        assert close_to(float(likelihood.text_X[window]), texts.get(text, 0.0))
        for s in range(len(text)):
            assert close_to(float(likelihood.prefix_XS[window, s]), masses.get(text[: s + 1], 0.0))


def test_a_distribution_that_ignores_its_condition_is_the_independent_one():
    log_probs_TUC = conditioned_frames(0, 4, 2)[:, :1].expand(-1, 3, -1)
    probs_TC = log_probs_TUC[:, 0].exp().tolist()
    texts = slow_conditioned_texts(independent(probs_TC), 4, 3, blank=2)
    labels_XS, lengths_X = torch.tensor([[0, 1, 0]]), torch.tensor([3])
    likelihood = likelihoods(*objective_scores(log_probs_TUC, labels_XS), labels_XS, lengths_X)
    assert close_to(float(likelihood.text_X), texts[0, 1, 0])


def test_gradients_by_finite_differences():
    """Of all prefixes at once, with repeats, an impossible window and padding among them."""
    log_probs_TUC = conditioned_frames(3, 4, 2)
    labels_XS = torch.tensor([[0, 0, 1], [0, 1, -1], [1, 1, 1]])
    lengths_X = torch.tensor([3, 2, 3])  # the last needs five frames: impossible as a text, but its prefixes are not
    label, hold, blank = (scores.clone().requires_grad_() for scores in objective_scores(log_probs_TUC, labels_XS))

    def finite(*scores):
        likelihood = likelihoods(*scores, labels_XS, lengths_X)
        assert likelihood.prefix_XS.isfinite().tolist() == [[True] * 3, [True, True, False], [True, True, False]]
        assert likelihood.text_X.isfinite().tolist() == [True, True, False]
        return torch.cat(
            [likelihood.text_X[:2], likelihood.prefix_XS.masked_fill(likelihood.prefix_XS.isinf(), 0).flatten()]
        )

    assert torch.autograd.gradcheck(finite, (label, hold, blank))
