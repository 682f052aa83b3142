"""Rows of a paged cache, and attention to texts where they are: equal to attention to copies of them."""

import pytest
import torch

from ctcdraft.nn.slot_attention import attend_to_tensors
from ctcdraft.serving import slot_cache
from ctcdraft.serving.slot_cache import SlotCache, paged_texts, read_texts, slots_of

SLOTS = 4  # of a block


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_rows_are_found_in_every_memory_layout(order):
    """Heads before slots, slots before heads, and heads before blocks."""
    sizes = [(5, 2, SLOTS, 6)[axis] for axis in order]
    cache = torch.zeros(sizes).permute(*(order.index(axis) for axis in range(4)))
    assert cache.shape == (5, 2, SLOTS, 6)
    one, slots_L = SlotCache(cache), torch.tensor([7, 19, 12])
    keys, values = torch.randn(2, 3, 3), torch.randn(2, 3, 3)
    one.write(one.row_ids(slots_L), (keys, values))
    for index, slot in enumerate(slots_L.tolist()):
        row = torch.cat([keys[:, index], values[:, index]], dim=-1)
        assert torch.equal(cache[slot // SLOTS, :, slot % SLOTS], row)
    read_keys, read_values = one.read(one.row_ids(slots_L[None]))
    assert torch.equal(read_keys[0], keys)
    assert torch.equal(read_values[0], values)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries_per_group", [1, 3])
@pytest.mark.parametrize("heads_first", [False, True])
@torch.inference_mode()
def test_texts_are_read_where_they_are(causal, queries_per_group, heads_first):
    torch.manual_seed(2)
    lengths, groups, frames, width = [1, 2, 7, 12, 17], 2, 5, 12
    cache = torch.randn(40, groups, SLOTS, 2 * width)
    if heads_first:
        cache = torch.randn(groups, 40, SLOTS, 2 * width).transpose(0, 1)
    caches = [SlotCache(cache)]
    table_QM = torch.randperm(39)[:25].add(1).view(5, 5)
    for row, length in enumerate(lengths):
        table_QM[row, (length - 1) // SLOTS + 1 :] = 0  # what follows belongs to no request
        cache[0] = torch.nan  # and is undefined
    query = torch.randn(5, groups, 1, queries_per_group * frames, width)
    own = query, torch.randn(5, groups, 1, frames, width), torch.randn(5, groups, 1, frames, width), causal
    (text,) = paged_texts(caches, table_QM.int(), lengths)
    visible_QL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    copied = [part.nan_to_num(0.0) for part in read_texts(caches, slots_of(table_QM, max(lengths), caches))[0]]
    expected = attend_to_tensors(copied, visible_QL[:, None], *own)
    torch.testing.assert_close(text.attend(*own), expected, atol=1e-5, rtol=1e-5)


def test_texts_are_copied_where_machine_code_cannot_read_them(monkeypatch):
    table_QM = torch.ones(1, 1, dtype=torch.int64)
    assert paged_texts([], table_QM, [1]) is None
    assert paged_texts([SlotCache(torch.zeros(2, 1, SLOTS, 4, dtype=torch.bfloat16))], table_QM, [1]) is None
    caches = [SlotCache(torch.zeros(2, 1, SLOTS, 4))]
    monkeypatch.setattr(slot_cache, "MAX_PAGED", 4)
    assert paged_texts(caches, table_QM, [1]) is not None
    assert paged_texts(caches, table_QM, [2]) is None
    monkeypatch.setattr(slot_cache, "load_kernels", lambda module: None)
    assert paged_texts(caches, table_QM, [1]) is None
