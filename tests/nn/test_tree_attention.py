"""Attention of a token tree over the text: kernels against scaled_dot_product_attention, and which layers take them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fused_parts import SEEDS, check_operation, random_integer, runs_kernels
from test_block_operations import assert_near
from tiny_models import random_base
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ctcdraft.nn import tree_attention as module
from ctcdraft.nn.tree_attention import DTYPES, NAME, WIDTHS, attend, is_tree_read, tree_attention, use_tree_attention


def random_read(seed: int) -> tuple[torch.Tensor, ...]:
    """Return query, keys and values, as views of a cache, and an additive mask in which every row sees something."""
    rng = torch.Generator().manual_seed(seed)
    dtype, width = (torch.float32, *DTYPES)[seed % 3], WIDTHS[random_integer(rng, 0, len(WIDTHS) - 1)]
    groups, share = random_integer(rng, 1, 2), random_integer(rng, 1, 4)
    nodes = random_integer(rng, 1, 12 if seed % 25 else 80)  # several programs for the queries of a group, too
    rows = random_integer(rng, 65, 400)  # more than a program reads at once, so that there are parts to combine
    query = torch.randn(1, nodes, groups * share, width, generator=rng).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(1, groups, rows + 9, width, generator=rng).to(dtype)[:, :, :rows] for _ in range(2))
    # Whole parts of the text are not seen, at its beginning or at its end.
    first, last = sorted(random_integer(rng, 0, rows - 1) for _ in range(2))
    sees_NM = torch.rand(nodes, rows, generator=rng) < 0.6
    sees_NM[:, :first], sees_NM[:, last + 1 :], sees_NM[:, first] = False, False, True
    return query, keys, values, torch.where(sees_NM, 0.0, torch.finfo(dtype).min).to(dtype)


@runs_kernels
@SEEDS
def test_kernels_do_what_is_defined(seeds):
    for seed in seeds:
        read = random_read(seed)
        check_operation(tree_attention, *read, read[0].shape[-1] ** -0.5, compare=assert_near)


def test_layers_of_a_tree_on_cuda_in_half_precision_take_the_kernels():
    query, keys, values, mask_NM = random_read(1)
    one_text = type("Query", (SimpleNamespace,), {"__len__": lambda self: 1})
    cuda = one_text(is_cuda=True, dtype=query.dtype, shape=query.shape)
    mask = mask_NM[None, None]
    with torch.inference_mode():
        assert is_tree_read(cuda, keys, values, mask, {})
        assert not is_tree_read(query, keys, values, mask, {})
        assert not is_tree_read(cuda, keys, values, None, {})
        assert not is_tree_read(cuda, keys, values, mask.float(), {})
        assert not is_tree_read(cuda, keys, values, mask.expand(2, 1, -1, -1), {})
        assert not is_tree_read(cuda, keys, values, mask[:, :, :1], {})
        assert not is_tree_read(cuda, keys, values, mask[..., :-1], {})
        assert not is_tree_read(cuda, keys, values, mask.mT.contiguous().mT, {})
        for more in ({"softcap": 30.0}, {"s_aux": values}, {"dropout": 0.1}, {"position_bias": mask}):
            assert not is_tree_read(cuda, keys, values, mask, more)
        for shape in ((1, 2, 257, 32), (1, 2, 5, 80)):
            cuda.shape = torch.Size(shape)
            assert not is_tree_read(cuda, keys, values, mask, {})


@torch.inference_mode()
def test_a_model_computes_the_same_with_it(monkeypatch):
    """On the CPU by the definition; the mask of a stock forward pass without one is that of sdpa."""
    base = random_base()
    lm, tokens = base.lm, torch.arange(12)[None]
    expected = lm(tokens).logits
    use_tree_attention(lm)
    assert lm.config._attn_implementation == "sdpa"  # on a CPU nothing changes
    weight = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    monkeypatch.setattr(lm, "get_output_embeddings", lambda: SimpleNamespace(weight=weight))
    monkeypatch.setattr(module, "runs_triton", lambda: False)
    use_tree_attention(lm)
    assert lm.config._attn_implementation == "sdpa"
    monkeypatch.setattr(module, "runs_triton", lambda: True)
    use_tree_attention(lm)
    assert lm.config._attn_implementation == NAME
    assert torch.equal(lm(tokens).logits, expected)
    calls = []
    monkeypatch.setattr(module, "is_tree_read", lambda *read: calls.append(read) or True)
    causal = torch.full((12, 12), torch.finfo(torch.float32).min).triu(1)[None, None]
    torch.testing.assert_close(lm(tokens, attention_mask=causal).logits, expected)
    assert len(calls) == lm.config.num_hidden_layers


def test_attend_gives_what_sdpa_gives():
    query, keys, values, mask_NM = (one.float() for one in random_read(3))
    layer = SimpleNamespace(num_key_value_groups=query.shape[1] // keys.shape[1], is_causal=True)
    found, _ = attend(sdpa_attention_forward, layer, query, keys, values, mask_NM[None, None], scaling=0.3, dropout=0.0)
    torch.testing.assert_close(found, tree_attention(query, keys, values, mask_NM, 0.3))


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_another_attention_is_kept(attention):
    lm = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention))
    lm.get_output_embeddings = lambda: SimpleNamespace(weight=SimpleNamespace(is_cuda=True, dtype=torch.bfloat16))
    use_tree_attention(lm)
    assert lm.config._attn_implementation == attention
