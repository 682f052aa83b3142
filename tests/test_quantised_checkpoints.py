"""Quantised checkpoints: FP8 is dequantised exactly, every other one is refused before its weights are read."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from fp8_parts import FP8, fp8_checkpoint, quantize_blocks
from safetensors.torch import load_file, save_file
from test_base_model import saved
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.drafters.draft_model import load_draft_model
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import StockGenerate
from ctcdraft.models import compatibility
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.compatibility import ReferenceLogits, refuse_changed_logits
from ctcdraft.models.loading import load_base
from ctcdraft.models.meta import build_meta_base

TOKENS = torch.arange(20, 60)[None]
ONE = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def accelerator(monkeypatch):
    """Simulate a GPU with FP8, where transformers keeps the codes; without one it dequantises by itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))


def logits(lm):
    with torch.no_grad():
        return lm(TOKENS).logits


@pytest.mark.parametrize("chosen", [lambda name: name == ONE, lambda name: True], ids=["one layer", "all layers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_is_dequantised(tmp_path, accelerator, chosen, dtype):
    """Codes cast without their scales would give weights up to 448, and logits that correlate 0.4 to 0.6."""
    expected = fp8_checkpoint(tmp_path, chosen)
    base = load_base(str(tmp_path), dtype, "cpu")
    weights = dict(base.lm.named_parameters())
    assert max(float(value.detach().abs().max()) for value in weights.values()) < 2
    for (
        name,
        value,
    ) in expected.named_parameters():  # not expected.to(dtype), which would round the rotary frequencies too
        value.data = value.data.to(getattr(torch, dtype))
        assert torch.equal(weights[name], value), name
    assert torch.equal(logits(base.lm), logits(expected))


def test_a_checkpoint_that_names_no_dtype_is_not_loaded_as_float8(tmp_path, accelerator):
    fp8_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = load_base(str(tmp_path), "float32", "cpu")
    assert {value.dtype for value in base.lm.parameters()} == {torch.float32}


def test_fp8_with_layers_on_disk(tmp_path):
    expected = fp8_checkpoint(tmp_path / "base")
    device_map = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    device_map |= {"model.embed_tokens": "cpu", "lm_head": "cpu"}
    folder = str(tmp_path / "offloaded")
    base = load_base(str(tmp_path / "base"), "float32", "cpu", device_map=device_map, offload_folder=folder)
    states = base.hidden_states(TOKENS, torch.ones_like(TOKENS))
    assert torch.allclose(base.head(states), logits(expected), atol=1e-5)


def test_experts_in_fp8_are_dequantised(tmp_path, accelerator):
    """Experts are stored one by one, as on the hub, and merged by transformers after dequantisation."""
    changes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    lm = random_lm("qwen3_moe", **changes)
    lm.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if ".experts." in name]:
        codes, scales, value = quantize_blocks(tensors[name])
        expected[name] = value
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    assert len(expected) == 2 * 4 * 3
    (tmp_path / "meant").mkdir()
    whole = {name: value for name, value in tensors.items() if not name.endswith("_scale_inv")} | expected
    save_file(whole, tmp_path / "meant" / "model.safetensors", metadata={"format": "pt"})
    lm.config.save_pretrained(tmp_path / "meant")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = load_base(str(tmp_path), "float32", "cpu")
    reference_lm = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "meant").eval()
    assert torch.allclose(logits(base.lm), logits(reference_lm), atol=1e-4)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", "torchao", "new"])
