"""Stored hidden states: equal to the base model's up to precision, found by content, rebuilt if damaged, limited."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from tiny_models import random_base
from torch.nn.utils.rnn import pad_sequence
from training_parts import make_trainer, random_sequences

from ctcdraft.corpus.batches import Batches
from ctcdraft.corpus.hidden_states import PRECISIONS, OfflineHiddenStates, OnlineHiddenStates, compute_hidden_states
from ctcdraft.errors import InputError

# The largest error of a value, as a share of the largest value of its token.
ERRORS = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.5 / 127 + 1e-6}


@pytest.fixture(scope="module")
def base():
    return random_base(context=64)


def stored(base, tokens, folder, precision="float32", rows=4, limit_gb=1.0) -> OfflineHiddenStates:
    return OfflineHiddenStates(base, tokens, str(folder), precision, rows, limit_gb)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_of_any_batch_equal_a_forward_pass(base, tmp_path, precision):
    tokens = random_sequences().tokens
    source = stored(base, tokens, tmp_path, precision)
    source.precompute()
    for indices in ([0, 1, 2, 3], [9, 0, 5], [7]):
        live = compute_hidden_states(base, pad_sequence([tokens[index] for index in indices], batch_first=True))
        kept = source.stored_states([[index] for index in indices])
        assert kept.shape == live.shape
        for row, index in enumerate(indices):
            ours, theirs = kept[row, : len(tokens[index])], live[row, : len(tokens[index])]
            largest = theirs.abs().amax(dim=-1, keepdim=True)
            assert ((ours - theirs).abs() <= ERRORS[precision] * largest + 2e-5).all()


def test_int8_takes_about_half_of_bfloat16_as_described(base, tmp_path):
    sizes = {}
    for precision in PRECISIONS:
        source = stored(base, random_sequences().tokens, tmp_path / precision, precision)
        source.precompute()
        files = [file.stat().st_size for file in (tmp_path / precision).iterdir()]
        sizes[precision] = sum(PRECISIONS[precision].bytes_per_token(base.width) * len(t) for t in source.tokens)
        header = sum(files) - sizes[precision]
        assert 0 < header < 512 * len(source.tokens)  # names, offsets and the checksum
    assert sizes["float32"] == 2 * sizes["bfloat16"]
    assert sizes["int8"] == sizes["bfloat16"] / 2 + 4 * sum(map(len, random_sequences().tokens))


def test_another_base_taps_or_tokens_do_not_find_the_store(base, tmp_path):
    tokens = random_sequences().tokens
    one = stored(base, tokens, tmp_path)
    assert one.files == stored(base, tokens, tmp_path).files
    others = [
        stored(random_base(context=64, seed=1), tokens, tmp_path),
        stored(base, [t.flip(0) for t in tokens], tmp_path),
        stored(base, tokens, tmp_path, "bfloat16"),
    ]
    for other in others:
        assert not set(one.files) & set(other.files)


def test_a_shared_shard_serves_a_corpus_in_another_order(base, tmp_path):
    tokens = random_sequences().tokens
    stored(base, tokens, tmp_path).precompute()
    turned = stored(base, tokens[::-1], tmp_path)
    assert all(file.exists() for file in turned.files)
    assert torch.allclose(turned.stored_states([[2]]), compute_hidden_states(base, turned.tokens[2][None]), atol=1e-5)


@pytest.mark.parametrize("harm", ["flipped", "cut", "emptied"])
def test_a_damaged_shard_is_reported_and_written_again(base, tmp_path, harm, capsys):
    tokens = random_sequences().tokens
    stored(base, tokens, tmp_path).precompute()
    source = stored(base, tokens, tmp_path)
    file = source.files[1]
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes({"flipped": bytes(data), "cut": bytes(data[: len(data) // 2]), "emptied": b""}[harm])
    index = source.shard_rows[1][0]
    assert torch.allclose(source.stored_states([[index]]), compute_hidden_states(base, tokens[index][None]), atol=1e-5)
    assert f"{file} is damaged and is written again" in capsys.readouterr().out


def test_the_least_recently_used_shard_is_evicted_first(base, tmp_path):
    tokens = random_sequences(12, length=30).tokens
    every = stored(base, tokens, tmp_path)
    every.precompute()
    sizes = [file.stat().st_size for file in every.files]
    for age, file in enumerate(every.files):  # the last shard is the least recently used
        os.utime(file, (1_000_000 - age, 1_000_000 - age))
    every.files[0].unlink()
    small = stored(base, tokens, tmp_path, limit_gb=sum(sizes[:-1]) / 1e9)
    small.stored_states([[small.shard_rows[0][0]]])
    assert [file.exists() for file in every.files] == [True] * (len(sizes) - 1) + [False]
    evicted = small.shard_rows[-1][0]
    assert torch.allclose(
        small.stored_states([[evicted]]), compute_hidden_states(base, tokens[evicted][None]), atol=1e-5
    )
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= small.limit


def test_a_shard_evicted_by_another_run_is_written_again(base, tmp_path):
    tokens = random_sequences().tokens
    source = stored(base, tokens, tmp_path)
    source.precompute()
    for file in source.files:
        file.unlink()
    assert torch.allclose(source.stored_states([[3]]), compute_hidden_states(base, tokens[3][None]), atol=1e-5)


def test_a_store_too_small_for_a_shard_is_refused(base, tmp_path):
    with pytest.raises(InputError, match=r"states\.precision must be one of float32, bfloat16, int8, got int4"):
        stored(base, random_sequences().tokens, tmp_path, "int4")
    with pytest.raises(InputError, match="not enough for one shard"):
        stored(base, random_sequences().tokens, tmp_path, limit_gb=1e-9).precompute()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_offline_and_online_states_train_alike(base, tmp_path, precision):
    def losses(source, name) -> list[float]:
        one = make_trainer(None, base, steps=8)
        one.batches = Batches(
            random_sequences(), base, rows_per_step=4, anchors=8, labels=3, seed=0, hidden_states=source
        )
        return [one.train_step()["loss"] for one.step in range(8)]

    live = losses(OnlineHiddenStates, "live")
    kept = losses(partial(OfflineHiddenStates, path=str(tmp_path), precision=precision, rows=4, limit_gb=1.0), "stored")
    apart = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 2e-2}[precision]
    assert torch.allclose(torch.tensor(live), torch.tensor(kept), rtol=apart)
    assert live != sorted(live)  # the head is trained: the losses are not constant
