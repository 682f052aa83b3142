"""What stored hidden states take of the disk, and what is removed for new ones."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_hidden_states import base, filled, stored  # noqa: F401
from tiny_models import random_lm, tiny_tokenizer
from training_parts import random_sequences

from ctcdraft.corpus import shard_folder
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM


def test_files_that_other_processes_remove_are_not_counted(tmp_path, monkeypatch):
    """Between the listing of a folder and the reading of a size, a probe and a shard disappear."""
    folder = shard_folder.ShardFolder(tmp_path / "states", ["first", "second"])
    folder.hold()
    for file in folder.files:
        file.write_bytes(b"1234")
    (folder.path / "probe.partial").touch()
    listed = Path.iterdir

    def listed_before(path):
        files = [*listed(path)]
        for name in ("probe.partial", "first.safetensors"):
            (path / name).unlink()
        return iter(files)

    monkeypatch.setattr(Path, "iterdir", listed_before)
    assert folder.present() == {1: 4}


def test_the_store_used_longest_ago_is_removed_first_and_none_in_use(base, tmp_path):  # noqa: F811
    sequences = [random_sequences(12, length=30 + more).tokens for more in range(4)]
    one, two, three = (filled(base, tokens, tmp_path)[0] for tokens in sequences[:3])
    os.utime(two.folder.lock, (1, 1))
    (tmp_path / "mine.safetensors").write_bytes(b"x" * 10)  # no shard: it stays
    old = tmp_path / f"{'0' * 24}.safetensors"  # of a version without folders
    old.write_bytes(b"x" * 1000)
    os.utime(old, (0, 0))
    size = sum(sum(source.folder.present().values()) for source in (one, two, three))
    limit = size / 3 * 3.3 / 1e9
    with pytest.raises(InputError, match=r"do not fit into .*kB of hidden_states.limit_gb=.* are used by other runs"):
        filled(base, sequences[3], tmp_path, limit_gb=limit)
    assert not old.exists()
    two.folder.release()  # its run ends
    one.folder.release()
    filled(base, sequences[3], tmp_path, limit_gb=limit)
    assert [source.folder.path.exists() for source in (one, two, three)] == [True, False, True]
    assert (tmp_path / "mine.safetensors").exists()


def test_a_store_of_an_older_version_is_found_by_the_same_base(base, tmp_path):  # noqa: F811
    """Its name does not depend on rotary frequencies; that of a new one does."""
    tokens, rotary = random_sequences(12).tokens, base.rotary
    base.rotary = []
    old = filled(base, tokens, tmp_path / "old")[0].folder.path
    base.rotary = rotary
    assert filled(base, tokens, tmp_path / "old")[0].folder.path == old
    new = filled(base, tokens, tmp_path / "new")[0].folder.path
    base.rotary = [[8, -1.0, 1.0]]
    other = filled(base, tokens, tmp_path / "new")[0].folder.path
    base.rotary = rotary
    assert len({old.name, new.name, other.name}) == 3


def test_a_store_that_the_disk_has_no_room_for_is_refused(base, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(shard_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"32\.6 kB of hidden states do not fit into .*, 1\.0 kB of the disk are free"):
        filled(base, random_sequences().tokens, tmp_path)
    monkeypatch.setattr(shard_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=33_000))
    assert filled(base, random_sequences().tokens, tmp_path)[1] == [0, 1, 2]


def test_a_store_above_the_limit_is_refused_with_the_ways_out(tmp_path):
    two_layers = BaseLM(random_lm(context=64), tiny_tokenizer(), "two layers", aux_layers=["last", 1])
    tokens = random_sequences().tokens  # 255 tokens of 2 x 32 values
    with pytest.raises(InputError, match=r"states\.precision must be one of float32, bfloat16, int8, got int4"):
        stored(two_layers, tokens, tmp_path, "int4")
    with pytest.raises(InputError) as refused:
        stored(two_layers, tokens, tmp_path, "bfloat16", limit_gb=2e-5)
    assert str(refused.value) == (
        "hidden_states=offline would store 32.6 kB (255 tokens x 2 x 32 values as bfloat16), more than "
        "hidden_states.limit_gb=2e-05; give hidden_states=online (0 bytes), hidden_states.precision=int8 (17.3 kB), "
        "base.aux_layers=[last] (16.3 kB), at most 6 of the 10 conversations (corpus.limit=), or a higher limit"
    )
    stored(two_layers, tokens, tmp_path, "bfloat16", limit_gb=3.265e-5)
