"""Losslessness: every drafter gives autoregression's tokens, greedy and sampled, over several prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sequential_parts import KINDS as KINDS_OF_STEPS
from sequential_parts import make_sequential_drafter
from simple_drafters import Stutter, oracle_drafter, random_drafter
from tiny_models import random_base
from training_parts import block_heads

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.merged import Merged
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.suffix import SuffixDecoding
from ctcdraft.errors import InputError

KINDS = ("llama", "qwen3", "gpt2")
PROMPTS = [torch.tensor(row) for row in ([0, 7, 9, 9, 9, 30], [0, 2, 80, 81, 3], [5], [0, *range(40, 90)])]


def settings(temperature: float = 0.0, nodes: int = 12, tokens: int = 26, **changes) -> DecodingSettings:
    values = {"top_k": 0, "top_p": 1.0, "verify": match, "lossless": True, **changes}
    return DecodingSettings(max_new_tokens=tokens, nodes=nodes, temperature=temperature, **values)


@pytest.fixture(scope="module", params=KINDS)
def base(request):
    return random_base(request.param, context=128)


def autoregression(base, prompt, how, seed=0, stops=frozenset()):
    return generate(base, Autoregressive(base), prompt, how, stops, seed)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_autoregression_equals_transformers_generate(base, prompt):
    how = settings(tokens=40)
    out = base.lm.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=40, do_sample=False,
        eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    assert autoregression(base, prompt, how).tokens == tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_every_drafter_gives_what_autoregression_gives(base, temperature):
    """All drafters over all prompts, twice, so that state left over from one prompt would show in the next."""
    how, heads = settings(temperature), block_heads(base)
    remembering = SuffixDecoding(base, 8, 2.0, 1.0, 0.1, lambda base: (), 99, remember=True)
    for round_ in range(2):
        for number, prompt in enumerate(PROMPTS):
            truth = autoregression(base, prompt, how, seed=number).tokens
            text = torch.cat([prompt, torch.tensor(truth)])
            drafters = [
                oracle_drafter(text, 5),
                random_drafter(base.vocabulary, 12),
                Stutter(text, 4),
                PromptLookup(base, 3, 6),
                PromptLookup(base, 3, 6, prompt_only=True),
                remembering,
                *heads,
            ]
            for drafter in drafters[round_:] + drafters[:round_]:
                generation = generate(base, drafter, prompt, how, frozenset(), number)
                assert generation.tokens == truth, type(drafter).__name__


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafters_that_read_their_own_draft_tokens_too(base, temperature, tmp_path):
    """Each over all prompts, and up to the last position of the context."""
    drafters = [make_sequential_drafter(kind, base, tmp_path) for kind in KINDS_OF_STEPS]
    drafters.append(Merged(base, PromptLookup(base, 3, 4), drafters[-1]))
    for number, prompt in enumerate([*PROMPTS, torch.arange(30, 130)]):
        how = settings(temperature, tokens=30)
        truth = autoregression(base, prompt, how, seed=number).tokens
        for drafter in drafters:
            assert generate(base, drafter, prompt, how, frozenset(), number).tokens == truth, type(drafter).__name__


def test_an_oracle_commits_depth_and_one_in_every_step_but_the_last(base):
    how = settings(tokens=41)
    truth = autoregression(base, PROMPTS[0], how).tokens
    generation = generate(
        base, oracle_drafter(torch.cat([PROMPTS[0], torch.tensor(truth)]), 4), PROMPTS[0], how, frozenset(), 0
    )
    assert [step.committed for step in generation.passes] == [5] * 8  # 41 = 1 of the prefill + 8 steps of 5


def test_random_draft_tokens_are_hardly_ever_accepted(base):
    how = settings(tokens=60)
    generation = generate(base, random_drafter(base.vocabulary, 12), PROMPTS[0], how, frozenset(), 0)
    assert 1.0 <= sum(step.committed for step in generation.passes) / len(generation.passes) < 1.3


def test_repeated_frames_and_blanks_collapse_to_the_text(base):
    """The true text is among the paths, so every step but the last commits as many tokens as an oracle's."""
    how = settings(nodes=64, tokens=41)
    truth = autoregression(base, PROMPTS[1], how).tokens
    generation = generate(
        base, Stutter(torch.cat([PROMPTS[1], torch.tensor(truth)]), 4), PROMPTS[1], how, frozenset(), 0
    )
    assert generation.tokens == truth
    # Equal tokens in the text have a blank between them in the frames, so none is lost.
    assert [step.committed for step in generation.passes] == [5] * 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_up_to_the_last_position_of_the_context(base, temperature):
    """A generation that fills the context exactly; no node may be beyond its last position."""
    prompt = torch.arange(30, 30 + 100)
    how = settings(temperature, tokens=1000)
    truth = autoregression(base, prompt, how)
    assert len(truth.tokens) == base.context_length - len(prompt)
    text = torch.cat([prompt, torch.tensor(truth.tokens)])
    for drafter in (oracle_drafter(text, 7), random_drafter(base.vocabulary, 12), Stutter(text, 4), *block_heads(base)):
        assert generate(base, drafter, prompt, how, frozenset(), 0).tokens == truth.tokens


