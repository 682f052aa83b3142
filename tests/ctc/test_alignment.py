"""The collapse and the number of frames labels need, by hand and against every alignment."""

import pytest
import torch
from truths import all_alignments, slow_collapse

from ctcdraft.ctc.alignment import collapse, frames_needed


def texts_of(labels_PT, lengths_P):
    return [tuple(row[:length]) for row, length in zip(labels_PT.tolist(), lengths_P.tolist(), strict=True)]


def test_collapse_by_hand():
    frames_PT = torch.tensor([[5, 5, 0, 5, 7], [0, 0, 0, 0, 0], [1, 2, 1, 1, 2], [0, 0, 9, 9, 9]])
    labels_PT, lengths_P = collapse(frames_PT, blank=0)
    assert labels_PT.tolist() == [
        [5, 5, 7, -1, -1],
        [-1, -1, -1, -1, -1],
        [1, 2, 1, 2, -1],
        [9, -1, -1, -1, -1],
    ]
    assert lengths_P.tolist() == [3, 0, 4, 1]


@pytest.mark.parametrize("blank", [0, 1, 2])
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_collapse_every_alignment(frames, blank):
    alignments = list(all_alignments(frames, 3))
    labels_PT, lengths_P = collapse(torch.tensor(alignments), blank)
    assert texts_of(labels_PT, lengths_P) == [slow_collapse(alignment, blank) for alignment in alignments]
    free_PT = torch.arange(frames) >= lengths_P[:, None]
    assert torch.equal(labels_PT == -1, free_PT)


def test_free_slots_are_no_labels():
    """Every alignment over {free, blank, token, token}: ids shifted by one make -1 of the first class."""
    alignments = [tuple(c - 1 for c in alignment) for alignment in all_alignments(4, 4)]
    labels_PT, lengths_P = collapse(torch.tensor(alignments), blank=0)
    assert texts_of(labels_PT, lengths_P) == [slow_collapse(alignment, 0) for alignment in alignments]
    assert texts_of(*collapse(torch.tensor([[7, 7, -1, -1], [7, 0, 8, -1]]), blank=0)) == [(7,), (7, 8)]


def test_collapse_leaves_its_input_alone():
    frames_PT = torch.tensor([[3, 3, 1]])
    collapse(frames_PT, blank=1)
    assert frames_PT.tolist() == [[3, 3, 1]]


def test_no_paths_and_no_frames():
    assert [part.shape for part in collapse(torch.empty(0, 4, dtype=torch.int64), blank=0)] == [(0, 4), (0,)]
    assert [part.tolist() for part in collapse(torch.empty(1, 0, dtype=torch.int64), blank=0)] == [[[]], [0]]


def test_frames_needed_by_hand():
    labels_XS = torch.tensor([[5, 5, 7], [5, 6, 7], [5, 5, 5], [5, 5, 5], [5, 6, 6], [-1, -1, -1]])
    lengths_X = torch.tensor([3, 3, 3, 2, 2, 0])
    assert frames_needed(labels_XS, lengths_X).tolist() == [4, 3, 5, 3, 2, 0]
    stacked = frames_needed(labels_XS.view(2, 3, 3), lengths_X.view(2, 3))
    assert stacked.tolist() == [[4, 3, 5], [3, 2, 0]]
    assert frames_needed(torch.empty(2, 0, dtype=torch.int64), torch.tensor([0, 0])).tolist() == [0, 0]


def test_frames_needed_is_the_shortest_alignment():
    labels = list(all_alignments(3, 2))
    needed_X = frames_needed(torch.tensor(labels), torch.full((len(labels),), 3)).tolist()
    for text, needed in zip(labels, needed_X, strict=True):
        possible = [
            frames
            for frames in range(1, 6)
            if any(slow_collapse(a, blank=2) == text for a in all_alignments(frames, 3))
        ]
        assert min(possible) == needed
