"""Validation prompts are not trained on, and its tau is that of the evaluation."""

from __future__ import annotations

import torch
from simple_drafters import oracle_drafter
from thread_processes import run_threads
from tiny_models import random_base
from training_parts import DECODING

from ctcdraft.corpus.token_store import Row
from ctcdraft.corpus.types import prompt_id
from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.training import validation
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
    answers = [answer(prompt_id([first, str(rest)]), 0) for first in "Zaku" for rest in range(5)]
    rows, held = split_held_out(answers, prompts=2, max_length=100)
    assert len(held) == 2
    assert len(rows) == 10
    begins = {id_.partition("/")[0] for id_, row in zip([a.id for a in answers], answers, strict=True)
              if any(torch.equal(row.tokens_L.long(), tokens) for tokens in rows.tokens)}  # fmt: skip
    assert len(begins) == 2


def test_given_ids_with_a_slash_are_prompts_of_their_own():
    rows, held = split_held_out([answer(f"math/{n}", 0) for n in range(20)], prompts=3, max_length=100)
    assert (len(rows), len(held)) == (17, 3)


def test_cut_and_unfinished_rows_are_marked():
    answers = [answer("a", 0), answer("b", 0, length=30), answer("c", 0, ended=False), answer("d", 0)]
    rows, _ = split_held_out(answers, prompts=0, max_length=20)
    assert [spans[-1] for spans in rows.spans] == [(4, 12, True), (4, 20, False), (4, 12, False), (4, 12, True)]
    assert max(map(len, rows.tokens)) == 20
    assert rows.beyond == 0


def test_a_row_that_is_all_prompt_when_cut_is_left_out():
    """It has no window, and would waste a row of a batch."""
    answers = [
        answer("a", 0),
        answer("b", 0, length=5),
        answer("c", 0, length=6),
    ]  # the first four tokens are the prompt
    assert [list(map(len, split_held_out(answers, 0, most)[0].tokens)) for most in (100, 5, 6)] == [[12, 6], [], [6, 6]]


def test_responses_beyond_the_longest_row_are_counted():
    """Of a conversation of three responses the last one begins too late, of the second conversation both."""
    talks = [Row("a", 0, "chat", torch.arange(30), [(4, 8, 1), (10, 14, 1), (20, 30, 1)]),
             Row("b", 0, "chat", torch.arange(40), [(25, 30, 1), (32, 40, 1)])]  # fmt: skip
    rows, _ = split_held_out(talks, prompts=0, max_length=20)
    assert [len(tokens) for tokens in rows.tokens] == [14]
    assert rows.beyond == 3


def test_tau_counts_only_tokens_committed_by_verification():
    base = random_base(context=64)
    prompt = torch.arange(10, 16)
    held_out = DecodingValidation(base, [prompt], DECODING)
    assert held_out.metrics(Autoregressive(base))["tau"] == 1.0  # the token of the prefill does not count
    truth = generate(base, Autoregressive(base), prompt, DECODING, frozenset(), 0).tokens
    assert held_out.metrics(oracle_drafter(torch.cat([prompt, torch.tensor(truth)]), 4))["tau"] > 3


def test_processes_decode_each_prompt_once_and_all_report_what_one_reports(monkeypatch):
    base, decoded = random_base(context=64), []
    prompts = [torch.arange(10 + n, 16 + n) for n in range(5)]
    truth = generate(base, Autoregressive(base), prompts[0], DECODING, frozenset(), 0).tokens
    drafter = oracle_drafter(torch.cat([prompts[0], torch.tensor(truth)]), 4)  # of the first prompt alone
    alone = DecodingValidation(base, prompts, DECODING).metrics(drafter)
    monkeypatch.setattr(validation, "generate", lambda *args: decoded.append(args[-1]) or generate(*args))
    shared = run_threads(lambda one: DecodingValidation(base, prompts, DECODING, one).metrics(drafter), range(3))
    assert sorted(decoded) == [0, 1, 2, 3, 4]
    assert shared == [alone] * 3
    assert alone["tau"] > 1


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
