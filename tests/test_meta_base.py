"""A base model on the meta device has the size of its name and the costs of the real one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from tiny_models import random_base, random_lm, tiny_tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ctcdraft.config.build import meta_base
from ctcdraft.config.cli import CONFIGS, register_resolvers
from ctcdraft.errors import InputError
from ctcdraft.hardware import HardwareSpec, device_memory_bytes, format_bytes
from ctcdraft.models import meta
from ctcdraft.models.stats import ModelStats

BILLIONS = {
    "vicuna_7b": 6.738, "llama2_chat_7b": 6.738, "vicuna_13b": 13.016, "llama2_chat_13b": 13.016,
    "vicuna_33b": 32.529, "qwen3_8b": 8.191, "llama3_1_8b": 8.030, "smollm2_1_7b": 1.711,
}  # fmt: skip
SHAPE = random_lm().config.to_dict()


def on_paper(path, config=None, dtype="float32", **more):
    return meta.meta_base_if_absent(str(path), dtype, "cpu", config=config, **more)


def test_every_named_base_has_its_parameter_count():
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        for name, billions in BILLIONS.items():
            found = meta_base(compose("prepare", overrides=[f"base={name}", "dtype=bfloat16"]).base)
            size = ModelStats.of(found.base)
            assert round(size.parameters / 1e9, 3) == billions, name
            assert size.weight_bytes == 2 * size.parameters
            assert f"{billions:.2f} B parameters" in str(found)
            assert all(weight.is_meta for weight in found.base.lm.parameters())
    unnamed = {"tiny", "local", "shape", "shape_tiny"}
    assert set(BILLIONS) == {file.stem for file in (CONFIGS / "base").glob("*.yaml")} - unnamed


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4}], ids=str)
def test_operations_and_bytes_equal_those_of_a_real_forward_pass(changes):
    base = random_base(**changes)
    size, tokens_L = ModelStats.of(base), torch.arange(5, 45)
    cache = base.new_cache(len(tokens_L))
    base.read(tokens_L, cache)
    assert size.kv_bytes * len(tokens_L) == cache.bytes_held()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # a fused kernel is not counted
        base.lm.base_model(input_ids=tokens_L[None], use_cache=False)
        body = counter.get_total_flops()
        base.head(torch.zeros(len(tokens_L), base.width))
        whole = counter.get_total_flops()
    # The kernel multiplies all pairs of tokens, and norms are not matrix products.
    assert size.prefill_flops(len(tokens_L), len(tokens_L)) == pytest.approx(body, rel=0.02)
    assert size.decode_flops(len(tokens_L), len(tokens_L)) == pytest.approx(whole, rel=0.02)


def test_a_folder_with_only_a_config_uses_its_tokenizer_if_present(tmp_path):
    random_lm(hidden_size=64).config.save_pretrained(tmp_path)
    found = on_paper(tmp_path, config=SHAPE)  # the folder's config comes before that of a name
    assert (found.base.width, found.base.tokenizer) == (64, None)
    assert "no weights of" in found.reason
    tiny_tokenizer().save_pretrained(tmp_path)
    assert on_paper(tmp_path).base.tokenizer("a")["input_ids"] == tiny_tokenizer()("a")["input_ids"]


def test_a_base_that_is_present_and_fits_is_loaded(tmp_path, monkeypatch):
    random_lm().save_pretrained(tmp_path)
    assert on_paper(tmp_path) is None
    held = ModelStats.of(random_base()).weight_bytes
    monkeypatch.setattr(meta, "device_memory_bytes", lambda device: held - 1)
    assert "its weights take" in on_paper(tmp_path).reason
    assert on_paper(tmp_path, dtype="bfloat16") is None


def test_impossible_sizes_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"base\.config is no config"):
        on_paper("owner/name", config={"hidden_size": 32})
    with pytest.raises(InputError, match="logits_scaling=8"):
        on_paper("owner/name", config={"model_type": "granite", "logits_scaling": 8, "num_hidden_layers": 1})
    with pytest.raises(InputError, match=r"dtype must be a floating-point type .*got int7"):
        on_paper("owner/name", config=SHAPE, dtype="int7")


def test_seconds_follow_from_the_given_rates_only():
    assert HardwareSpec.of({"flops": None, "bandwidth": 1e9}).seconds(1e9) is None
    assert HardwareSpec.of({"flops": 1e9, "bandwidth": None}).seconds(2e9, streamed=1e12) == 2
    assert HardwareSpec.of({"flops": 1e9, "bandwidth": 1e8}).seconds(2e9, streamed=5e8) == 5
    for wrong in (0, -1.0, "fast", float("nan")):
        with pytest.raises(InputError, match=r"plan\.bandwidth must be a number > 0"):
            HardwareSpec.of({"flops": 1e9, "bandwidth": wrong})


def test_device_memory_and_format_bytes():
    there = device_memory_bytes("cpu")
    assert there is not None
    assert 2**28 < there <= int(Path("/proc/meminfo").read_text().split()[1]) * 1024 * 1.01
    shown = [format_bytes(count) for count in (500, 2.5e6, 13476831232, 2e12)]
    assert shown == ["0.5 kB", "2.5 MB", "13.5 GB", "2.0 TB"]


def test_heads_are_not_served_on_a_biased_lm_head_or_scaled_embeddings():
    from ctcdraft.serving.served_head import refuse_other_head_inputs

    class ScaledEmbedding(torch.nn.Embedding):
        pass

    base = random_base()
    refuse_other_head_inputs(base, "plain")
    rows, width = base.head.weight.shape
    for changes in ({"head": torch.nn.Linear(width, rows)}, {"embedding": ScaledEmbedding(rows, width)}):
        changed = copy.copy(base)
        vars(changed).update(changes)
        with pytest.raises(InputError, match="other has a biased lm_head or scaled embeddings"):
            refuse_other_head_inputs(changed, "other")
