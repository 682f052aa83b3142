"""Weights laid for few rows are the same weights: what they say, their names, and who shares them."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_lm, tiny_tokenizer
from torch import nn

from ctcdraft.base import BaseLM, load_base
from ctcdraft.nn.few_rows import lay_for_few_rows


class Model(nn.Module):
    """Two layers, and a head that shares the embedding's weights."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words_L):
        return self.head(self.down(self.up(self.words(words_L)).relu()))


def column_by_column(layer):
    return layer.weight.T.is_contiguous() and not layer.weight.is_contiguous()


def test_a_laid_model_says_the_same():
    model, words_L = Model(), torch.arange(9)
    before, values = model(words_L), {name: value.clone() for name, value in model.state_dict().items()}
    lay_for_few_rows(model)
    assert column_by_column(model.up)
    assert column_by_column(model.down)
    assert model.head.weight is model.words.weight
    assert model.words.weight.is_contiguous()
    assert torch.allclose(model(words_L), before, atol=1e-6)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_what_is_not_its_own_stays():
    model = Model()
    lay_for_few_rows(model, but=[model.up.weight])
    assert model.up.weight.is_contiguous()
    assert column_by_column(model.down)


@pytest.mark.parametrize(
    "change", [lambda model: model.bfloat16(), lambda model: model.to("meta")], ids=["bf16", "meta"]
)
def test_other_types_and_devices_stay(change):
    model = change(Model())
    lay_for_few_rows(model)
    assert model.up.weight.is_contiguous()


def test_a_laid_model_is_loaded_and_learns_as_any_other():
    laid, plain, words_L = Model(), Model(), torch.arange(9)
    lay_for_few_rows(laid)
    laid.load_state_dict(plain.state_dict())
    assert column_by_column(laid.up)
    for model in (laid, plain):
        model(words_L).square().sum().backward()
    assert torch.allclose(laid.up.weight.grad, plain.up.weight.grad, atol=1e-5)


def test_a_base_on_a_cpu_is_laid_and_is_the_same_base(tmp_path):
    random_lm().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    base, plain = load_base(str(tmp_path), "float32", "cpu"), BaseLM(random_lm(), tiny_tokenizer(), "plain")
    laid = [layer for layer in base.lm.modules() if type(layer) is nn.Linear and column_by_column(layer)]
    assert len(laid) >= 7 * base.lm.config.num_hidden_layers
    assert base.weights_hash == plain.weights_hash