def test_a_stop_token_inside_a_draft_ends_the_response(base):
    how = settings(tokens=40)
    free = autoregression(base, PROMPTS[0], how).tokens
    for position in (0, 1, 7, 12):
        stops = frozenset([free[position]])
        first = free.index(free[position])
        text = torch.cat([PROMPTS[0], torch.tensor(free)])
        for drafter in (Autoregressive(base), oracle_drafter(text, 6), Stutter(text, 4)):
            generation = generate(base, drafter, PROMPTS[0], how, stops, 0)
            assert generation.tokens == free[: first + 1]
            assert generation.ended
            assert (
                sum(step.committed for step in generation.passes) == first
            )  # the prefill gave one; tokens after the stop do not count


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_very_short_responses(base, tokens):
    how = settings(tokens=tokens)
    truth = autoregression(base, PROMPTS[0], settings(tokens=9)).tokens
    text = torch.cat([PROMPTS[0], torch.tensor(truth)])
    assert generate(base, oracle_drafter(text, 6), PROMPTS[0], how, frozenset(), 0).tokens == truth[:tokens]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_tree_logits_equal_step_logits(base, attention):
    """Every node of a forked tree has the logits of its own text read alone."""
    base.lm.set_attn_implementation(attention)
    prompt = PROMPTS[3]
    paths = torch.tensor([[7, 8, 9], [7, 8, 10], [11, 7, 7]])
    from ctcdraft.decoding.tree import TokenTree

    tree = TokenTree.from_paths(torch.tensor(33), paths, torch.full((3,), 3), limit=64)
    with torch.inference_mode():
        cache = base.new_cache(64)
        base.read(prompt, cache)
        logits = base.read_tree(tree, cache).logits_NV
        for node in range(len(tree)):
            chain = tree.tokens_N[tree.ancestors_NN[node]]
            alone = base.lm(torch.cat([prompt, chain])[None]).logits[0, -1]
            assert torch.allclose(logits[node], alone, atol=2e-4, rtol=1e-4)
    base.lm.set_attn_implementation("sdpa")


def test_the_cache_drops_rejected_rows(base):
    """The next read after keep_path gives the logits of the accepted text."""
    from ctcdraft.decoding.tree import TokenTree

    tree = TokenTree.from_paths(torch.tensor(33), torch.tensor([[7, 8], [9, 10]]), torch.full((2,), 2), limit=9)
    with torch.inference_mode():
        cache = base.new_cache(1)  # the buffers grow on demand
        base.read(PROMPTS[3].repeat(5)[: base.context_length - 30], cache)
        start = cache.length
        base.read_tree(tree, cache)
        path = torch.tensor([0, 3, 4])
        cache.keep_path(start, path)
        assert cache.length == start + 3
        logits = base.read(torch.tensor([60]), cache).logits_NV[0]
        text = torch.cat([PROMPTS[3].repeat(5)[: base.context_length - 30], tree.tokens_N[path], torch.tensor([60])])
        assert torch.allclose(logits, base.lm(text[None]).logits[0, -1], atol=2e-4, rtol=1e-4)


class Oversized:
    """A drafter that exceeds its node and depth limits."""

    def __init__(self, nodes, depth):
        self.shape = (nodes, depth)

    def draft(self, context, memory, rng):
        nodes, depth = self.shape
        paths = torch.arange(nodes * depth).reshape(nodes, depth) + 5
        return TokenTree.from_paths(context.root, paths, torch.full((nodes,), depth), 99), None


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [((30, 1), r"Oversized drafted a tree of nodes 31 where context\.nodes allows 8"), ((1, 5), r"depth 5 where")],
)
def test_a_tree_beyond_its_budget_is_refused(shape, sentence):
    how = replace(settings(tokens=4), nodes=8)
    with pytest.raises(InputError, match=sentence):
        generate(random_base(), Oversized(*shape), PROMPTS[0], how, frozenset(), 0)
