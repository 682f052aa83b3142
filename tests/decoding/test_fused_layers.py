"""Layers of a base as plain blocks: the same hidden states and tokens, and which bases keep their own layers."""

from __future__ import annotations

import pytest
import torch
from test_static_loop import HOW, PROMPTS
from tiny_models import random_base
from training_parts import block_heads

from benchmarks.simulated.device import SETUP, UNSUPPORTED, active, device
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.models import fused_layers as module
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.fused_layers import computes_the_same, fused_layers

FUSED = {"llama": {}, "mistral": {"sliding_window": None}, "qwen2": {"without": ("head_dim",)}, "qwen3": {}}
KEPT = {
    "gpt2": {},
    "gemma": {},  # norms scale by 1 + w, and embeddings are scaled
    "granite": {"embedding_multiplier": 3.0},
    "llama": {"mlp_bias": True},
    "mistral": {"sliding_window": 16},
    "phi3": {"without": ("head_dim",)},  # one matrix for queries, keys and values
    # Its queries are scaled by a function of the position, which is 1 in short texts.
    "ministral3": {"sliding_window": None},
}


def tokens_and_states(base, drafter):
    """Return the answers to PROMPTS, and the hidden states of every forward pass over a tree."""
    states, read_tree = [], base.read_tree

    def recorded(tree, cache):
        output = read_tree(tree, cache)
        states.append(output.states_ND.clone())
        return output

    base.static_shapes, base.read_tree = StaticShapes(), recorded
    answers = [generate(base, drafter, prompt, HOW, frozenset([3]), 5).tokens for prompt in PROMPTS]
    del base.read_tree
    base.static_shapes = None
    return answers, states


@pytest.mark.parametrize("kind", FUSED)
@torch.inference_mode()
def test_hidden_states_and_tokens_are_those_of_the_stock_layers(kind):
    stock = random_base(kind, context=128, num_hidden_layers=3, **FUSED[kind])
    for base in (stock, BaseLM(stock.lm, stock.tokenizer, "several layers", aux_layers=("last", 0, 2))):
        drafters = [Autoregressive(base), *([block_heads(base)[0]] if base is stock else [])]
        expected = [tokens_and_states(base, drafter) for drafter in drafters]
        base.fuse_layers()
        assert base.fused_layers is not None
        for drafter, (answers, states) in zip(drafters, expected, strict=True):
            found, fused_states = tokens_and_states(base, drafter)
            assert found == answers == [generate(base, drafter, p, HOW, frozenset([3]), 5).tokens for p in PROMPTS]
            for ours, theirs in zip(fused_states, states, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        base.static_shapes = StaticShapes()
        assert base.execution_mode == "eager, fixed shapes, fused layers"
        base.static_shapes = StaticShapes(compiled=True)
        assert base.execution_mode == "compiled, fixed shapes"


@pytest.mark.parametrize("kind", KEPT)
def test_other_bases_keep_their_layers(kind):
    base = random_base(kind, **KEPT[kind])
    base.fuse_layers()
    assert base.fused_layers is None


def double_scores(lm):
    lm.base_model.layers[1].self_attn.scaling *= 2


def another_forward(lm):
    mlp = lm.base_model.layers[0].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x)


@pytest.mark.parametrize("change", [double_scores, another_forward])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_layer_is_kept(change, dtype):
    base = random_base().to(dtype)
    assert fused_layers(base) is not None
    change(base.lm)
    assert fused_layers(base) is None


def test_the_random_state_stays():
    base, state = random_base(), torch.get_rng_state()
    base.fuse_layers()
    assert torch.equal(torch.get_rng_state(), state)


def test_without_memory_for_the_comparison_the_layers_are_kept(monkeypatch):
    base = random_base()

    def full(base):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "checked_layers", full)
    base.fuse_layers()
    assert (base.fused_layers, base.tried_to_fuse) == (None, True)


@torch.no_grad()
def test_the_whole_model_is_compared():
    """What its layers do not show, such as scaled embeddings."""
    base = random_base()
    fused = fused_layers(base)
    assert computes_the_same(fused, base)
    fused.embedding = torch.nn.Embedding.from_pretrained(3 * base.embedding.weight)
    assert not computes_the_same(fused, base)


def test_hooks_and_moves_keep_or_renew_the_layers():
    base = random_base()
    base.fuse_layers()
    assert base.fused_layers is not None
    base.to(torch.float64)
    assert base.fused_layers is None
    handle = base.lm.base_model.layers[1].register_forward_hook(lambda *call: None)
    assert fused_layers(base) is None
    handle.remove()
    base.to(torch.float32)
    assert fused_layers(base) is not None


def test_a_moved_base_drops_what_captured_steps_read():
    base = random_base(context=128)
    base.static_shapes = StaticShapes()
    generate(base, Autoregressive(base), PROMPTS[0], HOW, frozenset(), 5)
    assert base.static_shapes.decoders
    base.to("cpu")
    assert not base.static_shapes.decoders


@pytest.mark.skipif(SETUP is None, reason=UNSUPPORTED)
def test_new_values_of_all_weights_reach_the_blocks():
    """On a device, where weights and biases with one input are rows of one tensor."""
    base = random_base("qwen2", **FUSED["qwen2"])
    with active():
        blocks = fused_layers(base.to(device())).blocks
        for layer, block in zip(base.lm.base_model.layers, blocks, strict=True):
            for value in layer.parameters():
                value.fill_(7.0)
            packed = [*block.attention.packed, block.mlp.packed[0]]
            assert block.mlp.packed[1] is None
            assert all((value.cpu() == 7.0).all() for value in [*packed, *block.parameters()])
