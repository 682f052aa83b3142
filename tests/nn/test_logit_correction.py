"""Logit corrections give the same result from cached tables as without, whatever changes the weights."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from ctcdraft.nn import compiled_step
from ctcdraft.nn import logit_correction as module
from ctcdraft.nn.frame_correction import FrameGRUCorrection
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.nn.weight_layout import to_column_major_

VOCABULARY, WIDTH, RANK = 40, 12, 5


WITH_TABLES = {"gru": GRUCorrection, "markov": MarkovCorrection}
CORRECTIONS = {
    **WITH_TABLES,
    "own_markov": partial(MarkovCorrection, own_embedding=True),
    "frame_gru": partial(FrameGRUCorrection, memory=4, uncorrected=1),
}


@pytest.fixture(params=WITH_TABLES.values(), ids=WITH_TABLES)
def correction(request):
    return made(request.param)


def made(make):
    torch.manual_seed(1)
    one = make(nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False), RANK, 1e-6)
    for weight in one.parameters():
        nn.init.normal_(weight)
    return one.eval()


def scores(one):
    """Added logits after two tokens, for texts in shape [2, 3]."""
    texts_XS = torch.arange(12).view(2, 3, 2) * 3
    memory_XR = one.start(torch.linspace(-1, 1, 6 * WIDTH).view(2, 3, WIDTH), texts_XS[..., 0])
    return one(one.step(memory_XR, texts_XS[..., 1]))


def check_against_reference(one):
    with torch.no_grad():
        assert torch.allclose(scores(one), reference(one), atol=1e-4)


def reference(one):
    """The result without a table: of a fresh copy in training mode."""
    return scores(deepcopy(one).train())


def test_tables_equal_the_weights(correction, monkeypatch):
    monkeypatch.setattr(module, "EMBEDDING_CHUNK", 7)
    check_against_reference(correction)
    assert correction._table is not None


def change_in_place(one):
    with torch.no_grad():
        for weight in one.parameters():
            weight.copy_(weight.flip(0))


def load(one):
    one.load_state_dict({name: value.flip(0) for name, value in one.state_dict().items()})


def write_without_version(one):
    one.train()
    for weight in one.parameters():
        weight.data.copy_(weight.data.flip(0))
    one.eval()


def change_embedding(one):
    with torch.no_grad():
        one.embedding.weight.copy_(one.embedding.weight.flip(0))


@pytest.mark.parametrize("change", [change_in_place, load, write_without_version, change_embedding])
def test_tables_follow_the_weights(correction, change):
    with torch.no_grad():
        before = scores(correction)
    change(correction)
    check_against_reference(correction)
    with torch.no_grad():
        assert not torch.allclose(scores(correction), before, atol=1e-2)


def store_elsewhere(one):
    for weight in one.parameters():
        weight.data = weight.data.flip(0).T.contiguous().T if weight.ndim == 2 else weight.data.flip(0)


def replace_layer(one):
    one.first, one.out = nn.Linear(WIDTH, RANK), nn.Linear(RANK, VOCABULARY, bias=False)
    to_column_major_(one)


@pytest.mark.parametrize(
    "change", [change_in_place, load, write_without_version, change_embedding, store_elsewhere, replace_layer]
)
@pytest.mark.parametrize("kind", CORRECTIONS)
@torch.no_grad()
def test_a_start_by_machine_code_follows_the_weights(kind, change, monkeypatch):
    """And the arrays of the search do."""
    correction = made(CORRECTIONS[kind])

    def start(one):
        anchor_XD = torch.linspace(-1, 1, WIDTH).view(1, 1, WIDTH)
        return one.start(anchor_XD, torch.tensor([[7]]), anchor_XD[:, :, None].expand(-1, -1, 3, -1))

    to_column_major_(correction)
    before, tables = start(correction), correction.arrays()
    assert correction.arrays() is tables
    if isinstance(correction, GRUCorrection):
        asked = correction.first, tables, torch.zeros(1, 1, WIDTH), torch.tensor([[7]])
        assert compiled_step.compiled_gru_start(*asked) is not None
    change(correction)
    after = start(correction)
    unread = {"own_markov": (replace_layer, change_embedding), "gru": ()}.get(kind, (replace_layer,))
    if change not in unread:
        assert not torch.allclose(after, before, atol=1e-2)
    with monkeypatch.context() as patch:
        patch.setattr(compiled_step, "step_kernels", lambda: None)
        torch.testing.assert_close(after, start(correction), rtol=0, atol=1e-5)
    torch.testing.assert_close(after, start(deepcopy(correction).train()), rtol=0, atol=1e-5)
    table_VG, *_, out_RV = correction.arrays()
    torch.testing.assert_close(torch.from_numpy(out_RV), correction.out.weight.T)
    torch.testing.assert_close(torch.from_numpy(table_VG), correction.project_tokens(torch.arange(VOCABULARY)))


def test_training_uses_no_tables(correction):
    assert scores(correction).requires_grad
    correction.train()
    with torch.no_grad():
        scores(correction)
    assert correction._table is None


@pytest.mark.parametrize("all_of_it", [True, False], ids=["all", "the embedding alone"])
def test_inference_tensors_have_no_tables(all_of_it):
    with torch.inference_mode():
        embedding = nn.Embedding(VOCABULARY, WIDTH)
    with torch.inference_mode(all_of_it), torch.no_grad():
        one = GRUCorrection(embedding, RANK, 1e-6).eval()
        nn.init.normal_(one.out.weight)
    with torch.inference_mode():
        assert torch.allclose(scores(one), reference(one), atol=1e-4)
    assert one._table is None


def test_autocast_uses_no_tables(correction):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores(correction)
    assert correction._table is None


def test_a_table_keeps_its_source_weights_alive(correction):
    """Otherwise new weights could reuse their address and version."""
    with torch.no_grad():
        scores(correction)
    held = {weight.data_ptr() for weight in correction._table.source_weights}
    assert held >= {correction.embedding.weight.data_ptr(), correction.norm.weight.data_ptr()}
