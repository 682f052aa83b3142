"""Windows, masks and what follows a token end with their text, whatever follows in the pack."""

from __future__ import annotations

from itertools import pairwise

import torch
from test_packed_sequences import CONTEXT, PLACES, SIZE, packs
from tiny_models import random_base

from ctcdraft.nn.masks import gather_following, packed_causal_mask, visible_mask


def test_no_window_reaches_into_the_next_text():
    """Even where that begins with a response token: the window ends where its own text does."""
    base = random_base(context=CONTEXT)
    made = packs(base, 4, anchors=SIZE)
    neighbours = 0
    for step in range(8):
        batch = made.batch(step)
        for row, pack in enumerate(made.packs(step)):
            ends = torch.tensor([len(made.rows.tokens[index]) for index in pack]).cumsum(0).tolist()
            for anchor, length in zip(batch.anchors_BA[row].tolist(), batch.lengths_BA[row].tolist(), strict=True):
                end = next((end for end in ends if anchor < end), None)
                assert not length or anchor + 1 + length < end
            neighbours += any(nxt == 4 for _, nxt in pairwise(pack))
    assert neighbours  # response 4 begins with a response token


def test_who_sees_whom_by_pencil():
    seen = visible_mask(torch.tensor([[4, 7], [5, 0]]), PLACES).int().tolist()
    assert seen[0] == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert seen[1] == [[1, 1, 1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    assert packed_causal_mask(torch.arange(8).expand(2, -1)) is None
    every = packed_causal_mask(PLACES)
    assert every.shape == (2, 1, 8, 8)
    begins = [0, 0, 0, 3, 3, 5, 5, 5]
    for at in range(8):
        assert every[0, 0, at].tolist() == [begins[at] <= to <= at for to in range(8)]


def test_what_follows_ends_with_the_text():
    x_BLD = torch.arange(8.0).expand(2, -1)[..., None]
    followed = gather_following(x_BLD, torch.tensor([[1, 4, 6], [3, 5, 7]]), PLACES, 4)[..., 0].int().tolist()
    assert followed[0] == [[1, 2, 2, 2], [4, 4, 4, 4], [6, 7, 7, 7]]
    assert followed[1][0][:3] == [3, 4, 5]
