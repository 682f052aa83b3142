"""A prepared corpus and the settings it was made with: what is accepted, refused and discarded."""

import json

import pytest
from test_prepared import PROMPTS, SAMPLED, TURNS, base, prepare, prepare_until  # noqa: F401
from tiny_models import random_base

from ctcdraft.corpus import part_files, prepared
from ctcdraft.errors import InputError


def test_another_base_is_refused_by_name(base, tmp_path):  # noqa: F811
    prepare(base, tmp_path)
    other = random_base(seed=1)
    other.name = "another-llama"
    sentence = "holds answers of random-llama, but this run's base is another-llama .another weights.; run"
    with pytest.raises(InputError, match=sentence):
        prepared.read_corpus(tmp_path, other.fingerprint())
    with pytest.raises(InputError, match=sentence):
        prepare(other, tmp_path)
    other = random_base()
    other.tokenizer.chat_template += " "
    with pytest.raises(InputError, match="another chat template"):
        prepared.read_corpus(tmp_path, other.fingerprint())


def test_the_same_base_model_under_another_name_is_accepted(base, tmp_path):  # noqa: F811
    prepare(base, tmp_path)
    renamed = random_base()
    renamed.name, renamed.revision = "copy", "main"
    assert len(prepared.read_corpus(tmp_path, renamed.fingerprint()).rows) == TURNS


def test_other_settings_are_refused_with_what_differs(base, tmp_path):  # noqa: F811
    prepare(base, tmp_path)
    both = "answers.temperature=0.0 .now 1.0., answers.samples=1 .now 2."
    with pytest.raises(InputError, match=f"made with {both}; repeat those settings"):
        prepare(base, tmp_path, SAMPLED)
    with pytest.raises(InputError, match=r"made with 11 prompts .now 10.; repeat"):
        prepare(base, tmp_path, prompts=PROMPTS[1:])


def test_an_unfinished_corpus_of_other_settings_is_named_as_such(base, tmp_path, monkeypatch):  # noqa: F811
    prepare_until(monkeypatch, 1, base, tmp_path)
    with pytest.raises(InputError, match=r"holds an unfinished corpus that was made with answers\.temp"):
        prepare(base, tmp_path, SAMPLED)


def test_a_manifest_without_parts_does_not_fix_the_settings(base, tmp_path, monkeypatch):  # noqa: F811
    prepare_until(monkeypatch, 0, base, tmp_path)
    assert prepare(base, tmp_path, SAMPLED)["answers"]["samples"] == 2


def test_a_folder_without_a_prepared_corpus_is_one_sentence(base, tmp_path):  # noqa: F811
    with pytest.raises(InputError, match=r"no prepared corpus at .*; make one with data/prepare.py out="):
        prepared.read_corpus(tmp_path / "gone", base.fingerprint())
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    with pytest.raises(InputError, match="is not the manifest of a prepared corpus; choose another folder"):
        prepared.read_corpus(tmp_path, base.fingerprint())
    (tmp_path / "manifest.json").unlink()
    part_files.part_path(tmp_path, 0).write_text("{}\n")
    with pytest.raises(InputError, match=r"holds parts without manifest.json; choose another out="):
        prepare(base, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*; make room or choose another place"):
        prepare(base, tmp_path / "file")


def test_discard_removes_the_corpus_and_nothing_else(base, tmp_path):  # noqa: F811
    prepare(base, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    part_files.delete_corpus(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_the_manifest_records_settings_and_counts(base, tmp_path):  # noqa: F811
    manifest = prepare(base, tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest
    settings = dict(batch_size=3, max_new_tokens=12, temperature=0.0, seed=0, samples=1)
    assert manifest["answers"] == {"by": "TransformersAnswers", "dtype": "float32", **settings}
    assert manifest["settings"] == {"corpus": {"name": "test"}}
    assert list(manifest["parts"]) == [file.name for file in part_files.list_parts(tmp_path)]
