"""Validation prompts are not trained on, and its tau is that of the evaluation."""

from __future__ import annotations

import torch
from simple_drafters import oracle_drafter
from tiny_models import random_base
from training_parts import DECODING

from ctcdraft.corpus.token_store import Row
from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.training.validation import DecodingValidation, split_held_out


def answer(name: str, turn: int, length: int = 12, ended: bool = True) -> Row:
    tokens = torch.arange(length, dtype=torch.int32) + 10 * sum(map(ord, name)) + turn
    return Row(name, turn, "chat", tokens, [(4, length, ended)])


def test_held_out_prompts_are_not_trained_on_in_any_of_their_turns():
    answers = [answer(f"p{n}", turn) for n in range(9) for turn in range(2)]
    rows, held = split_held_out(answers, prompts=3, max_length=100)
    assert len(rows) == 12
    assert len(held) == 3
    trained = {tuple(tokens.tolist()) for tokens in rows.tokens}
    for prompt in held:
        assert len(prompt) == 4
        assert not any(text[:4] == tuple(prompt.tolist()) for text in trained)


def test_prompts_that_begin_alike_are_held_out_together():
    answers = [answer(f"{first}/{rest}", 0) for first in "Zaku" for rest in range(5)]
    rows, held = split_held_out(answers, prompts=2, max_length=100)
    assert len(held) == 2
    assert len(rows) == 10
    begins = {id_.partition("/")[0] for id_, row in zip([a.id for a in answers], answers, strict=True)
              if any(torch.equal(row.tokens_L.long(), tokens) for tokens in rows.tokens)}  # fmt: skip
    assert len(begins) == 2


def test_cut_and_unfinished_rows_are_marked():
    answers = [answer("a", 0), answer("b", 0, length=30), answer("c", 0, ended=False), answer("d", 0)]
    rows, _ = split_held_out(answers, prompts=0, max_length=20)
    assert [spans[-1] for spans in rows.spans] == [(4, 12, True), (4, 20, False), (4, 12, False), (4, 12, True)]
    assert max(map(len, rows.tokens)) == 20


def test_a_row_that_is_all_prompt_when_cut_is_left_out():
    """It has no window, and would waste a row of a batch."""
    answers = [
        answer("a", 0),
        answer("b", 0, length=5),
        answer("c", 0, length=6),
    ]  # the first four tokens are the prompt
    assert [list(map(len, split_held_out(answers, 0, most)[0].tokens)) for most in (100, 5, 6)] == [[12, 6], [], [6, 6]]


def test_tau_counts_only_tokens_committed_by_verification():
    base = random_base(context=64)
    prompt = torch.arange(10, 16)
    validation = DecodingValidation(base, [prompt], DECODING)
    assert validation.metrics(Autoregressive(base))["tau"] == 1.0  # the token of the prefill does not count
    truth = generate(base, Autoregressive(base), prompt, DECODING, frozenset(), 0).tokens
    assert validation.metrics(oracle_drafter(torch.cat([prompt, torch.tensor(truth)]), 4))["tau"] > 3


def test_alpha_of_an_oracle_is_one_at_every_depth():
    """alpha of depths that no draft reaches is absent."""
    base = random_base(context=64)
    prompt = torch.arange(10, 16)
    truth = generate(base, Autoregressive(base), prompt, DECODING, frozenset(), 0).tokens
    metrics = DecodingValidation(base, [prompt], DECODING).metrics(
        oracle_drafter(torch.cat([prompt, torch.tensor(truth)]), 4)
    )
    assert metrics["alpha/1"] == metrics["alpha/4"] == 1.0
    assert "alpha/5" not in metrics
    assert set(DecodingValidation(base, [prompt], DECODING).metrics(Autoregressive(base))) == {"tau"}
