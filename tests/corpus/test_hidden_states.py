"""Stored hidden states: equal to the base model's up to precision, found by content, rebuilt if damaged."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from tiny_models import random_base
from torch.nn.utils.rnn import pad_sequence
from training_parts import make_trainer, random_sequences

from ctcdraft.corpus import shard_filling, shard_folder
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
        files = source.folder.present().values()
        sizes[precision] = sum(PRECISIONS[precision].bytes_per_token(base.width) * len(t) for t in source.tokens)
        header = sum(files) - sizes[precision]
        assert 0 < header < 512 * len(source.tokens)  # names, offsets and the checksum
    assert sizes["float32"] == 2 * sizes["bfloat16"]
    assert sizes["int8"] == sizes["bfloat16"] / 2 + 4 * sum(map(len, random_sequences().tokens))


def test_another_base_taps_or_tokens_do_not_find_the_store(base, tmp_path):
    tokens = random_sequences().tokens
    one = stored(base, tokens, tmp_path)
    assert one.folder.files == stored(base, tokens, tmp_path).folder.files
    others = [
        stored(random_base(context=64, seed=1), tokens, tmp_path),
        stored(base, [t.flip(0) for t in tokens], tmp_path),
        stored(base, tokens, tmp_path, "bfloat16"),
    ]
    for other in others:
        assert not {file.name for file in one.folder.files} & {file.name for file in other.folder.files}
        assert one.folder.path != other.folder.path


def filled(base, tokens, folder, **changes):
    """Return stored hidden states after `precompute`, and the shards that it computed."""
    source, computed = stored(base, tokens, folder, **changes), []
    compute = source.compute_shard
    source.compute_shard = lambda shard: (computed.append(shard), compute(shard))[1]
    source.precompute()
    return source, computed


def test_a_store_serves_a_corpus_in_another_order(base, tmp_path):
    tokens = random_sequences().tokens
    assert filled(base, tokens, tmp_path)[1] == [0, 1, 2]
    turned, computed = filled(base, tokens[::-1], tmp_path)
    assert computed == []
    assert torch.allclose(turned.stored_states([[2]]), compute_hidden_states(base, turned.tokens[2][None]), atol=1e-5)


def test_two_runs_that_start_together_compute_each_shard_once(base, tmp_path):
    """As jobs of a sweep do: the second waits for the first, which waits here for half a second."""
    tokens, computed, began = random_sequences().tokens, [], threading.Event()
    sources = [stored(base, tokens, tmp_path) for _ in range(2)]

    def counting(source, wait):
        compute = source.compute_shard

        def counted(shard):
            computed.append(shard)
            wait()
            return compute(shard)

        source.compute_shard = counted

    def start_second():
        if second.ident is None:
            second.start()
            began.wait(0.5)

    second = threading.Thread(target=sources[1].precompute)
    counting(sources[0], start_second)
    counting(sources[1], began.set)
    sources[0].precompute()
    second.join()
    assert sorted(computed) == [0, 1, 2]
    assert torch.equal(sources[0].row(0), sources[1].row(0))


def test_before_they_are_stored_a_step_computes_them(base, tmp_path):
    source = stored(base, random_sequences().tokens, tmp_path)
    assert source.stored_states([[0]]) is None
    assert not source.folder.path.exists()
    assert "0 of 3 shards are there, the others take about 2.80 hours" in source.describe(255 / 3600 / 2.8)
    source.precompute()
    assert source.stored_states([[0]]).shape == (1, 30, base.width)
    assert source.describe(1.0).endswith("3 of 3 shards are there")


@pytest.mark.parametrize("harm", ["flipped", "cut", "emptied", "lost"])
@pytest.mark.parametrize("marked", [True, False])
def test_a_damaged_shard_is_written_again(base, tmp_path, harm, marked, capsys, monkeypatch):
    if harm != "flipped":  # what has not the size that it had is found without a sample
        monkeypatch.setattr(shard_filling, "SAMPLED_SHARDS", 0)
    tokens = random_sequences().tokens
    source, _ = filled(base, tokens, tmp_path)
    file = source.folder.files[1]
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes({"flipped": bytes(data), "cut": bytes(data[: len(data) // 2])}.get(harm, b""))
    if harm == "lost":
        file.unlink()
    if not marked:
        source.folder.marker.unlink()
    again, computed = filled(base, tokens, tmp_path)
    assert computed == [1]
    assert torch.equal(again.row(again.shard_rows[1][0]), source.row(source.shard_rows[1][0]))
    assert (f"{file} is damaged and is written again" in capsys.readouterr().out) == (harm != "lost")


def test_of_a_complete_store_a_sample_is_compared_and_all_after_a_damage(base, tmp_path, monkeypatch):
    tokens, compared = random_sequences().tokens, []
    source, _ = filled(base, tokens, tmp_path, rows=1)
    intact = shard_folder.is_intact
    monkeypatch.setattr(shard_folder, "is_intact", lambda file: (compared.append(file), intact(file))[1])
    assert filled(base, tokens, tmp_path, rows=1)[1] == []
    assert len({*compared}) == len(compared) == 4
    for file in source.folder.files:
        data = bytearray(file.read_bytes())
        file.write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
    compared.clear()
    assert filled(base, tokens, tmp_path, rows=1)[1] == list(range(10))
    assert {*compared} == {*source.folder.files}


def test_a_shard_lost_while_it_is_read_is_one_sentence(base, tmp_path):
    source, _ = filled(base, random_sequences().tokens, tmp_path)
    source.folder.files[0].unlink()
    with pytest.raises(InputError, match=r"was removed or damaged after this run had begun .*; resume= the run, which"):
        source.row(source.shard_rows[0][0])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_offline_and_online_states_train_alike(base, tmp_path, precision):
    def losses(source, name) -> list[float]:
        one = make_trainer(None, base, steps=8)
        one.batches = Batches(
            random_sequences(), base, rows_per_step=4, anchors=8, labels=3, seed=0, hidden_states=source
        )
        one.batches.hidden_states.precompute()
        return [one.train_step()["loss"] for one.step in range(8)]

    live = losses(OnlineHiddenStates, "live")
    kept = losses(partial(OfflineHiddenStates, path=str(tmp_path), precision=precision, rows=4, limit_gb=1.0), "stored")
    apart = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 2e-2}[precision]
    assert torch.allclose(torch.tensor(live), torch.tensor(kept), rtol=apart)
    assert live != sorted(live)  # the head is trained: the losses are not constant
