"""Corrections at rest answer from tables as they would without them, whatever has been written to since."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from ctcdraft.nn import logit_correction as module
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection

VOCABULARY, WIDTH, RANK = 40, 12, 5


@pytest.fixture(params=[GRUCorrection, MarkovCorrection], ids=["gru", "markov"])
def correction(request):
    torch.manual_seed(1)
    one = request.param(nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False), RANK, 1e-6)
    for weight in one.parameters():
        nn.init.normal_(weight)
    return one.eval()


def answers(one):
    """Scores behind two tokens, six texts in two rows."""
    texts_XS = torch.arange(12).view(2, 3, 2) * 3
    memory_XR = one.start(torch.linspace(-1, 1, 6 * WIDTH).view(2, 3, WIDTH), texts_XS[..., 0])
    return one(one.step(memory_XR, texts_XS[..., 1]))


def agree(one):
    with torch.no_grad():
        assert torch.allclose(answers(one), truth(one), atol=1e-4)


def truth(one):
    """Without a table: one that has just been made, in training."""
    return answers(deepcopy(one).train())


def test_tables_say_what_weights_say(correction, monkeypatch):
    monkeypatch.setattr(module, "EMBEDDING_CHUNK", 7)
    agree(correction)
    assert correction._table is not None


def change_in_place(one):
    with torch.no_grad():
        for weight in one.parameters():
            weight.copy_(weight.flip(0))


def load(one):
    one.load_state_dict({name: value.flip(0) for name, value in one.state_dict().items()})


def write_past_the_count(one):
    one.train()
    for weight in one.parameters():
        weight.data.copy_(weight.data.flip(0))
    one.eval()


def turn_embedding(one):
    with torch.no_grad():
        one.embedding.weight.copy_(one.embedding.weight.flip(0))


@pytest.mark.parametrize("change", [change_in_place, load, write_past_the_count, turn_embedding])
def test_tables_follow_the_weights(correction, change):
    with torch.no_grad():
        before = answers(correction)
    change(correction)
    agree(correction)
    with torch.no_grad():
        assert not torch.allclose(answers(correction), before, atol=1e-2)


def test_who_learns_has_no_tables(correction):
    assert answers(correction).requires_grad
    correction.train()
    with torch.no_grad():
        answers(correction)
    assert correction._table is None


@pytest.mark.parametrize("all_of_it", [True, False], ids=["all", "the embedding alone"])
def test_weights_of_inference_mode_have_no_tables(all_of_it):
    with torch.inference_mode():
        embedding = nn.Embedding(VOCABULARY, WIDTH)
    with torch.inference_mode(all_of_it), torch.no_grad():
        one = GRUCorrection(embedding, RANK, 1e-6).eval()
        nn.init.normal_(one.out.weight)
    with torch.inference_mode():
        assert torch.allclose(answers(one), truth(one), atol=1e-4)
    assert one._table is None


def test_autocast_has_no_tables(correction):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        answers(correction)
    assert correction._table is None


def test_a_table_holds_what_it_was_made_of(correction):
    """Or others could come to lie in the same place, with as many changes behind them."""
    with torch.no_grad():
        answers(correction)
    held = {weight.data_ptr() for weight in correction._table.source_weights}
    assert held >= {correction.embedding.weight.data_ptr(), correction.norm.weight.data_ptr()}
