"""Steps of fixed shapes: the same tokens and the same trees as with exact shapes, for every drafter."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from sequential_parts import KINDS, make_sequential_drafter
from simple_drafters import oracle_drafter
from tiny_models import random_base
from training_parts import block_heads

from ctcdraft.decoding.loop import generate, why_not_captured
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.static_step import seen_rows
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.trees.sampled import SampledChains
from ctcdraft.errors import InputError
from ctcdraft.models.loading import load_base
from ctcdraft.models.meta import random_weights_base

HOW = DecodingSettings(max_new_tokens=24, nodes=12, temperature=0.0, top_k=0, top_p=1.0, verify=match, lossless=True)
PROMPTS = [torch.tensor([0, 7, 9, 9, 30]), torch.arange(40, 60), torch.tensor([5])]


def all_drafters(base, folder):
    steps = KINDS if folder else ()
    return [Autoregressive(base), *block_heads(base), *(make_sequential_drafter(kind, base, folder) for kind in steps)]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_and_steps_are_those_of_exact_shapes(kind, temperature, tmp_path):
    """Twice, so that state left over from one text would show in the next."""
    base, how = random_base(kind, context=128), replace(HOW, temperature=temperature)
    drafters = [one for one in all_drafters(base, tmp_path) if not why_not_captured(one)]
    assert len(drafters) > 8
    for drafter in drafters:
        expected = [generate(base, drafter, prompt, how, frozenset([3]), 5) for prompt in PROMPTS]
        base.static_shapes = StaticShapes()
        for prompt, exact in 2 * list(zip(PROMPTS, expected, strict=True)):
            fixed = generate(base, drafter, prompt, how, frozenset([3]), 5)
            assert fixed.tokens == exact.tokens, type(drafter).__name__
            # The last steps of a text differ: near its end trees of exact shapes are shallower.
            count = max(len(exact.passes) - 8, 0)
            assert fixed.passes[:count] == exact.passes[:count], type(drafter).__name__
        base.static_shapes = None


def test_a_response_ends_at_its_first_stop_token_and_at_the_end_of_the_context():
    """The step that runs meanwhile changes nothing."""
    base = random_base(context=64)
    free = generate(base, Autoregressive(base), PROMPTS[0], HOW, frozenset(), 0).tokens
    long = torch.arange(40, 95)
    full = generate(base, Autoregressive(base), long, HOW, frozenset(), 0)
    assert len(full.tokens) == 64 - len(long)
    base.static_shapes = StaticShapes()
    for drafter in all_drafters(base, None)[:4]:
        for position in (0, 1, 7):
            stopped = generate(base, drafter, PROMPTS[0], HOW, frozenset([free[position]]), 0)
            assert stopped.tokens == free[: free.index(free[position]) + 1]
            assert stopped.ended
        assert generate(base, drafter, long, HOW, frozenset(), 0).tokens == full.tokens
        limited = generate(base, drafter, PROMPTS[0], HOW, frozenset(), 0, max_steps=3)
        assert len(limited.passes) == 3
        assert limited.tokens == free[: len(limited.tokens)]


def test_a_cache_that_grows_and_one_that_holds_another_text():
    base = random_base(context=900)
    prompts = [torch.arange(length) % 200 for length in (5, 400, 20, 700, 3)]
    drafter = block_heads(base)[0]
    expected = [generate(base, drafter, prompt, HOW, frozenset(), 0).tokens for prompt in prompts]
    base.static_shapes = StaticShapes()
    assert [generate(base, drafter, prompt, HOW, frozenset(), 0).tokens for prompt in prompts] == expected
    assert copy.deepcopy(base).static_shapes.cache is None


def test_attention_sees_few_more_rows_than_are_in_use():
    assert [seen_rows(rows) for rows in (1, 256, 257, 1_100, 5_000)] == [256, 256, 512, 1_280, 5_120]


def test_who_needs_the_host_decodes_with_exact_shapes(tmp_path):
    base = random_base(context=128)
    base.static_shapes = StaticShapes()
    text = torch.cat([PROMPTS[0], torch.zeros(30, dtype=torch.int64)])
    oracle = oracle_drafter(text, 4)
    assert why_not_captured(oracle) == "its drafts need the host"
    generate(base, oracle, PROMPTS[0], HOW, frozenset(), 0)
    assert base.static_shapes.cache is None
    sampled = make_sequential_drafter(KINDS[0], base, tmp_path, tree=SampledChains(2))
    assert why_not_captured(sampled) == "drafts of SampledChains need the host"


def test_compiling_requires_static_shapes():
    for load in (partial(load_base, "nowhere"), partial(random_weights_base, {}, "none")):
        with pytest.raises(InputError, match=r"add base\.static_shapes=true"):
            load(dtype="float32", device="cpu", compiled=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs, and there is no CUDA device here")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_give_what_eager_ones_give(temperature, compiled, tmp_path):
    base, how = random_base(context=128).to("cuda"), replace(HOW, temperature=temperature)
    prompts = [prompt.cuda() for prompt in PROMPTS]
    for drafter in all_drafters(base, tmp_path):
        base.static_shapes = None
        expected = [generate(base, drafter, prompt, how, frozenset([3]), 5).tokens for prompt in prompts]
        base.static_shapes = StaticShapes(compiled)
        for _ in range(2):  # the second time every graph is there
            assert [generate(base, drafter, prompt, how, frozenset([3]), 5).tokens for prompt in prompts] == expected
        if not why_not_captured(drafter):
            assert base.static_shapes.capture_error is None, type(drafter).__name__
            assert next(iter(base.static_shapes.decoders.values())).graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs, and there is no CUDA device here")
def test_what_cannot_be_captured_runs_eagerly_and_is_reported():
    base = random_base().to("cuda")
    truth = generate(base, Autoregressive(base), PROMPTS[0].cuda(), HOW, base.stop_token_ids, 3).tokens

    def asks(lm, read, out):
        out.last_hidden_state.sum().item()

    base.lm.base_model.register_forward_hook(asks)
    base.static_shapes = StaticShapes()
    assert base.execution_mode == "captured, fixed shapes"
    assert generate(base, Autoregressive(base), PROMPTS[0].cuda(), HOW, base.stop_token_ids, 3).tokens == truth
    assert base.execution_mode.startswith("not captured (")
