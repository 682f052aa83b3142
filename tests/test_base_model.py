"""Base models: loading, refused architectures, and fingerprints."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import EOS_ID, random_base, random_lm, tiny_tokenizer

from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.compatibility import refuse_unsupported_config
from ctcdraft.models.fingerprint import has_other_rotary
from ctcdraft.models.loading import load_base


def saved(folder, kind="llama", seed=0, **changes):
    random_lm(kind, seed, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_folder_loads_and_is_frozen(tmp_path):
    base = load_base(saved(tmp_path), "float32", "cpu")
    assert base.name == tmp_path.name
    assert (base.vocabulary, base.width, base.context_length) == (261, 32, 256)
    assert base.stop_token_ids == {EOS_ID}
    assert not any(value.requires_grad for value in base.parameters())


def test_lm_head_of_the_hidden_states_gives_the_logits():
    """The hidden states are those after the final norm: the lm_head computes exactly the model's logits from them."""
    base = random_base()
    tokens = torch.arange(20, 40)[None]
    states = base.hidden_states(tokens, torch.ones_like(tokens))
    with torch.no_grad():
        assert torch.equal(base.head(states), base.lm(tokens).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_frequencies_are_those_of_stock_transformers(tmp_path, dtype):
    folder = saved(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    base = load_base(folder, dtype, "cpu")
    assert base.dtype == getattr(torch, dtype)
    frequencies = base.lm.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, stock.model.rotary_emb.inv_freq)
    tokens = torch.arange(20, 60)[None]
    with torch.no_grad():
        assert torch.equal(base.lm(tokens).logits, stock(tokens).logits)


def test_right_padding_changes_no_hidden_state():
    base = random_base()
    tokens = torch.arange(20, 40)[None]
    padded = torch.nn.functional.pad(tokens, (0, 9))
    ones = torch.ones_like(padded)
    alone = base.hidden_states(tokens, torch.ones_like(tokens))
    assert torch.allclose(base.hidden_states(padded, ones)[:, :20], alone, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (
            "llama4_text",
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "chunked_attention"]},
            "chunked_attention",
        ),
        ("mamba", {}, "no attention heads"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic rotary positions"),
    ],
)
def test_architectures_that_cannot_verify_a_tree_are_refused(kind, changes, reason):
    config = transformers.AutoConfig.for_model(kind, **changes)
    with pytest.raises(InputError, match=f"{reason}.*use a base with full or sliding attention"):
        refuse_unsupported_config(config, kind)


def test_an_unsupported_base_is_refused_before_its_weights_are_read(tmp_path):
    transformers.MambaConfig().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no attention heads"):
        load_base(str(tmp_path), "float32", "cpu")


def test_an_attention_that_is_not_installed_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"cannot load the base .*base\.attention=flash_attention_2"):
        load_base(saved(tmp_path / "base"), "float32", "cpu", attention="flash_attention_2")


def test_a_missing_folder_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"no base LLM at .*base\.path="):
        load_base(str(tmp_path / "nowhere"), "float32", "cpu")


def test_the_fingerprint_depends_on_weights_tokenizer_and_template_but_not_on_dtype():
    one, other = random_base().fingerprint(), random_base(seed=1).fingerprint()
    assert one == random_base().fingerprint()
    assert one["weights"] != other["weights"]
    assert one["tokenizer"] == other["tokenizer"]
    half = BaseLM(random_lm().to(torch.bfloat16), tiny_tokenizer(), "random-llama")
    assert half.fingerprint() | {"rotary_frequencies": one["rotary_frequencies"]} == one
    assert not has_other_rotary(half.fingerprint(), one)
    templated = BaseLM(random_lm(), tiny_tokenizer(), "random-llama", chat_template="{{ messages }}")
    assert templated.fingerprint()["chat_template"] != one["chat_template"]


def test_an_adapter_is_merged_before_freezing(tmp_path):
    import peft

    folder = saved(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), config)
    tuned.save_pretrained(tmp_path / "adapter")
    plain = load_base(folder, "float32", "cpu")
    merged = load_base(folder, "float32", "cpu", adapter=str(tmp_path / "adapter"))
    tokens = torch.arange(20, 40)[None]
    with torch.no_grad():
        assert torch.allclose(merged.lm(tokens).logits, tuned(tokens).logits, atol=1e-4)
        assert not torch.allclose(merged.lm(tokens).logits, plain.lm(tokens).logits, atol=1e-2)
    assert merged.fingerprint()["weights"] != plain.fingerprint()["weights"]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["local"], 2]], "window_size": 8, "num_heads": 4}),
        ("granite", {"logits_scaling": 8.0}),
        ("bloom", {"n_layer": 2, "n_head": 4}),
    ],
)
def test_what_only_a_forward_pass_shows_is_refused_too(tmp_path, kind, changes):
    """Local attention, logits scaled after the lm_head, positions as biases: no single config key states these."""
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=32, vocab_size=261, initializer_range=0.3, bos_token_id=0, eos_token_id=EOS_ID,
        **({} if kind != "granite" else {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
           "intermediate_size": 48}), **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"base .* (computes other logits|cannot read a token tree|has )"):
        load_base(str(tmp_path), "float32", "cpu", context_length=64, attention="eager")


def test_unknown_devices_and_dtypes_are_input_errors(tmp_path):
    folder = saved(tmp_path)
    with pytest.raises(InputError, match=r"dtype must be a floating-point type of torch .*, got float23"):
        load_base(folder, "float23", "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="torch finds none"):
            load_base(folder, "float32", "cuda")


def test_one_checkpoint_has_one_fingerprint_in_every_dtype(tmp_path):
    folder = saved(tmp_path)
    fingerprints = [load_base(folder, dtype, "cpu").fingerprint() for dtype in ("float32", "float16", "bfloat16")]
    assert fingerprints[0] == fingerprints[1] == fingerprints[2]


@pytest.mark.parametrize("length", [257, 4, 0, 64.5, True])
def test_a_context_beyond_the_supported_length_is_refused(length):
    lm = random_lm()
    with pytest.raises(InputError, match=rf"must be an integer from 5 to 256, the context of base x, got {length}$"):
        BaseLM(lm, tiny_tokenizer(), "x", context_length=length)
    assert BaseLM(lm, tiny_tokenizer(), "x", context_length=256).context_length == 256
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    scaled = random_lm(context=512, rope_parameters=rope)
    assert BaseLM(scaled, tiny_tokenizer(), "x", context_length=512).context_length == 512


def test_auxiliary_layers_are_part_of_the_fingerprint():
    base = random_base()
    assert base.fingerprint()["taps"] == ["last"]
    assert BaseLM(base.lm, base.tokenizer, "x", aux_layers=["last", 1]).fingerprint()["taps"] == ["last", 1]
