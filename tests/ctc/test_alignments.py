"""The likeliest ways to say a text, held to a list of all of them."""

import math

import pytest
import torch
from truths import all_alignments, slow_collapse

from ctcdraft.ctc.alignments import best_alignments

BLANK = 3


def frames(seed, count=5):
    rng = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, BLANK + 1, generator=rng)).softmax(-1).double().tolist()


def slow_best(probs_TC, text, count, merging):
    """All frame sequences that collapse to the text, best first."""
    found = []
    for way in all_alignments(len(probs_TC), BLANK + 1):
        said = slow_collapse(way, BLANK) if merging else tuple(one for one in way if one != BLANK)
        if said == text:
            found.append((math.prod(row[one] for row, one in zip(probs_TC, way, strict=True)), way))
    return sorted(found, reverse=True)[:count]


@pytest.mark.parametrize("merging", [True, False])
@pytest.mark.parametrize("text", [(), (0,), (0, 0), (0, 1, 0), (1, 1, 2), (2, 2, 2)])
def test_they_are_the_best_of_all(text, merging):
    for seed in range(5):
        found = best_alignments([frames(seed)], text, BLANK, 4, merging)
        truth = slow_best(frames(seed), text, 4, merging)
        assert [way for _, way in found] == [way for _, way in truth]
        assert [p for p, _ in found] == pytest.approx([p for p, _ in truth])


def test_the_example_of_the_docstring_and_what_cannot_be_said():
    same = [[0.5, 0.25, 0.25]] * 3
    assert best_alignments([same], (0, 0), 2, 3) == [(0.0625, (0, 2, 0))]
    assert best_alignments([same], (0, 0, 0), 2, 3) == []
    assert best_alignments([[[0.0, 0.5, 0.5]]], (0,), 2, 3) == []


def test_frames_that_listen_change_once_a_word_is_said():
    """Before any word only `a` is likely, behind it only the blank."""
    before, behind = [[0.9, 0.0, 0.1]] * 2, [[0.2, 0.0, 0.8]] * 2
    found = best_alignments([before, behind], (0,), 2, 3)
    assert [way for _, way in found] == [(0, 2), (0, 0), (2, 0)]
    assert [p for p, _ in found] == pytest.approx([0.72, 0.18, 0.09])
