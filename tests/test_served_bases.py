"""The architectures of docs/served_bases.md: each is decoded token for token, or refused with its reason."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from drafters import oracle_drafter, random_drafter
from served_parts import CONTEXT, REFUSED, SERVED, WINDOW, tiny_checkpoint
from stepwise_parts import make_sequential_drafter
from training_parts import DECODING

from ctcdraft.corpus.generation.transformers import generate_batch
from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import load_base
from ctcdraft.nn.sliding import SlidingWindow, keep_last_visible

PAGE = Path(__file__).parents[1] / "docs" / "served_bases.md"
PROMPT = (torch.arange(CONTEXT - 24) * 37) % 250 + 5
EVERYTHING = replace(DECODING, max_new_tokens=10_000, nodes=16)  # to the last position of the context
SLIDING = [
    ("mistral", {"sliding_window": WINDOW}),
    ("gemma3_text", {"sliding_window": WINDOW, "num_hidden_layers": 6}),
]


def stock(base, prompt, tokens):
    """The ids of transformers' own generate."""
    out = base.lm.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return tuple(out[0, len(prompt) :].tolist())


def decoded(base, drafter):
    return generate(base, drafter, PROMPT, EVERYTHING, frozenset(), 1).tokens


def assert_packs_read_alone(base):
    """Two texts in one row, each longer than the window, have the states of each in a row of its own."""
    texts = PROMPT[:30], PROMPT[30:65]
    places = torch.cat([torch.arange(len(text)) for text in texts])[None]
    packed = base.hidden_states(torch.cat(texts)[None], torch.ones_like(places), places)[0]
    alone = torch.cat([base.hidden_states(text[None], torch.ones_like(text[None]))[0] for text in texts])
    torch.testing.assert_close(packed, alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("row", SERVED)
def test_served(tmp_path, row):
    folder, attention = tiny_checkpoint(tmp_path, *SERVED[row])
    base = load_base(folder, "float32", "cpu", attention=attention)
    truth = stock(base, PROMPT, 24)
    assert len(set(truth)) > 4  # a model that repeats one token would agree with anything
    text = torch.cat([PROMPT, torch.tensor(truth)])
    for drafter in (Autoregressive(base), oracle_drafter(text, 6), random_drafter(base.vocabulary, 12)):
        assert decoded(base, drafter) == truth, type(drafter).__name__
    assert_packs_read_alone(base)


@pytest.mark.parametrize("row", REFUSED)
def test_refused(tmp_path, row):
    kind, changes, reason = REFUSED[row]
    folder, attention = tiny_checkpoint(tmp_path, kind, changes)
    with pytest.raises(InputError, match=reason):
        load_base(folder, "float32", "cpu", attention=attention)


def test_the_page_lists_what_is_tested():
    served, refused = PAGE.read_text().split("## Refused")
    rows = [re.findall(r"^\| ([^|]+?) +\|", part, flags=re.MULTILINE) for part in (served, refused)]
    assert rows == [["Architecture", *SERVED], ["Architecture", *REFUSED]]


@pytest.mark.parametrize("window", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_a_window_as_long_as_the_context_hides_nothing(tmp_path, window):
    """At the last position of the context a window one shorter hides the first token, and no other one does."""
    config = transformers.MistralConfig(sliding_window=window, max_position_embeddings=CONTEXT)
    assert (SlidingWindow.of(config, CONTEXT) is None) == (window >= CONTEXT)
    assert SlidingWindow.of(config, CONTEXT - 1) is None  # base.context_length= counts, not the config's
    folder, _ = tiny_checkpoint(tmp_path, "mistral", {"sliding_window": window})
    base = load_base(folder, "float32", "cpu")
    full = tiny_checkpoint(tmp_path / "full", "mistral", {})[0]
    whole = load_base(full, "float32", "cpu")
    whole.lm.config.sliding_window = None
    tokens = torch.cat([PROMPT, PROMPT[:24]])[None]
    ours, theirs = (each.hidden_states(tokens, torch.ones_like(tokens))[0] for each in (base, whole))
    assert torch.equal(ours[:-1], theirs[:-1])
    assert torch.equal(ours[-1], theirs[-1]) == (window >= CONTEXT)


def test_a_window_is_counted_among_what_is_seen():
    least = torch.finfo(torch.float32).min
    mask = torch.tensor([[0, 0, least, 0, 0], [0, least, least, least, 0], [least, least, 0, least, least]])
    seen = [[0, 0, 0, 1, 1], [1, 0, 0, 0, 1], [0, 0, 1, 0, 0]]
    assert (keep_last_visible(mask, 2) == 0).int().tolist() == seen


@pytest.mark.parametrize(("kind", "changes"), SLIDING, ids=["one mask", "a mask for each layer type"])
def test_sliding_windows_wherever_masks_are_made(tmp_path, kind, changes):
    """Fixed reads, answers in left-padded batches, and a draft model that reads its own guesses beside the text."""
    folder, _ = tiny_checkpoint(tmp_path / "base", kind, changes)
    base = load_base(folder, "float32", "cpu", fixed=True)
    truth = stock(base, PROMPT, 24)
    assert decoded(base, random_drafter(base.vocabulary, 12)) == truth
    prompts = [PROMPT, PROMPT[:40], PROMPT[7:60]]
    said = generate_batch(
        base, [prompt.tolist() for prompt in prompts], [12] * 3, lambda logits, rows, step: logits.argmax(-1)
    )
    for prompt, answer in zip(prompts, said, strict=True):
        expected = stock(base, prompt, 12)
        ends = [at + 1 for at, token in enumerate(expected) if token in base.stop_token_ids]
        assert tuple(answer) == expected[: ends[0] if ends else 12]
    own = DraftModel(base, folder, None, 5, DynamicTree(width=1, words=1)).eval()
    drafts = generate(base, own, PROMPT, EVERYTHING, frozenset(), 1)
    assert drafts.tokens == truth
    # As its own draft model the base always guesses right: the passes are those of an oracle of the same depth.
    oracle = generate(
        base, oracle_drafter(torch.cat([PROMPT, torch.tensor(truth)]), 5), PROMPT, EVERYTHING, frozenset(), 1
    )
    assert len(drafts.passes) == len(oracle.passes)
    assert decoded(base, make_sequential_drafter("hydra", base, tmp_path)) == truth


def test_a_window_laid_out_wrongly_is_refused(tmp_path, monkeypatch):
    """The check of trees reads a text longer than the window, so a window of one token more is found out."""
    folder, _ = tiny_checkpoint(tmp_path, *SLIDING[0])
    right = SlidingWindow.of

    def longer(config, context_length):
        found = right(config, context_length)
        return SlidingWindow(found.window + 1, found.layer_types)

    monkeypatch.setattr("ctcdraft.models.base_model.SlidingWindow.of", longer)
    with pytest.raises(InputError, match="computes other logits"):
        load_base(folder, "float32", "cpu")


def test_a_capped_head_is_refused_in_half_precision_too(tmp_path):
    """A cap moves the logits of a random model less than bfloat16 rounds them; the config says it all the same."""
    config = transformers.Gemma2Config(hidden_size=32, num_hidden_layers=1)
    with pytest.raises(InputError, match=r"final_logit_softcapping=30\.0"):
        BaseLM(type("Model", (), {"config": config})(), None, "gemma")
