"""Layers of a base as plain blocks: the same hidden states and tokens, and which bases keep their own layers."""

from __future__ import annotations

import pytest
import torch
from test_static_loop import HOW, PROMPTS
from tiny_models import random_base
from training_parts import block_heads

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.drafters.autoregressive import Autoregressive
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


@pytest.mark.parametrize("kind", KEPT)
def test_other_bases_keep_their_layers(kind):
    base = random_base(kind, **KEPT[kind])
    base.fuse_layers()
    assert base.fused_layers is None


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


def test_blocks_share_the_weights():
    base = random_base()
    theirs = {weight.data_ptr() for weight in base.lm.parameters()}
    for block in fused_layers(base).blocks:
        assert {weight.data_ptr() for weight in block.parameters()} <= theirs
