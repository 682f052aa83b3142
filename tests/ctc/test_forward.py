"""The forward recursion against a hand calculation, against every alignment, and against torch's own CTC loss."""

import math

import pytest
import torch
from torch.nn import functional as F
from truths import slow_log_likelihood

from ctcdraft.ctc.alignment import frames_needed
from ctcdraft.ctc.forward import log_likelihood


def gather(log_probs_XTC, blank, labels_XS):
    """The scores of an objective; padding (-1) is gathered as class 0, that is, as junk."""
    at_XTS = labels_XS.clamp(min=0)[..., None, :].expand(*log_probs_XTC.shape[:-1], labels_XS.shape[-1])
    return log_probs_XTC.gather(-1, at_XTS), log_probs_XTC[..., blank]


def score(log_probs_XTC, blank, labels_XS, lengths_X):
    return log_likelihood(*gather(log_probs_XTC, blank, labels_XS), labels_XS, lengths_X)


def random_windows(seed, windows, frames, labels, classes, blank):
    """Logits, labels with many repeats, lengths from 0 to labels, and -1 in the padding."""
    rng = torch.Generator().manual_seed(seed)
    logits_XTC = 2 * torch.randn(windows, frames, classes, dtype=torch.float64, generator=rng)
    tokens = torch.tensor([c for c in range(classes) if c != blank])
    labels_XS = tokens[torch.randint(len(tokens), (windows, labels), generator=rng)]
    lengths_X = torch.randint(labels + 1, (windows,), generator=rng)
    return logits_XTC, labels_XS.masked_fill(torch.arange(labels) >= lengths_X[:, None], -1), lengths_X


def test_by_hand():
    log_probs_TC = torch.tensor([[1 / 2, 1 / 2], [1 / 4, 3 / 4]], dtype=torch.float64).log()
    labels_S = torch.tensor([0])
    assert score(log_probs_TC, 1, labels_S, torch.tensor(1)).exp().item() == pytest.approx(5 / 8)
    assert score(log_probs_TC, 1, labels_S, torch.tensor(0)).exp().item() == pytest.approx(3 / 8)


@pytest.mark.parametrize("seed", range(24))
def test_every_alignment(seed):
    frames, classes, blank = 1 + seed % 5, 3 + seed % 2, seed % 3
    logits_XTC, labels_XS, lengths_X = random_windows(seed, 12, frames, 3, classes, blank)
    log_probs_XTC = logits_XTC.log_softmax(-1)
    value_X = score(log_probs_XTC, blank, labels_XS, lengths_X)
    for value, probs_TC, labels_S, length in zip(
        value_X.tolist(), log_probs_XTC.exp().tolist(), labels_XS.tolist(), lengths_X.tolist(), strict=True
    ):
        assert value == pytest.approx(slow_log_likelihood(probs_TC, labels_S[:length], blank), abs=1e-10)


@pytest.mark.parametrize(("frames", "labels", "classes", "blank"), [(8, 6, 5, 4), (12, 4, 3, 0), (32, 16, 9, 2)])
def test_torch_value_and_gradient(frames, labels, classes, blank):
    logits_XTC, labels_XS, lengths_X = random_windows(7, 60, frames, labels, classes, blank)
    feasible_X = frames_needed(labels_XS, lengths_X) <= frames
    assert feasible_X.sum() > 20

    ours_XTC = logits_XTC.clone().requires_grad_()
    value_X = score(ours_XTC.log_softmax(-1), blank, labels_XS, lengths_X)
    value_X[feasible_X].sum().backward()

    theirs_XTC = logits_XTC[feasible_X].clone().requires_grad_()
    loss_X = F.ctc_loss(
        theirs_XTC.log_softmax(-1).transpose(0, 1),
        labels_XS[feasible_X],
        torch.full((int(feasible_X.sum()),), frames),
        lengths_X[feasible_X],
        blank=blank,
        reduction="none",
    )
    (-loss_X.sum()).backward()
    torch.testing.assert_close(value_X[feasible_X], -loss_X, rtol=0, atol=1e-10)
    torch.testing.assert_close(ours_XTC.grad[feasible_X], theirs_XTC.grad, rtol=0, atol=1e-10)
    assert torch.equal(value_X == -torch.inf, ~feasible_X)


