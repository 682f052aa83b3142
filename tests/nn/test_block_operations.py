"""Operations of draft blocks: kernels against definitions."""

from __future__ import annotations

import torch
from fused_parts import SEEDS, assert_close, check_operation, list_of, random_integer, runs_kernels

from ctcdraft.nn.block_operations import add_linear, embed_beside, gru_step, rms_norm, rotate_into, silu_gated
from ctcdraft.nn.rotary import Rotary, default_frequencies

DTYPES = (torch.float32, torch.bfloat16)


def assert_near(found, expected):
    """In half precision sums may be rounded once more or less."""
    for one, other in zip(list_of(found), list_of(expected), strict=True):
        if isinstance(other, torch.Tensor) and other.dtype in (torch.bfloat16, torch.float16):
            torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)
        else:
            assert_close([one], [other])


def check_block_operations(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    dtype, count = DTYPES[random_integer(rng, 0, 1)], random_integer(rng, 1, 12)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    heads, groups, width = random_integer(rng, 1, 4), random_integer(rng, 1, 3), 2 * random_integer(rng, 1, 20)
    queries = random_integer(rng, 1, count)
    query, key, value = (
        random(1, rows, parts * width).unflatten(-1, (-1, width)).transpose(1, 2)
        for rows, parts in ((queries, heads), (count, groups), (count, groups))
    )
    cos_PE, sin_PE = Rotary(default_frequencies(width, 10_000.0), 50).tables(torch.device("cpu"))
    rows_N = torch.randperm(30, generator=rng)[:count]
    position_ids_N = torch.randint(0, 50, (count,), generator=rng)
    # As in the cache: a view of the rows that attention sees.
    caches = [random(1, groups, 40, width)[:, :, :30] for _ in range(2)]
    check_operation(
        rotate_into, query, key, value, cos_PE, sin_PE, position_ids_N, rows_N, *caches, compare=assert_near
    )

    wide = random_integer(rng, 1, 700)
    check_operation(rms_norm, random(1, count, wide), random(wide), 1e-5, compare=assert_near)

    inner = random_integer(rng, 1, 700)
    check_operation(silu_gated, random(1, count, 2 * inner), compare=assert_near)

    width = random_integer(rng, 1, 90)
    # A slice of a wider table, as of several embeddings side by side.
    table_VD = random(20, width + random_integer(rng, 0, 9))[:, :width]
    states_XE = random(random_integer(rng, 1, 9), random_integer(rng, 1, 1500))
    tokens_K = torch.randint(0, 20, (count,), generator=rng)
    rows_K = torch.randint(0, len(states_XE), (count,), generator=rng)
    check_operation(embed_beside, table_VD, tokens_K, states_XE, rows_K, random_integer(rng, 0, 1) == 1)

    rank = random_integer(rng, 1, 90)
    cell = torch.nn.GRUCell(7, rank).to(dtype)
    memory_XR, input_VG = random(len(states_XE), rank), random(20, 3 * rank + random_integer(rng, 0, 9))[:, : 3 * rank]
    weights = cell.weight_hh.detach(), cell.bias_hh.detach()
    check_operation(gru_step, input_VG, *weights, memory_XR, rows_K, tokens_K, compare=assert_near)


@runs_kernels
@SEEDS
def test_kernels_do_what_is_defined(seeds):
    for seed in seeds:
        check_block_operations(seed)


def test_a_residual_is_added_to_any_layer():
    """On the CPU as before; layers with a bias, or of another kind, keep their own forward."""
    x_234, residual_235 = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    for layer in (torch.nn.Linear(4, 5, bias=False), torch.nn.Linear(4, 5), torch.nn.Sequential(torch.nn.Linear(4, 5))):
        with torch.no_grad():
            assert torch.equal(add_linear(residual_235, layer, x_234), residual_235 + layer(x_234))
