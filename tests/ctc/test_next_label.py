"""The batched next-label distribution against every alignment, with and without label-conditioned frames."""

import itertools

import pytest
import torch
from truths import beginnings, slow_next_label_distribution, slow_prefix_probability
from truths_heads import slow_conditioned_texts

from ctcdraft.ctc.next_label import PrefixBatch


def random_frames(seed, *shape, zeros=0.0, peak=2.0):
    rng = torch.Generator().manual_seed(seed)
    logits = peak * torch.randn(*shape, dtype=torch.float64, generator=rng)
    dead = torch.rand(shape, generator=rng) < zeros
    dead[..., 0] = False
    return logits.masked_fill(dead, -torch.inf).softmax(-1)


@pytest.mark.parametrize("seed", range(18))
def test_a_batch_of_prefixes_against_every_alignment(seed):
    """All prefixes of one to three tokens at once, repeats and impossible ones among them.

    From seed 12 on frames are as peaked as those of trained heads, where rounding and underflow would show.
    """
    frames, classes = 2 + seed % 4, 3 + seed % 2
    blank = classes - 1 if seed % 3 else 0
    probs_TC = random_frames(seed, frames, classes, zeros=(seed % 3) / 6, peak=2.0 if seed < 12 else 15.0)
    tokens = [c for c in range(classes) if c != blank]
    for length in (0, 1, 2, 3):
        prefixes = list(itertools.product(tokens, repeat=length))
        labels = PrefixBatch.empty(probs_TC, blank, len(prefixes))
        for column in torch.tensor(prefixes, dtype=torch.int64).reshape(len(prefixes), length).T:
            labels = labels.extend(column)
        probs_KV, stop_K = labels.next_distribution()
        for row, prefix in enumerate(prefixes):
            if slow_prefix_probability(probs_TC.tolist(), prefix, blank) == 0:
                assert probs_KV[row].sum() == stop_K[row] == 0
                continue
            truth, stop = slow_next_label_distribution(probs_TC.tolist(), blank, prefix)
            assert probs_KV[row].tolist() == pytest.approx([truth[token] for token in tokens], abs=1e-10, rel=0)
            assert abs(stop_K[row] - stop) < 1e-10
            assert abs(probs_KV[row].sum() + stop_K[row] - 1) < 1e-14


@pytest.mark.parametrize("seed", range(8))
def test_frames_conditioned_on_the_last_label(seed):
    """A correction in a general form: each last label has frames of its own."""
    frames, classes, blank = 4, 4, 3
    known = dict(zip((None, 0, 1, 2), random_frames(seed, 4, frames, classes), strict=True))
    plain = {label: probs_TC.tolist() for label, probs_TC in known.items()}
    texts = slow_conditioned_texts(lambda t, text: plain[text[-1] if text else None][t], frames, classes, blank)
    masses = beginnings(texts)
    for length in (1, 2, 3):
        prefixes = list(itertools.product(range(3), repeat=length))
        labels = PrefixBatch.empty(known[None], blank, len(prefixes))
        for column in torch.tensor(prefixes).T:
            labels = labels.extend(column, torch.stack([known[int(label)] for label in column]))
        probs_KV, stop_K = labels.next_distribution()
        for row, prefix in enumerate(prefixes):
            whole = masses.get(prefix, 0)
            if whole == 0:  # a a a needs five frames
                assert probs_KV[row].sum() + stop_K[row] == 0
                continue
            truth = [masses.get((*prefix, token), 0) / whole for token in range(3)]
            assert probs_KV[row].tolist() == pytest.approx(truth, abs=1e-10, rel=0)
            assert abs(stop_K[row] - texts[prefix] / whole) < 1e-10


def test_children_and_stop_sum_to_the_parent_for_long_texts():
    """Masses are conditional: after nine of 2,000 labels the distribution still sums to one, in float32 frames too."""
    probs_TC = random_frames(3, 12, 2001).float()
    labels = PrefixBatch.empty(probs_TC, 2000, 4)
    tokens = torch.randint(2000, (9, 4), generator=torch.Generator().manual_seed(1))
    for tokens_K in tokens:
        labels = labels.extend(tokens_K)
        probs_KV, stop_K = labels.next_distribution()
        assert ((probs_KV.sum(1) + stop_K) - 1).abs().max() < 1e-14
        assert (probs_KV >= 0).all()
