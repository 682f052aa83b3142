"""Reads of static shape: padding changes nothing, buffers are shared safely, captured graphs equal eager reads."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from simple_drafters import oracle_drafter, random_drafter
from tiny_models import random_base

from ctcdraft.corpus.generation.transformers import generate_batch
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.static_shapes import (
    PADDED_SIZES,
    StaticInputs,
    StaticShapeForward,
    padded_size,
    padded_sizes_up_to,
)
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.errors import InputError
from ctcdraft.models.loading import load_base
from ctcdraft.models.meta import random_weights_base

HOW = DecodingSettings(max_new_tokens=24, nodes=12, temperature=0.0, top_k=0, top_p=1.0, verify=match, lossless=True)
PROMPTS = [torch.tensor([0, 7, 9, 9, 30]), torch.arange(40, 60)]


def test_padding_by_hand():
    tree = TokenTree.from_lists(torch.tensor(7), [5], [-1])
    inputs = StaticInputs.of(tree, start=2, capacity=16, dtype=torch.float32)
    assert inputs.tokens_N.tolist() == [7, 5, 0, 0, 0, 0, 0, 0]
    assert inputs.positions_N.tolist() == [2, 3, 2, 2, 2, 2, 2, 2]
    assert inputs.rows_N.tolist() == list(range(2, 10))
    seen = [row.nonzero().flatten().tolist() for row in inputs.mask_NM == 0]
    assert seen == [[0, 1, 2], [0, 1, 2, 3], [4], [5], [6], [7], [8], [9]]
    assert [padded_size(nodes) for nodes in (1, 3, 64, 300)] == [1, 8, 64, 512]
    assert [padded_sizes_up_to(nodes) for nodes in (1, 12, 16, 300)] == [
        [1],
        [1, 8, 16],
        [1, 8, 16],
        [*PADDED_SIZES, 512],
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same(kind, temperature):
    base, settings = random_base(kind), replace(HOW, temperature=temperature)
    expected = [
        generate(base, Autoregressive(base), prompt, settings, base.stop_token_ids, 3).tokens for prompt in PROMPTS
    ]
    base.static_shapes = StaticShapeForward()
    for prompt, truth in zip(PROMPTS, expected, strict=True):
        text = torch.cat([prompt, torch.tensor(truth)])
        for drafter in (Autoregressive(base), random_drafter(base.vocabulary, 12), oracle_drafter(text, 5)):
            assert generate(base, drafter, prompt, settings, base.stop_token_ids, 3).tokens == truth


def test_reads_are_those_of_the_exact_shape():
    """In buffers that hold rows of another text, and in a cache that must grow."""
    base = random_base(context=600)
    tree = TokenTree.from_lists(torch.tensor(7), [5, 6, 8, 9], [-1, 0, -1, 2])
    for length in (5, 250, 400):
        text_L = torch.arange(length) % 200
        exact = base.new_cache(length + 8)
        base.read(text_L, exact)
        truth = base.read_tree(tree, exact)
        base.static_shapes = base.static_shapes or StaticShapeForward()
        cache = base.new_cache(20)
        base.read(text_L, cache)
        output, base.static_shapes = base.read_tree(tree, cache), None
        torch.testing.assert_close(output.logits_NV, truth.logits_NV, rtol=0, atol=1e-4)
        torch.testing.assert_close(output.states_ND, truth.states_ND, rtol=0, atol=1e-4)
        assert cache.length == exact.length == length + 5


def test_two_simultaneous_texts_do_not_share_buffers():
    base = random_base()
    base.static_shapes = StaticShapeForward()
    one, other = base.new_cache(20), None
    base.read(torch.arange(9), one)
    base.read_tree(TokenTree.only_root(torch.tensor(3)), one)
    other = base.new_cache(20)
    base.read(torch.arange(50, 60), other)
    assert one.buffers[0] is not other.buffers[0]
    assert copy.deepcopy(base).static_shapes is not base.static_shapes


def test_a_batch_of_responses_does_not_share_the_buffers_of_one_text():
    base = random_base()
    prompts = [prompt.tolist() for prompt in PROMPTS]

    def responses():
        return generate_batch(base, prompts, [9, 9], lambda logits_BV, rows, step: logits_BV.argmax(dim=-1))

    truth = responses()
    base.static_shapes = StaticShapeForward()
    before = base.new_cache(len(prompts[1]) + 9)  # of the batch's capacity, and released
    base.read(PROMPTS[0], before)
    assert base.static_shapes._owns_buffers(before)  # as a graph captured with it would
    del before
    assert responses() == truth


def test_compiling_requires_static_shapes():
    for load in (partial(load_base, "nowhere"), partial(random_weights_base, {}, "none")):
        with pytest.raises(InputError, match=r"add base\.static_shapes=true"):
            load(dtype="float32", device="cpu", compiled=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs, and there is no CUDA device here")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_read_gives_what_an_eager_one_gives(compiled):
    base = random_base().to("cuda")
    prompts = [prompt.cuda() for prompt in PROMPTS]
    expected = [generate(base, Autoregressive(base), prompt, HOW, base.stop_token_ids, 3).tokens for prompt in prompts]
    base.static_shapes = StaticShapeForward(compiled)
    for _ in range(2):  # the second time every graph is there
        for prompt, truth in zip(prompts, expected, strict=True):
            text = torch.cat([prompt, torch.tensor(truth, device="cuda")])
            for drafter in (Autoregressive(base), oracle_drafter(text, 5)):
                assert generate(base, drafter, prompt, HOW, base.stop_token_ids, 3).tokens == truth
    assert base.static_shapes._graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs, and there is no CUDA device here")
def test_what_cannot_be_captured_is_read_eagerly_and_reported():
    base = random_base().to("cuda")
    truth = generate(base, Autoregressive(base), PROMPTS[0].cuda(), HOW, base.stop_token_ids, 3).tokens

    def asks(lm, read, out):
        out.last_hidden_state.sum().item()

    base.lm.base_model.register_forward_hook(asks)
    base.static_shapes = StaticShapeForward()
    assert base.execution_mode == "captured, fixed shapes"
    assert generate(base, Autoregressive(base), PROMPTS[0].cuda(), HOW, base.stop_token_ids, 3).tokens == truth
    assert base.execution_mode.startswith("not captured (")
