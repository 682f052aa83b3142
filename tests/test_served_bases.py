"""The architectures of docs/served_bases.md: decoding is lossless, or the base is refused with the reason."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from sequential_parts import make_sequential_drafter
from served_parts import CONTEXT, REFUSED, SERVED, WINDOW, tiny_checkpoint
from simple_drafters import oracle_drafter, random_drafter
from training_parts import DECODING

from ctcdraft.corpus.generation.transformers import generate_batch
from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import load_base
from ctcdraft.nn.masks import SlidingWindow, keep_last_visible

PAGE = Path(__file__).parents[1] / "docs" / "served_bases.md"
PROMPT = (torch.arange(CONTEXT - 24) * 37) % 250 + 5
EVERYTHING = replace(DECODING, max_new_tokens=10_000, nodes=16)  # to the last position of the context
SLIDING = [
    ("mistral", {"sliding_window": WINDOW}),
    ("gemma3_text", {"sliding_window": WINDOW, "num_hidden_layers": 6}),
]


def stock(base, prompt, tokens):
    """Return the tokens of greedy `generate` of transformers."""
    out = base.lm.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return tuple(out[0, len(prompt) :].tolist())


def decoded(base, drafter):
    return generate(base, drafter, PROMPT, EVERYTHING, frozenset(), 1).tokens


def assert_packed_equals_alone(base):
    """Two packed texts, each longer than the window, have the same hidden states as alone."""
    texts = PROMPT[:30], PROMPT[30:65]
    position_ids = torch.cat([torch.arange(len(text)) for text in texts])[None]
    packed = base.hidden_states(torch.cat(texts)[None], torch.ones_like(position_ids), position_ids)[0]
    alone = torch.cat([base.hidden_states(text[None], torch.ones_like(text[None]))[0] for text in texts])
    torch.testing.assert_close(packed, alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("row", SERVED)
def test_served(tmp_path, row):
    folder, attention = tiny_checkpoint(tmp_path, *SERVED[row])
    base = load_base(folder, "float32", "cpu", attention=attention)
    expected_tokens = stock(base, PROMPT, 24)
    assert len(set(expected_tokens)) > 4  # a model that repeats one token would agree with anything
    text = torch.cat([PROMPT, torch.tensor(expected_tokens)])
    for drafter in (Autoregressive(base), oracle_drafter(text, 6), random_drafter(base.vocabulary, 12)):
        assert decoded(base, drafter) == expected_tokens, type(drafter).__name__
    assert_packed_equals_alone(base)


@pytest.mark.parametrize("row", REFUSED)
def test_refused(tmp_path, row):
    kind, changes, reason = REFUSED[row]
    folder, attention = tiny_checkpoint(tmp_path, kind, changes)
    with pytest.raises(InputError, match=reason):
        load_base(folder, "float32", "cpu", attention=attention)


def test_the_page_lists_the_tested_architectures():
    served, refused = PAGE.read_text().split("## Refused")
    rows = [re.findall(r"^\| ([^|]+?) +\|", part, flags=re.MULTILINE) for part in (served, refused)]
    assert rows == [["Architecture", *SERVED], ["Architecture", *REFUSED]]


@pytest.mark.parametrize("window", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_a_window_as_long_as_the_context_hides_nothing(tmp_path, window):
    """A window one token shorter than the context hides the first token at the last position only."""
    config = transformers.MistralConfig(sliding_window=window, max_position_embeddings=CONTEXT)
    assert (SlidingWindow.of(config, CONTEXT) is None) == (window >= CONTEXT)
    assert SlidingWindow.of(config, CONTEXT - 1) is None  # base.context_length= decides, not the config
    folder, _ = tiny_checkpoint(tmp_path, "mistral", {"sliding_window": window})
    base = load_base(folder, "float32", "cpu")
    full = tiny_checkpoint(tmp_path / "full", "mistral", {})[0]
    unwindowed = load_base(full, "float32", "cpu")
    unwindowed.lm.config.sliding_window = None
    tokens = torch.cat([PROMPT, PROMPT[:24]])[None]
    states, full_states = (each.hidden_states(tokens, torch.ones_like(tokens))[0] for each in (base, unwindowed))
    assert torch.equal(states[:-1], full_states[:-1])
    assert torch.equal(states[-1], full_states[-1]) == (window >= CONTEXT)


def test_a_window_counts_visible_tokens_only():
    least = torch.finfo(torch.float32).min
    mask = torch.tensor([[0, 0, least, 0, 0], [0, least, least, least, 0], [least, least, 0, least, least]])
    visible = [[0, 0, 0, 1, 1], [1, 0, 0, 0, 1], [0, 0, 1, 0, 0]]
    assert (keep_last_visible(mask, 2) == 0).int().tolist() == visible


@pytest.mark.parametrize(("kind", "changes"), SLIDING, ids=["one mask", "a mask for each layer type"])
def test_sliding_windows_in_every_mask(tmp_path, kind, changes):
    """Static shapes, left-padded batches, and a draft model that grows a tree level by level."""
    folder, _ = tiny_checkpoint(tmp_path / "base", kind, changes)
    base = load_base(folder, "float32", "cpu", static_shapes=True)
    expected_tokens = stock(base, PROMPT, 24)
    assert decoded(base, random_drafter(base.vocabulary, 12)) == expected_tokens
    prompts = [PROMPT, PROMPT[:40], PROMPT[7:60]]
    responses = generate_batch(
        base, [prompt.tolist() for prompt in prompts], [12] * 3, lambda logits, rows, step: logits.argmax(-1)
    )
    for prompt, tokens in zip(prompts, responses, strict=True):
        expected = stock(base, prompt, 12)
        ends = [at + 1 for at, token in enumerate(expected) if token in base.stop_token_ids]
        assert tuple(tokens) == expected[: ends[0] if ends else 12]
    draft_model = DraftModel(base, folder, None, 5, DynamicTree(width=1, children=1)).eval()
    drafts = generate(base, draft_model, PROMPT, EVERYTHING, frozenset(), 1)
    assert drafts.tokens == expected_tokens
    # As its own draft model the base drafts correctly: as many forward passes as an oracle of the same depth.
    oracle = generate(
        base, oracle_drafter(torch.cat([PROMPT, torch.tensor(expected_tokens)]), 5), PROMPT, EVERYTHING, frozenset(), 1
    )
    assert len(drafts.passes) == len(oracle.passes)
    assert decoded(base, make_sequential_drafter("hydra", base, tmp_path)) == expected_tokens


def test_a_wrong_window_is_refused(tmp_path, monkeypatch):
    """The tree check reads a text longer than the window, so a window one token too long is detected."""
    folder, _ = tiny_checkpoint(tmp_path, *SLIDING[0])
    original = SlidingWindow.of

    def longer(config, context_length):
        window = original(config, context_length)
        return SlidingWindow(window.window + 1, window.layer_types)

    monkeypatch.setattr("ctcdraft.models.base_model.SlidingWindow.of", longer)
    with pytest.raises(InputError, match="computes other logits"):
        load_base(folder, "float32", "cpu")


def test_a_capped_head_is_refused_in_half_precision_too(tmp_path):
    """A soft cap changes the logits of a random model less than bfloat16 rounding; the config shows it."""
    config = transformers.Gemma2Config(hidden_size=32, num_hidden_layers=1)
    with pytest.raises(InputError, match=r"final_logit_softcapping=30\.0"):
        BaseLM(type("Model", (), {"config": config})(), None, "gemma")
