"""Memory of steps of fixed shapes: padded prompts, captures that change nothing, graphs that are freed."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from sequential_parts import KINDS, make_sequential_drafter
from tiny_models import random_base
from training_parts import block_heads

from ctcdraft.decoding import static_graphs
from ctcdraft.decoding.loop import generate, why_not_captured
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.static_prompt import SIZES, padded_size
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.controls import FullTree

HOW = DecodingSettings(max_new_tokens=8, nodes=12, temperature=0.0, top_k=0, top_p=1.0, verify=match, lossless=True)
PROMPTS = [torch.tensor([0, 7, 9, 9, 30]), torch.arange(40, 110)]


class Replay:
    def __init__(self, function):
        self.replay = function


@pytest.fixture
def captures(monkeypatch):
    """Let every function be captured, as if this were a CUDA device: capturing runs nothing."""
    monkeypatch.setattr(static_graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(static_graphs, "capture_graph", Replay)


def drafters_of(base, folder):
    drafters = [*block_heads(base), *(make_sequential_drafter(kind, base, folder) for kind in KINDS), FullTree()]
    return [Autoregressive(base), *(one for one in drafters if not why_not_captured(one))]


def test_sizes_of_prompts():
    assert [padded_size(tokens) for tokens in (1, 64, 65, 128, 129, 256, 257)] == [64, 64, 128, 128, 256, 256, None]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_prompts_of_every_size_give_the_tokens_of_exact_shapes(temperature):
    base, how = random_base(context=400), replace(HOW, temperature=temperature)
    prompts = [torch.arange(length) * 7 % 200 for length in (1, 63, 64, 65, 128, 255, 256, 257, 399)]
    for drafter in (Autoregressive(base), block_heads(base)[0]):
        expected = [generate(base, drafter, prompt, how, frozenset(), 5).tokens for prompt in prompts]
        base.static_shapes = StaticShapes()
        for order in (1, -1):
            found = [generate(base, drafter, prompt, how, frozenset(), 5).tokens for prompt in prompts[::order]]
            assert found[::order] == expected
        base.static_shapes = None


@pytest.mark.parametrize("by_parts", [False, True])
def test_captures_change_nothing(by_parts, captures, tmp_path):
    """Parts that are captured one by one: a commit moves cache rows, and moved twice they would be other ones."""
    base = random_base(context=160)
    watch = (lambda part, call: call()) if by_parts else None
    expected = [generate(base, Autoregressive(base), prompt, HOW, frozenset(), 0).tokens for prompt in PROMPTS]
    for drafter in drafters_of(base, tmp_path):
        base.static_shapes = shapes = StaticShapes()
        for prompt, tokens in 2 * list(zip(PROMPTS, expected, strict=True)):
            with torch.inference_mode():
                found = shapes.generate(base, drafter, prompt, HOW, frozenset(), 0, watch=watch)
            assert found.tokens == tokens, type(drafter).__name__
        (decoder,) = shapes.decoders.values()
        parts = ("draft", "read", "commit") if by_parts else ("step",)
        assert {part for part, *_ in decoder.graphs.graphs} == {"prompt", *parts}
        base.static_shapes = None


def test_a_capture_that_fails_changes_nothing(captures, tmp_path, monkeypatch):
    """That of the first step, after it ran once: the step is then run as if nothing had been captured."""
    base, prompts = random_base(context=160), []

    def fail_after_prompt(function):
        if prompts:
            function()
            raise RuntimeError("it waits for the host")
        prompts.append(function)
        return Replay(function)

    monkeypatch.setattr(static_graphs, "capture_graph", fail_after_prompt)
    for drafter in drafters_of(base, tmp_path):
        steps = []
        for captured in (False, True):
            monkeypatch.setattr(static_graphs, "can_capture", lambda device, captured=captured: captured)
            base.static_shapes = shapes = StaticShapes()
            prompts.clear()
            answer = generate(base, drafter, PROMPTS[0], HOW, frozenset(), 0)
            steps.append((answer.tokens, [step.committed for step in answer.passes]))
            (decoder,) = shapes.decoders.values()
            steps[-1] += (len(decoder.draft_caches),)
        assert decoder.graphs.error == "it waits for the host"
        assert steps[0] == steps[1], type(drafter).__name__
        base.static_shapes = None


def test_dropped_graphs_are_freed_at_once(captures, tmp_path, monkeypatch):
    """Not when Python looks for reference cycles: the memory of graphs is needed for those that replace them."""
    # As a CUDA graph does, it runs the function once and does not keep it.
    monkeypatch.setattr(static_graphs, "capture_graph", lambda function: (function(), Replay(lambda: None))[1])
    base = random_base(context=160)
    gc.disable()
    try:
        for drafter in drafters_of(base, tmp_path):
            base.static_shapes = shapes = StaticShapes()
            generate(base, drafter, PROMPTS[0], HOW, frozenset(), 0, max_steps=2)
            dropped = weakref.ref(next(iter(shapes.decoders.values())))
            shapes.decoders.clear()
            assert dropped() is None, type(drafter).__name__
            base.static_shapes = None
    finally:
        gc.enable()


def test_what_is_prepared_needs_no_more_room_than_the_answer(captures, tmp_path):
    """Answers of one token behind prompts that fill the context."""
    base = random_base(context=70)
    for drafter in drafters_of(base, tmp_path):
        for nodes in (2, 12):
            how = replace(HOW, nodes=nodes, max_new_tokens=1)
            base.static_shapes = shapes = StaticShapes()
            for length in (69, 3, SIZES[0]):
                prompt = torch.arange(length)
                shapes.prepare(base, drafter, prompt, how)
                (decoder,) = shapes.decoders.values()
                known = set(decoder.graphs.graphs)
                generate(base, drafter, prompt, replace(how, max_new_tokens=70 - length), frozenset(), 0)
                assert set(decoder.graphs.graphs) == known
            base.static_shapes = None
