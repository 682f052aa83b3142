"""The benchmark's CTC loss in closed form, against torch's own and finite differences, and for impossible labels."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks import ctc_loss as loss
from benchmarks.ctc_loss import ctc_losses

BLANK = 6


def windows(dtype, frames=5, count=30):
    """Every third window has one label three times, which needs five frames."""
    rng = torch.Generator().manual_seed(0)
    logits_XTC = 2 * torch.randn(count, frames, BLANK + 1, generator=rng, dtype=torch.float64)
    labels_XS = torch.randint(BLANK, (count, 3), generator=rng)
    labels_XS[::3] = labels_XS[::3, :1].clone()
    labels_XS[1::3, 2] = -1
    return logits_XTC.to(dtype).requires_grad_(), labels_XS, (labels_XS >= 0).sum(dim=1)


def native(logits_XTC, labels_XS, lengths_X):
    log_probs = logits_XTC.log_softmax(-1).transpose(0, 1)
    frames_X = torch.full_like(lengths_X, logits_XTC.shape[1])
    return F.ctc_loss(log_probs, labels_XS.clamp(min=0), frames_X, lengths_X, BLANK, "none", zero_infinity=True)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("chunk", [2**20, 1])
@pytest.mark.parametrize("frames", [4, 5])
def test_value_and_gradient_are_torchs_own(dtype, bound, chunk, frames, monkeypatch):
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", chunk)
    logits_XTC, labels_XS, lengths_X = windows(dtype, frames)
    weights_X = torch.rand(30, dtype=dtype)  # any loss of the losses
    ours_X, theirs_X = ctc_losses(logits_XTC, labels_XS, lengths_X, BLANK), native(logits_XTC, labels_XS, lengths_X)
    possible_X = ours_X.isfinite()
    assert possible_X.sum() == (19 if frames == 4 else 30)
    assert torch.allclose(ours_X[possible_X], theirs_X[possible_X], rtol=bound)
    (ours,) = torch.autograd.grad((weights_X * ours_X.where(possible_X, 0)).sum(), logits_XTC)
    (theirs,) = torch.autograd.grad((weights_X * theirs_X).sum(), logits_XTC)
    assert (ours - theirs).norm() <= bound * theirs.norm()
    assert ours[~possible_X].count_nonzero() == 0


def test_gradcheck_and_a_second_backward_pass():
    logits_XTC, labels_XS, lengths_X = windows(torch.float64, count=4)
    assert torch.autograd.gradcheck(lambda logits: ctc_losses(logits, labels_XS, lengths_X, BLANK), logits_XTC)
    value = ctc_losses(logits_XTC, labels_XS, lengths_X, BLANK).sum()
    first, second = (torch.autograd.grad(value, logits_XTC, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
