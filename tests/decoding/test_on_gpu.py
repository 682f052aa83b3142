"""Steps of fixed shapes on a CUDA device: no waiting within a step, and memory that does not grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_static_loop import HOW, PROMPTS, all_drafters
from tiny_models import random_base

from ctcdraft.decoding.loop import generate, why_not_captured
from ctcdraft.decoding.static_loop import StaticShapes, Transfers
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.controls import FullTree
from ctcdraft.evaluation.profiling import profile_generation
from ctcdraft.nn.tree_attention import use_tree_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="watches a CUDA device, and there is none here"),
]


def captured_drafters(base, folder):
    return [one for one in all_drafters(base, folder) if not why_not_captured(one)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@torch.inference_mode()
def test_a_step_waits_for_nothing_but_the_report(temperature, tmp_path):
    """`set_sync_debug_mode` raises at every operation that waits for the device."""
    base = random_base(context=128).to("cuda")
    how = replace(HOW, temperature=temperature)
    for drafter in captured_drafters(base, tmp_path):
        base.static_shapes = StaticShapes()
        generate(base, drafter, PROMPTS[0].cuda(), how, frozenset(), 5)
        (decoder,) = base.static_shapes.decoders.values()
        assert decoder.graphs.error is None, type(drafter).__name__
        rows = decoder.rows_behind(len(PROMPTS[0]))
        for eager in (False, True):
            decoder.graphs.error = "tested" if eager else None
            _, first = decoder.start(PROMPTS[0].cuda(), 5)
            transfers = Transfers(decoder.report_R)
            torch.cuda.set_sync_debug_mode("error")
            try:
                decoder.run(rows, first)
                for _ in range(3):
                    decoder.run(rows)
                    transfers.begin()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            transfers.wait()
            assert transfers.previous() is not None


def test_parts_that_are_captured_by_themselves_serve_every_text():
    """As in profiles: memory of the text in which they were captured may be used for something else by then."""
    base = random_base(context=128).to("cuda")
    base.static_shapes = StaticShapes()
    for drafter in (FullTree(), *captured_drafters(base, None)):
        expected = generate(base, drafter, PROMPTS[0].cuda(), HOW, frozenset(), 5).tokens
        for _ in range(3):
            _, answer = profile_generation(base, drafter, PROMPTS[0].cuda(), HOW, 5)
            assert answer.tokens == expected[: len(answer.tokens)], type(drafter).__name__
            torch.full((2**16,), 2**40, device="cuda")  # what is free is overwritten


@torch.inference_mode()
def test_half_precision_by_kernels(tmp_path):
    """Captured and eager steps give the same tokens, and fused layers the hidden states of the stock ones."""
    base = random_base(context=128, head_dim=32).to("cuda", torch.bfloat16)
    use_tree_attention(base.lm)
    for drafter in captured_drafters(base, tmp_path):
        drafter = drafter.to("cuda", torch.bfloat16) if isinstance(drafter, torch.nn.Module) else drafter
        base.static_shapes, answers = StaticShapes(), []
        for eager in (False, True):
            decoder = base.static_shapes.decoder(base, drafter, HOW, 128)
            decoder.graphs.error = "tested" if eager else None
            answers.append([generate(base, drafter, prompt.cuda(), HOW, frozenset(), 5).tokens for prompt in PROMPTS])
            assert eager or (decoder.graphs.graphs and decoder.graphs.error is None), type(drafter).__name__
        assert answers[0] == answers[1], type(drafter).__name__
    assert base.fused_layers is not None
    tree, states = TokenTree.chain(torch.tensor([9], device="cuda"), torch.arange(5, device="cuda")), []
    for fused in (base.fused_layers, None):
        if fused is None:
            base.lm.set_attn_implementation("sdpa")
        base.fused_layers, cache = fused, base.static_shapes.reserve(base, HOW, 128)
        cache.restart()
        base.read(PROMPTS[1].cuda(), cache.exact)
        cache.adopt_prompt()
        states.append(base.read_tree(tree, cache).states_ND.float())
    assert (states[0] - states[1]).norm() < 0.05 * states[1].norm()


def test_the_memory_of_answers_does_not_grow(tmp_path):
    base = random_base(context=128).to("cuda")
    base.static_shapes = StaticShapes()
    for drafter in captured_drafters(base, tmp_path):
        peaks = []
        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()
            for prompt in PROMPTS:
                generate(base, drafter, prompt.cuda(), HOW, frozenset(), 5)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
        assert peaks[3] <= peaks[1], type(drafter).__name__  # the first captures, the second has all graphs


@pytest.mark.parametrize("static", [False, True])
def test_the_peak_is_that_of_weights_and_rows(static):
    """A base of 0.1 GB: beside its weights, the rows of keys and values twice, and activations of a prompt."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "head_dim": 256}
    base = random_base(context=2048, **shape).to("cuda")
    base.static_shapes = StaticShapes() if static else None
    base.fuse_layers()  # once, with float32 copies of a layer
    drafter = captured_drafters(base, None)[0]
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    prompt = torch.arange(1024, device="cuda") % 200
    generate(base, drafter, prompt, HOW, frozenset(), 0)
    rows = 2 * (1024 + 256) * 4 * 2 * 2 * 256 * 4
    activations = 1024 * (8 * 1024 + 4 * 4096) * 4 + 1024 * 1024 * 4 * 4
    assert torch.cuda.max_memory_allocated() - held < rows + activations + 2**27
