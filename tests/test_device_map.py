"""A base distributed over devices: the same hidden states, tokens and fingerprint as on one device.

Tests have one device, so layers are in memory and on disk, and a cache for two devices is simulated with two names.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from accelerate.big_modeling import cpu_offload
from tiny_models import random_base, random_lm, tiny_tokenizer
from training_parts import DECODING, ctc_head

from ctcdraft.corpus.generation.transformers import generate_batch
from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.errors import InputError
from ctcdraft.models.device_map import device_map_options, pin_to_device
from ctcdraft.models.loading import load_base

SOME_ON_DISK = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk", "model.rotary_emb": "cpu"}
ENDS = {"model.embed_tokens": "cpu", "lm_head": "disk"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    random_lm(context=64, num_hidden_layers=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def plain(folder):
    return load_base(folder, "float32", "cpu", aux_layers=["last", 1])


@pytest.mark.parametrize(
    "arguments",
    [
        {"device_map": "auto", "max_memory": {"cpu": 60_000}},
        {"device_map": SOME_ON_DISK | ENDS | {"model.layers.2": "disk"}},
        {"device_map": {"": "cpu"}},
    ],
    ids=["auto", "by hand", "one place"],
)
def test_a_distributed_base_computes_the_same(folder, plain, tmp_path, arguments):
    placed = load_base(folder, "float32", "cpu", aux_layers=["last", 1], offload_folder=str(tmp_path), **arguments)
    offloaded = sum(weight.is_meta for weight in placed.lm.parameters())
    assert (offloaded > 0) == (arguments["device_map"] != {"": "cpu"})
    assert placed.fingerprint() == plain.fingerprint()
    tokens = torch.arange(20, 60).view(2, 20)
    assert torch.equal(
        placed.hidden_states(tokens, torch.ones_like(tokens)), plain.hidden_states(tokens, torch.ones_like(tokens))
    )
    heads = [ctc_head(base) for base in (placed, plain)]
    for ours, theirs in zip(*(head.trainable_state_dict().items() for head in heads), strict=True):
        assert torch.equal(ours[1], theirs[1]), ours[0]  # a block that is initialised as the last layer
    tokens = [answer(base, head.eval()) for base, head in zip((placed, plain), heads, strict=True)]
    assert tokens[0] == tokens[1]


def answer(base, drafter):
    return generate(base, drafter, torch.arange(30, 36), DECODING, frozenset(), 0).tokens


@pytest.mark.parametrize("parts", [1, 2])
def test_an_offloaded_layer_is_moved_completely(parts):
    """The device "meta" stands for a GPU."""
    gpu, layer = torch.device("meta"), linear(parts)
    cpu_offload(layer, execution_device=gpu)
    pin_to_device(layer, gpu)
    assert [tensor.device for tensor in (*layer.parameters(), *layer.buffers())] == [gpu] * len(layer.state_dict())
    assert layer(torch.ones(2, 4)).device == gpu  # inputs are moved there too
    layer = linear(parts)
    before = layer(torch.ones(2, 4))
    cpu_offload(layer, execution_device=torch.device("cpu"))
    pin_to_device(layer, torch.device("cpu"))
    assert not any(weight.is_meta for weight in layer.parameters())
    assert torch.equal(layer(torch.ones(2, 4)), before)


def linear(parts):
    """Return a single module, or a Sequential of several."""
    each = [torch.nn.Linear(4, 4) for _ in range(parts)]
    each[0].register_buffer("scale", torch.ones(4))
    return torch.nn.Sequential(*each) if parts > 1 else each[0]


def test_a_cache_over_two_devices_equals_one_cache():
    """With accepted paths, rejected draft tokens, and batch rows that finish one by one."""
    base, spread = (random_base(context=64, num_hidden_layers=3) for _ in range(2))
    spread.layer_devices = ["first", "second", "first"]
    cache = spread.new_cache(8)
    assert [len(part._rows) for part in cache.parts.values()] == [2, 1]
    for drafter in (Autoregressive(base), ctc_head(base).eval()):
        assert answer(base, drafter) == answer(spread, drafter)
    prompts = [[20, 21, 22], [30, 31], [40, 41, 42, 43]]
    arguments = (prompts, [12, 2, 7], lambda logits_BV, rows, step: logits_BV.argmax(dim=-1))
    assert generate_batch(base, *arguments) == generate_batch(spread, *arguments)
    caches = [one.new_cache(8) for one in (base, spread)]
    for one, cache in zip((base, spread), caches, strict=True):
        one.read(torch.arange(20, 30), cache)
        cache.crop(7)
    assert (
        (caches[0].length, caches[0].bytes_held())
        == (caches[1].length, caches[1].bytes_held())
        == (7, caches[0].bytes_held())
    )


def test_unsupported_combinations_are_input_errors(folder, monkeypatch):
    with pytest.raises(InputError, match=r"base\.static_shapes= needs a base on one device"):
        load_base(folder, "float32", "cpu", device_map="auto", static_shapes=True)
    with pytest.raises(InputError, match=r"cannot load the base .*device_map"):
        load_base(folder, "float32", "cpu", device_map="wide")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"device_map=auto distributes one base over .* and 2 were started"):
        device_map_options("float32", "auto", None, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs accelerate, which is not installed; pip install accelerate"):
        device_map_options("float32", "auto", None, None)