def test_gradient_by_finite_differences():
    """torch's own gradient is right only after a log_softmax; ours is the gradient of the scores."""
    logits_XTC, labels_XS, lengths_X = random_windows(3, 5, 5, 3, 3, 2)
    label_XTS, blank_XT = gather(logits_XTC.log_softmax(-1), 2, labels_XS)
    lengths_X = torch.minimum(lengths_X, torch.tensor(2))
    assert torch.autograd.gradcheck(
        lambda label, blank: log_likelihood(label, blank, labels_XS, lengths_X),
        (label_XTS.clone().requires_grad_(), blank_XT.clone().requires_grad_()),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infeasible_is_minus_infinity_without_gradient(dtype):
    """Three windows of three frames: 5 5 7 needs four; 5 6 7 just fits; one frame's zeros forbid the last."""
    labels_XS = torch.tensor([[0, 0, 1], [0, 1, 0], [0, 1, 0]])
    scores_XTC = torch.full((3, 3, 3), 1 / 3, dtype=dtype).log()
    scores_XTC[2, 1, 1] = -torch.inf
    scores_XTC.requires_grad_()
    value_X = score(scores_XTC, 2, labels_XS, torch.tensor([3, 3, 3]))
    assert value_X.tolist() == [-math.inf, pytest.approx(3 * math.log(1 / 3)), -math.inf]
    value_X.sum().backward()
    assert scores_XTC.grad[0].count_nonzero() == 0
    assert scores_XTC.grad[1].sum() == pytest.approx(3)
    assert scores_XTC.grad[2].count_nonzero() == 0


def test_zero_probabilities_in_a_feasible_window():
    logits_TC = torch.tensor([[0.3, -torch.inf, 0.1], [-torch.inf, 0.2, 0.5], [0.4, 0.0, -torch.inf]])
    logits_TC = logits_TC.double().requires_grad_()
    log_probs_TC = logits_TC.log_softmax(-1)
    value = score(log_probs_TC, 2, torch.tensor([0, 1]), torch.tensor(2))
    truth = slow_log_likelihood(log_probs_TC.exp().tolist(), [0, 1], 2)
    assert value.item() == pytest.approx(truth, abs=1e-12)
    value.backward()
    assert logits_TC.grad.isfinite().all()
    assert logits_TC.grad.count_nonzero() > 0


@pytest.mark.parametrize("seed", range(12))
def test_zeros_anywhere(seed):
    """Half of all probabilities are zero: values as enumerated, and gradients are shares of alignments."""
    logits_XTC, labels_XS, lengths_X = random_windows(seed, 20, 4, 3, 3, seed % 3)
    rng = torch.Generator().manual_seed(seed)
    scores_XTC = logits_XTC.log_softmax(-1)
    scores_XTC = scores_XTC.masked_fill(torch.rand(scores_XTC.shape, generator=rng) < 0.5, -torch.inf)
    scores_XTC.requires_grad_()
    value_X = score(scores_XTC, seed % 3, labels_XS, lengths_X)
    for value, probs_TC, labels_S, length in zip(
        value_X.tolist(), scores_XTC.exp().tolist(), labels_XS.tolist(), lengths_X.tolist(), strict=True
    ):
        truth = slow_log_likelihood(probs_TC, labels_S[:length], seed % 3)
        assert value == pytest.approx(truth, abs=1e-10)
    value_X.sum().backward()
    possible_X = value_X.isfinite()
    assert 0 < possible_X.sum() < 20
    # An alignment has one class a frame, and a gradient is the share of the alignments that use the score.
    torch.testing.assert_close(scores_XTC.grad.sum((1, 2)), 4.0 * possible_X.double(), rtol=0, atol=1e-12)
    assert scores_XTC.grad[scores_XTC == -torch.inf].count_nonzero() == 0


def test_padding_may_hold_anything():
    logits_XTC, labels_XS, lengths_X = random_windows(11, 30, 6, 4, 4, 3)
    label_XTS, blank_XT = gather(logits_XTC.log_softmax(-1), 3, labels_XS)
    plain_X = log_likelihood(label_XTS, blank_XT, labels_XS, lengths_X)
    padding_XS = torch.arange(4) >= lengths_X[:, None]
    junk_XTS = label_XTS.masked_fill(padding_XS[:, None], torch.nan).requires_grad_()
    junk_X = log_likelihood(junk_XTS, blank_XT, labels_XS.masked_fill(padding_XS, 10**9), lengths_X)
    assert torch.equal(plain_X, junk_X)
    junk_X.sum().backward()
    assert junk_XTS.grad.isfinite().all()


def test_leading_axes_and_no_labels():
    logits_XTC, labels_XS, lengths_X = random_windows(2, 12, 5, 3, 4, 0)
    log_probs_XTC = logits_XTC.log_softmax(-1)
    flat_X = score(log_probs_XTC, 0, labels_XS, lengths_X)
    folded = score(log_probs_XTC.view(3, 4, 5, 4), 0, labels_XS.view(3, 4, 3), lengths_X.view(3, 4))
    assert torch.equal(folded.flatten(), flat_X)
    silent_X = score(log_probs_XTC, 0, labels_XS[:, :0], torch.zeros(12, dtype=torch.int64))
    torch.testing.assert_close(silent_X, log_probs_XTC[..., 0].sum(-1))


def test_half_precision_is_refused():
    with pytest.raises(ValueError, match=r"bfloat16.*needs float32"):
        score(torch.zeros(2, 2, dtype=torch.bfloat16), 1, torch.tensor([0]), torch.tensor(1))
