"""Packing: every response once per epoch, packs within their size, batches a function of seed and step."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_models import random_base
from training_parts import random_sequences
from truths_corpus import slow_packs

from ctcdraft.corpus.batches import Batches, first_fit, first_fit_packing, one_per_row


def shuffled(count, seed):
    rng = random.Random(seed)
    return rng.sample(range(count), count), [rng.randint(1, 40) for _ in range(count)]


def test_the_example_of_the_docstring():
    assert first_fit([0, 1, 2, 3], [6, 5, 4, 5], 10) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_first_fit_equals_its_slow_twin(seed):
    order, lengths = shuffled(200, seed)
    assert first_fit(order, lengths, 60, most_open=200) == slow_packs(order, lengths, 60)


@pytest.mark.parametrize("most_open", [1, 4, 64])
def test_packs_keep_to_their_size_and_hold_every_response_once(most_open):
    order, lengths = shuffled(300, 7)
    packs = first_fit(order, lengths, 30, most_open)
    assert sorted(i for pack in packs for i in pack) == list(range(300))
    for pack in packs:
        assert sum(lengths[i] for i in pack) <= 30 or len(pack) == 1
    assert any(len(pack) == 1 and lengths[pack[0]] > 30 for pack in packs)  # longer than the size of a pack
    assert len(packs) < 0.9 * 300


@pytest.fixture(scope="module")
def base():
    return random_base(context=64)


def batches(base, packing, rows_per_step=2, seed=0):
    return Batches(random_sequences(), base, rows_per_step, anchors=8, labels=3, seed=seed, packing=packing)


def test_every_response_exactly_once_per_epoch(base):
    packed, step, orders = batches(base, first_fit_packing(53), rows_per_step=1), 0, []
    for epoch in range(6):
        steps = len(packed.epoch(epoch))
        seen = [i for at in range(step, step + steps) for pack in packed.packs(at) for i in pack]
        assert sorted(seen) == list(range(10))
        orders.append(seen)
        step += steps
    assert len(set(map(tuple, orders))) == 6  # a new order every time
    assert len({len(packed.epoch(epoch)) for epoch in range(6)}) > 1  # and the number of steps varies


def test_unpacked_rows_are_those_of_a_permutation(base):
    """Without packing a batch is a slice of the permutation seeded by (seed, epoch)."""
    packed = batches(base, one_per_row, rows_per_step=4, seed=3)
    for step in range(6):
        epoch, number = divmod(step, 2)
        rng = torch.Generator().manual_seed((3 * 1_000_003 + epoch) * 2)
        chosen = torch.randperm(10, generator=rng).tolist()[4 * number : 4 * number + 4]
        assert packed.packs(step) == [[index] for index in chosen]
        batch = packed.batch(step)
        for row, index in enumerate(chosen):
            tokens = packed.rows.tokens[index]
            assert torch.equal(batch.tokens_BL[row, : len(tokens)], tokens)
        assert torch.equal(batch.position_ids_BL[0], torch.arange(batch.tokens_BL.shape[1]))


def test_a_batch_depends_on_seed_and_step_alone(base):
    whole, backwards = batches(base, first_fit_packing(60)), batches(base, first_fit_packing(60))
    expected = [whole.batch(step) for step in range(14)]
    for step in reversed(range(14)):
        for name, value in vars(backwards.batch(step)).items():
            assert torch.equal(value, getattr(expected[step], name)), (step, name)
    other = batches(base, first_fit_packing(60), seed=1)
    assert [other.packs(step) for step in range(14)] != [whole.packs(step) for step in range(14)]


def test_describe_counts_responses_tokens_and_padding(base):
    """Ten responses of 30 down to 21 tokens, in steps of five, padded to the longest of the step."""
    lengths = [30 - i for i in range(10)]
    packed = batches(base, one_per_row, rows_per_step=5)
    held = sum(5 * max(lengths[i] for (i,) in packs) for packs in packed.epoch(0))
    assert packed.describe() == f"1.0 answers and 26 tokens per row, {1 - sum(lengths) / held:.1%} padding"
    assert batches(base, first_fit_packing(1000)).describe() == "10.0 answers and 255 tokens per row, 0.0% padding"
