"""Steps of fixed shapes: the same tokens and the same trees as with exact shapes, for every drafter."""

import copy
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from sequential_parts import KINDS, make_sequential_drafter, saved_lm
from simple_drafters import oracle_drafter
from tiny_models import random_base
from training_parts import block_heads

from ctcdraft.decoding import static_graphs, static_loop, static_step
from ctcdraft.decoding.loop import generate, step_execution, why_not_captured
from ctcdraft.decoding.lossy_acceptance import TypicalAcceptance
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.static_step import seen_rows
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.drafters.trees.sampled import SampledChains
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.runner import capture_steps
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


def test_a_response_ends_at_its_first_stop_token_and_at_the_end_of_the_context(tmp_path):
    """The step that runs meanwhile changes nothing, and asks no drafter for a position that it has not."""
    base = random_base(context=64)
    free = generate(base, Autoregressive(base), PROMPTS[0], HOW, frozenset(), 0).tokens
    long = torch.arange(40, 95)
    full = generate(base, Autoregressive(base), long, HOW, frozenset(), 0)
    assert len(full.tokens) == 64 - len(long)
    learned = saved_lm(tmp_path / "learned", "gpt2", context=64)  # no positions beyond the base's
    drafters = [*all_drafters(base, tmp_path), DraftModel(base, learned, None, 4, DynamicTree(3, 4))]
    base.static_shapes = StaticShapes()
    for drafter in [one for one in drafters if not why_not_captured(one)]:
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


class Chain(Autoregressive):
    """A tree deeper than the drafter's `frames` says, which are 0 if it has none."""

    depth = 4

    def draft(self, context, memory, rng):
        draft_tokens_K = context.root_1.new_full((self.depth,), 9)
        return TokenTree.chain(context.root_1, draft_tokens_K), None


def test_a_tree_beyond_its_budget_is_refused_in_the_first_step():
    base, wide, deep = random_base(context=64), Chain(None), Chain(None)
    base.static_shapes = StaticShapes()
    with pytest.raises(InputError, match=r"Chain drafted a tree of depth 4 .* room for 0; its attribute `frames`"):
        generate(base, Chain(None), PROMPTS[0], HOW, frozenset(), 0)
    wide.frames = wide.depth = HOW.nodes
    with pytest.raises(InputError, match=r"a tree of nodes 13 where context\.nodes allows 12"):
        generate(base, wide, PROMPTS[0], HOW, frozenset(), 0)
    deep.frames = 4
    expected = generate(base, Autoregressive(base), PROMPTS[0], HOW, frozenset(), 0).tokens
    assert generate(base, deep, PROMPTS[0], HOW, frozenset(), 0).tokens == expected


def test_trees_smaller_than_the_frames_fit_their_buffers(tmp_path):
    base, how = random_base(context=64), replace(HOW, nodes=3)
    expected = generate(base, Autoregressive(base), PROMPTS[0], how, frozenset(), 0).tokens
    base.static_shapes = StaticShapes()
    for drafter in [one for one in all_drafters(base, tmp_path) if not why_not_captured(one)]:
        assert generate(base, drafter, PROMPTS[0], how, frozenset(), 0).tokens == expected


def test_a_larger_tree_of_another_contestant_drops_no_prepared_step():
    base = random_base(context=128)
    base.static_shapes = StaticShapes()
    contestants = {"autoregressive": Autoregressive(base), "wide": block_heads(base)[3]}
    setup = EvaluationSetup(base, contestants, HOW, 0, {"wide": 240})
    capture_steps(setup, PROMPTS[0])
    decoders = base.static_shapes.decoders
    assert [decoder.drafter for decoder in decoders.values()] == list(contestants.values())
    assert all(decoder.prepared for decoder in decoders.values())
    generate(base, contestants["autoregressive"], PROMPTS[0], replace(HOW, max_new_tokens=4), frozenset(), 0)
    assert len(decoders) == 2  # one for all length limits


def test_the_decoder_that_was_used_least_recently_makes_room(monkeypatch):
    monkeypatch.setattr(static_loop, "MAX_DECODERS", 2)
    base = random_base(context=64)
    base.static_shapes = StaticShapes()
    first, second, third = (Autoregressive(base) for _ in range(3))
    for drafter in (first, second, first, third):
        generate(base, drafter, PROMPTS[0], HOW, frozenset(), 0)
    assert [decoder.drafter for decoder in base.static_shapes.decoders.values()] == [first, third]


class Replay:
    def __init__(self, function):
        self.replay = function


@pytest.mark.parametrize("error", [None, OSError("no C compiler\nat all"), InputError("a wrong value")])
def test_a_step_is_captured_on_its_device_or_runs_eagerly(error, monkeypatch):
    """Triton's errors are of many kinds; one of the input is not hidden."""
    base, entered, places = random_base(context=64), [], []
    expected = generate(base, Autoregressive(base), PROMPTS[0], HOW, frozenset(), 0).tokens
    base.static_shapes = shapes = StaticShapes()

    @contextmanager
    def on_device(device):
        entered.append(device)
        yield
        entered.pop()

    def capture_graph(function):
        places.append(list(entered))
        if error is not None:
            raise error
        return Replay(lambda: (places.append(list(entered)), function()))

    monkeypatch.setattr(static_step, "on_device", on_device)
    monkeypatch.setattr(static_graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(static_graphs, "capture_graph", capture_graph)
    if isinstance(error, InputError):
        with pytest.raises(InputError, match="a wrong value"):
            generate(base, Autoregressive(base), PROMPTS[0], HOW, frozenset(), 0)
        return
    assert generate(base, Autoregressive(base), PROMPTS[0], HOW, frozenset(), 0).tokens == expected
    assert shapes.capture_error == (None if error is None else "no C compiler")
    # Captured and run: the prompt, the first step, and the others, of which one is surplus.
    assert len(places) == (1 if error else 3 + 1 + len(expected))
    assert all(place == [base.device] for place in places)


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
    assert step_execution(base, oracle, HOW) == "exact shapes (its drafts need the host)"
    other = replace(HOW, verify=TypicalAcceptance(0.3, 0.09))
    assert step_execution(base, Autoregressive(base), other) == "exact shapes (its verifier needs the host)"
    assert step_execution(base, Autoregressive(base), HOW) == "eager, fixed shapes"
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
    shapes = StaticShapes(compiled)  # one for all drafters: it compiles for half a minute
    for drafter in all_drafters(base, tmp_path):
        base.static_shapes = None
        expected = [generate(base, drafter, prompt, how, frozenset([3]), 5).tokens for prompt in prompts]
        base.static_shapes = shapes
        for _ in range(2):  # the second time every graph is there
            assert [generate(base, drafter, prompt, how, frozenset([3]), 5).tokens for prompt in prompts] == expected
        if not why_not_captured(drafter):
            assert shapes.error_of(drafter) is None, type(drafter).__name__
            assert list(shapes.decoders.values())[-1].graphs.graphs


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
