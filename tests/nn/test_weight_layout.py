"""Column-major weights: the same values, names, outputs and sharing."""

from __future__ import annotations

import pytest
import torch
from hydra import compose, initialize_config_dir
from tiny_models import random_lm, tiny_tokenizer
from torch import nn

import evaluate
from ctcdraft.config.cli import CONFIGS, register_resolvers
from ctcdraft.models.loading import load_base
from ctcdraft.nn import weight_layout
from ctcdraft.nn.weight_layout import to_column_major_


class Model(nn.Module):
    """Two layers, and a head that shares the embedding's weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_L):
        return self.head(self.down(self.up(self.embedding(tokens_L)).relu()))


def is_column_major(layer):
    return layer.weight.T.is_contiguous() and not layer.weight.is_contiguous()


def test_outputs_and_values_do_not_change():
    model, tokens_L = Model(), torch.arange(9)
    before, values = model(tokens_L), {name: value.clone() for name, value in model.state_dict().items()}
    to_column_major_(model)
    assert is_column_major(model.up)
    assert is_column_major(model.down)
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.is_contiguous()
    assert torch.allclose(model(tokens_L), before, atol=1e-6)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_excluded_weights_stay_row_major():
    model = Model()
    to_column_major_(model, but=[model.up.weight])
    assert model.up.weight.is_contiguous()
    assert is_column_major(model.down)


class Subclass(torch.Tensor):
    """A tensor subclass that cannot be transposed, like some quantised weights."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is not torch.Tensor.T.__get__
        return super().__torch_function__(func, types, args, kwargs or {})


def with_subclass(model):
    model.up.weight = nn.Parameter(model.up.weight.data.as_subclass(Subclass))
    return model


@pytest.mark.parametrize(
    "change",
    [lambda model: model.bfloat16(), lambda model: model.to("meta"), with_subclass],
    ids=["bf16", "meta", "subclass"],
)
def test_other_dtypes_devices_and_subclasses_stay(change):
    model = change(Model())
    to_column_major_(model)
    assert model.up.weight.is_contiguous()


def test_large_matrices_stay(monkeypatch):
    monkeypatch.setattr(weight_layout, "MAX_COLUMN_MAJOR_WEIGHTS", 23)
    model = Model()
    to_column_major_(model)
    assert model.up.weight.is_contiguous()


def test_loading_and_training_work_as_before():
    changed, plain, tokens_L = Model(), Model(), torch.arange(9)
    to_column_major_(changed)
    changed.load_state_dict(plain.state_dict())
    assert is_column_major(changed.up)
    for model in (changed, plain):
        model(tokens_L).square().sum().backward()
    assert torch.allclose(changed.up.weight.grad, plain.up.weight.grad, atol=1e-5)


def layers_of(base):
    return [layer for layer in base.lm.modules() if type(layer) is nn.Linear and layer is not base.head]


def test_a_base_is_column_major_for_inference_and_keeps_its_fingerprint(tmp_path):
    for folder in (tmp_path, tmp_path / "again"):
        tiny_tokenizer().save_pretrained(folder)
    random_lm().save_pretrained(tmp_path)
    base = load_base(str(tmp_path), "float32", "cpu")
    assert all(layer.weight.is_contiguous() for layer in layers_of(base))  # unchanged for training and saving
    assert all(map(is_column_major, layers_of(base.for_inference())))
    base.lm.save_pretrained(tmp_path / "again")
    assert load_base(str(tmp_path / "again"), "float32", "cpu").weights_hash == base.weights_hash


def test_evaluate_decodes_with_a_column_major_base():
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        base = evaluate.load_base(compose("evaluate", ["base=tiny"]), {})
    assert layers_of(base)
    assert all(map(is_column_major, layers_of(base)))