def test_every_other_method_is_refused_before_its_weights_are_read(tmp_path, method):
    (tmp_path / "config.json").write_text(
        json.dumps(random_lm().config.to_dict() | {"quantization_config": {"quant_method": method}})
    )
    message = f"is quantised with {method}, and only fp8 is dequantised here; give the checkpoint"
    with pytest.raises(InputError, match=message):
        load_base(str(tmp_path), "float32", "cpu")
    with pytest.raises(InputError, match=message):
        build_meta_base(str(tmp_path), "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": None}, "holds .* as F8_E4M3, and no quantization_config states"),
        ({"scaled": "{}_scale"}, "holds .* as F8_E4M3 without .*_scale_inv"),
        ({"config": FP8 | {"weight_block_size": [8, 8]}}, r"are not blocks of \[8, 8\]"),
        ({"config": FP8 | {"scale_fmt": "ue8m0"}}, "fp8 and scale_fmt=ue8m0, which is not supported"),
        ({"config": {"load_in_8bit": True}}, "is quantised with bitsandbytes"),
    ],
)
def test_codes_whose_scales_would_be_lost_are_refused(tmp_path, changes, message):
    fp8_checkpoint(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        load_base(str(tmp_path), "float32", "cpu")


def test_codes_in_sharded_checkpoints_are_refused(tmp_path):
    fp8_checkpoint(tmp_path, config=None)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shards = [{}, {}]
    for name, value in tensors.items():
        shards[name.startswith("model.layers.1")][name] = value
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, tmp_path / file, metadata={"format": "pt"})
    index = {name: files[name.startswith("model.layers.1")] for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    with pytest.raises(InputError, match="no quantization_config states"):
        load_base(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_missing_weights_are_not_initialised_at_random(tmp_path, name):
    folder = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"has no {name} .1 tensors are missing., which would be random"):
        load_base(folder, "float32", "cpu")


def test_a_pickled_checkpoint_with_unused_scales_is_refused(tmp_path):
    """And codes without scales, which transformers would take for weights."""
    folder = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    codes, scales, _ = quantize_blocks(tensors[ONE])
    (tmp_path / "model.safetensors").unlink()
    scaled = {ONE: tensors[ONE], f"{ONE}_scale_inv": scales}
    for changes, message in (
        (scaled, f"holds {ONE}_scale_inv, which LlamaForCausalLM does not read"),
        ({ONE: codes}, f"holds {ONE} as F8, and no quantization_config states its scales"),
        ({ONE: (9 * tensors[ONE]).char()}, f"holds {ONE} as I8, and no quantization_config states its scales"),
    ):
        torch.save(tensors | changes, tmp_path / "pytorch_model.bin")
        with pytest.raises(InputError, match=message):
            load_base(folder, "float32", "cpu")


def test_tied_lm_heads_and_integer_buffers_are_accepted(tmp_path):
    folder = saved(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"model.ids": torch.arange(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_base(folder, "float32", "cpu").vocabulary == 261


def test_quantising_a_quantised_checkpoint_is_refused(tmp_path, monkeypatch):
    fp8_checkpoint(tmp_path)
    described = {"dtype": "auto", "quantization_config": object()}
    monkeypatch.setattr("ctcdraft.models.loading.weight_options", lambda *arguments: described)
    with pytest.raises(InputError, match=r"base\.quantization= would quantise .* already \(fp8\); leave it out"):
        load_base(str(tmp_path), "float32", "cpu", quantization="torchao_int8")


def test_shards_of_zero3_are_not_dequantised(tmp_path):
    from ctcdraft.models.checkpoints import load_pretrained

    fp8_checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"base\.zero3=true loads no quantised checkpoint"):
        load_pretrained(str(tmp_path), None, "sdpa", {"dtype": torch.float32}, dequantises=False)


def test_draft_models_and_assistants_are_dequantised_too(tmp_path, accelerator):
    expected = fp8_checkpoint(tmp_path)
    base = BaseLM(random_lm(seed=3), tiny_tokenizer(), "large")
    assert torch.equal(logits(load_draft_model(str(tmp_path), base).lm), logits(expected))
    stock = StockGenerate(base, {}, str(tmp_path), 3)
    assert torch.allclose(logits(stock.assistant), logits(expected), atol=1e-5)


def test_a_quantised_model_given_by_the_caller_is_refused(tmp_path, accelerator):
    """For example to PublishedHead.from_pretrained: transformers keeps FP8 codes where a GPU supports them."""
    fp8_checkpoint(tmp_path)
    lm = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert lm.model.layers[0].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    with pytest.raises(
        InputError, match=r"the model of base mine is quantised \(fp8\), which is not supported; load it"
    ):
        BaseLM(lm, tiny_tokenizer(), "mine")


def test_fp8_is_planned_for_as_dequantised(tmp_path):
    expected = fp8_checkpoint(tmp_path)
    base = build_meta_base(str(tmp_path), "bfloat16")
    assert {name: value.shape for name, value in base.lm.named_parameters()} == {
        name: value.shape for name, value in expected.named_parameters()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_must_compute_the_reference_logits(dtype):
    base = BaseLM(random_lm(), tiny_tokenizer(), "mine")
    reference = ReferenceLogits.of(base.lm, "mine")
    refuse_changed_logits(base.to(dtype), reference)
    broken = copy.deepcopy(base)
    broken.lm.model.layers[1].mlp.up_proj.weight.data.mul_(20)
    with pytest.raises(InputError, match=r"base mine as .* is not what transformers loaded as torch\.float32"):
        refuse_changed_logits(broken, reference)


def test_the_check_runs_when_a_base_is_loaded(tmp_path, monkeypatch):
    """The tree check compares a base with itself, so it passes with wrong weights too."""
    folder, original_to = saved(tmp_path), BaseLM.to

    def lossy(base, *arguments):
        for layer in base.lm.model.layers:
            layer.mlp.up_proj.weight.data.mul_(100)
        return original_to(base, *arguments)

    monkeypatch.setattr(BaseLM, "to", lossy)
    with pytest.raises(InputError, match="is not what transformers loaded"):
        load_base(folder, "float32", "cpu")
    monkeypatch.setattr("ctcdraft.models.loading.refuse_changed_logits", lambda base, reference: None)
    compatibility.refuse_inexact_tree_attention(load_base(folder, "float32", "cpu"))
