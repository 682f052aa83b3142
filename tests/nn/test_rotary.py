"""Rotary positions: heads use the angles of the base, and read its interleaved rows."""

from __future__ import annotations

import pytest
import torch
from test_base_layer import PREFIX, SCALED, head, varied_base

from ctcdraft.nn.rotary import half_split_rows


@pytest.mark.parametrize("case", SCALED)
def test_heads_use_the_rotary_angles_of_the_base(case):
    kind, changes = SCALED[case]
    base = varied_base(kind, **changes)
    position_ids_L = torch.tensor([0, 1, 5, 40, 127])
    cos, sin = base.lm.base_model.rotary_emb(torch.zeros(1), position_ids_L[None])
    rotated = cos.shape[-1] // 2  # pairs of dimensions
    drafters = head(base, "drafter=ctc"), head(base, "drafter=eagle"), head(base, "drafter=hydra", PREFIX)
    for rotary in (drafters[0].body.rotary, drafters[1].block.rotary, drafters[2].prefix.rotary):
        ours_cos, ours_sin = (table.chunk(2, dim=-1)[1] for table in rotary(position_ids_L))  # right halves
        torch.testing.assert_close(ours_cos[:, :rotated], cos[0, :, :rotated], rtol=0, atol=2e-5)
        torch.testing.assert_close(ours_sin[:, :rotated], sin[0, :, :rotated], rtol=0, atol=2e-5)
        assert torch.equal(
            ours_cos[:, rotated:], torch.ones_like(ours_cos[:, rotated:])
        )  # dimensions that the base does not rotate
        assert not ours_sin[:, rotated:].any()


def test_rows_of_a_head_by_hand():
    assert half_split_rows(6, 4, interleaved=False).tolist() == [0, 1, 4, 2, 3, 5]
    assert half_split_rows(6, 4, interleaved=True).tolist() == [0, 2, 4, 1, 3, 5]
    assert half_split_rows(6, 6, interleaved=False).tolist() == list(range(6))
