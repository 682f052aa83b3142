"""Rows of the token store equal the rows that were put in."""

import random

import pytest
import torch

from ctcdraft.corpus.token_store import TensorColumn, TokenStore, row_from_line
from ctcdraft.errors import InputError


def some_lines(count=20):
    rng = random.Random(0)
    for number in range(count):
        length = rng.randrange(0 if number == 3 else 2, 30)
        yield {
            "id": f"p{number // 2}", "turn": number % 2, "sample": number % 3, "category": rng.choice(["a", "b", 3]),
            "tokens": rng.choices(range(50_000), k=length), "mask": rng.choices((0, 1), k=length),
            "ended": rng.random() < 0.5, "cut": 0, "ids": "generated",
        }  # fmt: skip


def same(one, other):
    names = ("id", "turn", "sample", "category", "ended")
    tensors = ("tokens_L", "mask_L")
    return all(getattr(one, name) == getattr(other, name) for name in names) and all(
        torch.equal(getattr(one, name), getattr(other, name)) and getattr(one, name).dtype == getattr(other, name).dtype
        for name in tensors
    )


def test_stored_rows_equal_the_rows_of_their_lines():
    held, alone = TokenStore(some_lines()), [row_from_line(line) for line in some_lines()]
    assert len(held) == len(alone) == 20
    assert all(same(one, other) for one, other in zip(held, alone, strict=True))
    assert same(held[-1], alone[-1])
    assert [one.id for one in held[4:9:2]] == [one.id for one in alone[4:9:2]]
    with pytest.raises(IndexError):
        held[20]


def test_a_store_without_rows_is_empty():
    assert list(TokenStore([])) == []


def test_a_column_has_the_tensors_of_the_kept_rows():
    held = TokenStore(some_lines())
    column = TensorColumn(held, [7, 2], lambda one: one.tokens_L[:3].long())
    assert [tokens.tolist() for tokens in column] == [held[index].tokens_L[:3].tolist() for index in (7, 2)]
    assert column[0].dtype == torch.int64
    assert len(column[:1]) == 1


def test_a_mask_of_another_length_is_one_sentence():
    line = next(some_lines()) | {"mask": [1]}
    with pytest.raises(InputError, match=r"the answer mask of p0 has 1 entries for \d+ tokens; prepare"):
        TokenStore([line])
