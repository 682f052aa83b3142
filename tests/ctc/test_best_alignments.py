"""The most probable alignments of a text against a list of all of them."""

import math

import pytest
import torch
from truths import all_alignments, slow_collapse, slow_prefix_probability

from ctcdraft.ctc.alignment import best_alignments, best_prefix_alignments, prefix_probability

BLANK = 3
TEXTS = [(0,), (0, 0), (0, 1, 0), (1, 1, 2), (2, 2, 2)]


def random_frames(seed, count=5):
    rng = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, BLANK + 1, generator=rng)).softmax(-1).double().tolist()


def collapsed(alignment, merging):
    return slow_collapse(alignment, BLANK) if merging else tuple(one for one in alignment if one != BLANK)


def slow_best(probs_TC, count, wanted, lengths):
    """All frame sequences of these lengths that satisfy `wanted`, best first."""
    scored = []
    for frames in (frames for length in lengths for frames in all_alignments(length, BLANK + 1) if wanted(frames)):
        scored.append((math.prod(row[one] for row, one in zip(probs_TC, frames, strict=False)), frames))
    return sorted(scored, reverse=True)[:count]


@pytest.mark.parametrize("merging", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_they_are_the_most_probable_of_all(text, merging):
    def is_text(alignment):
        return collapsed(alignment, merging) == text

    def begins_last_token(alignment):
        return is_text(alignment) and collapsed(alignment[:-1], merging) == text[:-1]

    for seed in range(3):
        probs_TC = random_frames(seed)
        for alignments, truth in (
            (best_alignments([probs_TC], text, BLANK, 4, merging), slow_best(probs_TC, 4, is_text, [5])),
            (
                best_prefix_alignments([probs_TC], text, BLANK, 4, merging),
                slow_best(probs_TC, 4, begins_last_token, range(1, 6)),
            ),
        ):
            assert [frames for _, frames in alignments] == [frames for _, frames in truth]
            assert [p for p, _ in alignments] == pytest.approx([p for p, _ in truth])


@pytest.mark.parametrize("text", [(), *TEXTS])
def test_prefix_probability_sums_all_alignments(text):
    assert prefix_probability([random_frames(0)], text, BLANK) == pytest.approx(
        slow_prefix_probability(random_frames(0), text, BLANK)
    )


def test_docstring_examples_and_impossible_texts():
    same = [[0.5, 0.25, 0.25]] * 3
    assert (
        best_alignments([same], (0, 0), 2, 3) == best_prefix_alignments([same], (0, 0), 2, 3) == [(0.0625, (0, 2, 0))]
    )
    assert best_prefix_alignments([same], (0,), 2, 2) == [(0.5, (0,)), (0.125, (2, 0))]
    assert best_alignments([same], (0, 0, 0), 2, 3) == best_prefix_alignments([same], (0, 0, 0), 2, 3) == []
    assert best_alignments([[[0.0, 0.5, 0.5]]], (0,), 2, 3) == []


def test_label_conditioned_frames_change_after_a_token():
    """Before any token only `a` is probable, after it only the blank."""
    before, after = [[0.9, 0.0, 0.1]] * 2, [[0.2, 0.0, 0.8]] * 2
    alignments = best_alignments([before, after], (0,), 2, 3)
    assert [frames for _, frames in alignments] == [(0, 2), (0, 0), (2, 0)]
    assert [p for p, _ in alignments] == pytest.approx([0.72, 0.18, 0.09])
