"""The shift, against drawings and against a slow twin."""

import pytest
import torch
from truths import slow_window

from ctcdraft.corpus.windows import label_windows, sample_anchors, valid_anchors

ENDED = torch.ones(2, 14).bool()


def test_an_answer_that_was_cut_has_full_windows_only():
    """Where a cut answer stops nobody knows what comes next; a shorter window would teach the head to fall silent."""
    tokens, mask = torch.arange(7).expand(2, -1), torch.tensor([0, 0, 1, 1, 1, 1, 1]).expand(2, -1)
    anchors = torch.arange(1, 5).expand(2, -1)
    _, labels, lengths = label_windows(tokens, mask, anchors, 3, torch.tensor([[True], [False]]).expand(2, 7))
    assert lengths.tolist() == [[3, 3, 2, 1], [3, 3, 0, 0]]
    assert (labels[1, 2:] == -1).all()


def test_the_drawing():
    tokens = torch.arange(6)[None]
    roots, labels, lengths = label_windows(
        tokens, torch.ones_like(tokens), torch.tensor([[1]]), 3, torch.ones(1, 6).bool()
    )
    assert roots.tolist() == [[2]]
    assert labels.tolist() == [[[3, 4, 5]]]
    assert lengths.tolist() == [[3]]


@pytest.mark.parametrize("seed", range(20))
def test_every_anchor_equals_the_slow_twin(seed):
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 9, (2, 14), generator=rng)
    mask = (torch.rand(2, 14, generator=rng) < 0.7).long()
    anchors = torch.arange(14).expand(2, -1)
    roots, labels, lengths = label_windows(tokens, mask, anchors, 4, ENDED)
    valid = valid_anchors(mask)
    for row in range(2):
        for anchor in range(14):
            root, words = slow_window(tokens[row].tolist(), mask[row].tolist(), anchor, 4)
            assert lengths[row, anchor] == len(words)
            assert labels[row, anchor].tolist() == words + [-1] * (4 - len(words))
            assert bool(valid[row, anchor]) == bool(words)
            if words:
                assert roots[row, anchor] == root


def test_sampled_anchors_are_valid_and_distinct():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
    rng = torch.Generator().manual_seed(0)
    anchors = sample_anchors(mask, 4, rng)
    _, _, lengths = label_windows(torch.zeros_like(mask), mask, anchors, 2, ENDED)
    assert (lengths > 0).sum(dim=1).tolist() == [2, 4]
    assert set(anchors[0][lengths[0] > 0].tolist()) == {1, 2}
    assert set(anchors[1].tolist()) == {0, 1, 2, 3}
