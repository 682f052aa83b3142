"""Conversations as rows: turns are joined where a prompt keeps what came before, and no window crosses a response."""

from __future__ import annotations

import random

import pytest
import torch
from test_answer_masks import CASES
from tiny_models import random_base
from truths_corpus import slow_conversation, slow_windows

from ctcdraft.corpus.arrow_files import in_memory
from ctcdraft.corpus.batches import Batches, first_fit_packing
from ctcdraft.corpus.chat_template import keeps_history
from ctcdraft.corpus.lines import count_lines, join_turns, line_keys
from ctcdraft.corpus.token_store import TokenSequences, TokenStore
from ctcdraft.training.validation import split_held_out

LABELS = 3


def conversation(seed: int):
    """Return the turns (prompt, response, ended, cut) of a conversation; some prompts rewrite what came before."""
    rng, turns = random.Random(seed), []
    history: list[int] = []
    for _ in range(rng.randint(1, 5)):
        history = history + rng.choices(range(9), k=rng.randint(1, 4))
        cut = 0
        if rng.random() < 0.2:
            history[rng.randrange(len(history))] = 9
        elif rng.random() < 0.1:
            history, cut = history[1:] + [9], 1
        elif rng.random() < 0.1 and turns:
            history = (turns[-1][0] + turns[-1][1])[: len(history)]
        response = rng.choices(range(9), k=rng.randint(1, 6))
        turns.append((history, response, rng.randint(0, 1), cut))
        history = history + response
    return turns


def turn_lines(turns, name="p", sample=0):
    return [
        {"id": name, "turn": turn, "sample": sample, "category": "test", "tokens": prompt + response,
         "spans": [(len(prompt), len(prompt) + len(response), ended)], "cut": cut, "ids": "generated"}
        for turn, (prompt, response, ended, cut) in enumerate(turns)
    ]  # fmt: skip


def marked(line):
    """Return the tokens of a line with their marks, as in slow_conversation."""
    marks = [None] * len(line["tokens"])
    for turn, (start, end, ended) in enumerate(line["spans"], line["turn"]):
        marks[start:end] = [(turn, ended)] * (end - start)
    return list(zip(line["tokens"], marks, strict=True))


@pytest.mark.parametrize("seed", range(0, 600, 30))
def test_joined_turns_equal_the_slow_twin(seed):
    for number in range(seed, seed + 30):
        turns = conversation(number)
        rows = join_turns(turn_lines(turns))
        assert list(map(marked, rows)) == slow_conversation(turns)
        assert [key for row in rows for key in line_keys(row)] == [("p", 0, turn) for turn in range(len(turns))]
        assert list(rows[0]) == list(turn_lines(turns)[0])  # the order of the keys is that of the bytes


def test_conversations_of_every_kind_are_among_them():
    rows = [join_turns(turn_lines(conversation(seed), str(seed))) for seed in range(600)]
    counts = count_lines([line for one in rows for line in one])
    assert counts["conversations_in_one_row"] == sum(len(one) == 1 for one in rows) > 100
    assert counts["conversations_in_several_rows"] == sum(len(one) > 1 for one in rows) > 100
    assert counts["rows"] == sum(map(len, rows))
    assert counts["answers"] == sum(len(conversation(seed)) for seed in range(600))
    assert sum(len(row["spans"]) > 2 for one in rows for row in one) > 100
    assert any(len(row["spans"]) > 1 and not row["spans"][0][2] for one in rows for row in one)


def test_samples_dropped_turns_and_other_ids_are_not_joined():
    first, second = turn_lines([([1], [2], 1, 0), ([1, 2, 3], [4], 1, 0)])
    assert len(join_turns([first, second])) == 1
    for change in ({"sample": 1}, {"id": "q"}, {"turn": 2}, {"cut": 1}, {"ids": "reencoded"}, {"spans": [(2, 4, 1)]}):
        assert join_turns([first, second | change]) == [first, second | change]
    dropped = {"id": "p", "turn": 1, "sample": 0, "category": "test", "dropped": "nothing was said"}
    assert join_turns([first, dropped, second | {"turn": 2}]) == [first, dropped, second | {"turn": 2}]


@pytest.fixture(scope="module")
def base():
    return random_base(context=64)


