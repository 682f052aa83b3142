"""Folders of bases whose files are damaged or ambiguous."""

import json

import pytest
from test_base_model import saved

from ctcdraft.errors import InputError
from ctcdraft.models.checkpoint_files import weight_files
from ctcdraft.models.loading import load_base


def test_a_file_of_weights_goes_before_an_index_as_in_transformers(tmp_path):
    saved(tmp_path)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(str(tmp_path), None) == [str(tmp_path / "model.safetensors")]
    load_base(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: edit_config(folder, hidden_size="abc"),
        lambda folder: edit_config(folder, intermediate_size=40),
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
    ],
)
def test_a_damaged_folder_is_one_sentence(tmp_path, harm):
    saved(tmp_path)
    harm(tmp_path)
    with pytest.raises(InputError, match=r"cannot load the base .*; check base.path="):
        load_base(str(tmp_path), "float32", "cpu")


def edit_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
