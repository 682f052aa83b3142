"""The label shift, compared with drawings and with a slow implementation."""

import pytest
import torch
from truths import slow_window

from ctcdraft.corpus.windows import label_windows, sample_anchors, valid_anchors

ENDED = torch.ones(2, 14).bool()


def test_a_truncated_response_has_full_windows_only():
    """The continuation of a truncated response is unknown; shorter windows would teach the draft head to stop."""
    tokens, mask = torch.arange(7).expand(2, -1), torch.tensor([0, 0, 1, 1, 1, 1, 1]).expand(2, -1)
    anchors = torch.arange(1, 5).expand(2, -1)
    _, labels, lengths = label_windows(tokens, mask, anchors, 3, torch.tensor([[True], [False]]).expand(2, 7))
    assert lengths.tolist() == [[3, 3, 2, 1], [3, 3, 0, 0]]
    assert (labels[1, 2:] == -1).all()


def test_the_example_of_the_docstring():
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
            root, expected = slow_window(tokens[row].tolist(), mask[row].tolist(), anchor, 4)
            assert lengths[row, anchor] == len(expected)
            assert labels[row, anchor].tolist() == expected + [-1] * (4 - len(expected))
            assert bool(valid[row, anchor]) == bool(expected)
            if expected:
                assert roots[row, anchor] == root


def test_sampled_anchors_are_valid_and_distinct():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
    rng = torch.Generator().manual_seed(0)
    anchors = sample_anchors(mask, 4, torch.rand(2, 6, generator=rng))
    _, _, lengths = label_windows(torch.zeros_like(mask), mask, anchors, 2, ENDED)
    assert (lengths > 0).sum(dim=1).tolist() == [2, 4]
    assert set(anchors[0][lengths[0] > 0].tolist()) == {1, 2}
    assert set(anchors[1].tolist()) == {0, 1, 2, 3}


def test_all_anchors_are_those_of_the_row_that_has_most():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1, 1]])  # two responses in the second row
    anchors = sample_anchors(mask, None, torch.rand(2, 7))
    assert [set(row.tolist()) for row in anchors] == [{1, 2, 6}, {0, 3, 4}]
    assert sample_anchors(torch.zeros(2, 7), None, torch.rand(2, 7)).tolist() == [[6], [6]]


def test_labels_are_the_tokens_after_the_root():
    """The windows of a finished text hold the tokens after each anchor's root."""
    tokens = torch.arange(100, 112)
    mask = torch.zeros(12, dtype=torch.int64)
    mask[4:11] = 1
    anchors = torch.tensor([[3, 6, 8]])
    roots, labels, lengths = label_windows(tokens[None], mask[None], anchors, 4, torch.ones(1, 12).bool())
    for root, label, length, anchor in zip(roots[0], labels[0], lengths[0], anchors[0], strict=True):
        assert root == tokens[anchor + 1]
        assert label[:length].tolist() == tokens[anchor + 2 : anchor + 2 + length].tolist()
    assert lengths.tolist() == [[4, 3, 1]]