@pytest.fixture(scope="module")
def both():
    """Return rows by turn and rows of whole conversations, of the same sixty conversations."""
    talks = [turn_lines(conversation(seed), f"p{seed}") for seed in range(60)]
    return TokenStore(in_memory(talks)), TokenStore(in_memory(map(join_turns, talks)))


def all_windows(batches: Batches, number: int):
    """Return (row, anchor, root, labels) of a batch with every position as an anchor."""
    batch = batches.prepare(number)
    found = []
    for row in range(len(batch["tokens_BL"])):
        windows = zip(*(batch[key][row].tolist() for key in ("anchors_BA", "roots_BA", "labels_BAS")), strict=True)
        found += [(row, anchor, root, [t for t in labels if t >= 0]) for anchor, root, labels in windows]
    return sorted(window for window in found if window[-1])


@pytest.mark.parametrize("size", [30, 200])
@pytest.mark.parametrize("max_length", [11, 1000])
def test_windows_of_packed_conversations_equal_the_slow_twin(base, both, size, max_length):
    rows, _ = split_held_out(both[1], 0, max_length)
    batches = Batches(rows, base, 4, 1000, LABELS, seed=0, packing=first_fit_packing(size))
    compared = 0
    for number in range(len(batches.epoch(0))):
        expected = []
        for row, pack in enumerate(batches.packs(number)):
            begin = 0
            for index in pack:
                line = {"tokens": rows.tokens[index].tolist(), "spans": rows.spans[index], "turn": 0}
                expected += [(row, begin + a, root, s) for a, root, s in slow_windows(marked(line), LABELS)]
                begin += len(line["tokens"])
        assert all_windows(batches, number) == sorted(expected)
        compared += len(expected)
    assert compared > 100


@pytest.mark.parametrize("max_length", [8, 15, 1000])
def test_a_conversation_has_the_windows_of_its_turns(base, both, max_length):
    """The same roots and labels, each behind the same tokens, from fewer tokens."""
    windows, tokens = [], []
    for store in both:
        rows, _ = split_held_out(store, 0, max_length)
        batches = Batches(rows, base, 1, 1000, LABELS, seed=0)
        found = []
        for number in range(len(rows)):
            ((index,),) = batches.packs(number)
            text = rows.tokens[index].tolist()
            found += [(text[: anchor + 2], labels) for _, anchor, _, labels in all_windows(batches, number)]
        windows.append(sorted(found))
        tokens.append(sum(rows.lengths))
    assert windows[0] == windows[1]
    assert len(windows[0]) > 50
    assert tokens[1] < tokens[0]


def test_a_row_ends_with_its_last_response_within_the_length(both):
    rows, _ = split_held_out(both[1], 0, 11)
    assert all(len(tokens) == spans[-1][1] <= 11 for tokens, spans in zip(rows.tokens, rows.spans, strict=True))
    assert any(not ended for spans in rows.spans for *_, ended in spans)


def test_counts_are_those_of_the_spans(both):
    rows = TokenSequences([torch.tensor([5, 6, 7, 8, 7])], [[(1, 2, 1), (4, 5, 1)]])
    assert rows.token_counts(10).nonzero().flatten().tolist() == [6, 7]
    held = split_held_out(both[1], 5, 1000)[1]
    firsts = [row.tokens_L[: row.spans[0][0]].tolist() for row in both[1] if row.turn == 0]
    assert len(held) == 5
    assert all(prompt.tolist() in firsts for prompt in held)


@pytest.mark.parametrize("name", CASES)
def test_templates_that_keep_the_history_are_known_beforehand(name):
    """Llama 2's puts a space before the end token, which its model does not generate."""
    make, end, _ = CASES[name]
    tokenizer = make()
    stops = {tokenizer.convert_tokens_to_ids(end)}
    assert keeps_history(tokenizer, stops) == (name != "llama2_chat")
    assert not keeps_history(tokenizer, {1 << 20})
    if name == "chatml":
        content = "message['content']"
        tokenizer.chat_template = tokenizer.chat_template.replace(content, f"{content}.split('</think>')[-1]")
        assert not keeps_history(tokenizer, stops)  # as that of a model that reasons
    tokenizer.chat_template = None
    assert not keeps_history(tokenizer, stops)
