"""Layers of a draft head against the base's own: weights are copied where outputs agree.

The reference is the base itself, run on tokens: the input and the output of one of its layers.
"""

from __future__ import annotations

import re

import pytest
import torch
from tiny_models import random_base
from training_parts import make_trainer

from ctcdraft.config.cli import compose_config
from ctcdraft.config.drafters import build_drafter
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.planning.training import plan_training

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
SCALED = {
    "theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "half": ("phi3", {"rope_parameters": HALF}),
}
PREFIX = "drafter.prefix_layer=true"
GRANITE = {"residual_multiplier": 0.3, "attention_multiplier": 0.1, "embedding_multiplier": 12.0}
COPIED = SCALED | {  # all of the layer, to the last weight
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),  # biases of queries, keys and values
    "qwen3": ("qwen3", {}),  # a norm of every head
    "gemma": ("gemma", {}),  # norms by 1 + w, another activation
    "granite": ("granite", GRANITE),  # scores and residuals multiplied
    "phi3": ("phi3", {}),  # fused weights
    "ernie": ("ernie4_5", {}),  # pairs of neighbours
    "glm": ("glm", {}),  # pairs of neighbours in half of a head
}
RANDOM = {  # reason, and whether the final norm can be copied nevertheless
    "no rotary": ("smollm3", {"no_rope_layers": [0, 0]}, "its last layer computes something else", True),
    "output bias": ("llama", {"attention_bias": True}, "its last layer has self_attn.o_proj.bias, which", True),
    "norms behind": ("olmo2", {}, "has post_feedforward_layernorm.weight, self_attn.k_norm.weight and more", True),
    "experts": ("mixtral", {"num_local_experts": 4}, "has mlp.experts.down_proj, mlp.experts.gate_up_proj", True),
    "norms without weights": ("olmo", {}, "its last layer lacks", False),
    "parallel": ("cohere", {"logit_scale": 1.0}, "its last layer lacks post_attention_layernorm.weight", False),
    "fused otherwise": ("gpt_neox", {}, "its last layer has attention.dense.bias", False),
    "no rotary embedding": ("gpt2", {}, "no list of decoder layers; no rotary .* theta 10,000", False),
}


def varied_base(kind, **changes):
    """A random base whose norms and biases vary, as in a trained one."""
    base = random_base(kind, context=128, **changes)
    rng = torch.Generator().manual_seed(3)
    for name, value in base.lm.named_parameters():
        if "norm" in name or "bias" in name:
            value.data += 0.3 * torch.randn(value.shape, generator=rng)
    return base


def head(base, *overrides):
    torch.manual_seed(5)
    return build_drafter(compose_config("train", "base=tiny", *overrides).drafter, base).eval()


@torch.no_grad()
def layer_of(base, number):
    """Input, output and position ids of one of the base's layers, on random tokens at later positions."""
    seen = {}

    def keep(module, given, kwargs, output):
        seen["in"] = given[0] if given else kwargs["hidden_states"]
        seen["out"] = output[0] if isinstance(output, tuple) else output

    hook = base.lm.base_model.layers[number].register_forward_hook(keep, with_kwargs=True)
    tokens_BL = torch.randint(5, 200, (1, 30), generator=torch.Generator().manual_seed(1))
    base.lm.base_model(input_ids=tokens_BL, position_ids=torch.arange(90, 120)[None], use_cache=False)
    hook.remove()
    return seen["in"], seen["out"], torch.arange(90, 120)


def as_text(body, x_BLD, position_ids_L):
    """Every position as a slot after the text before it: the output of a decoder layer."""
    before_BLL = torch.ones(1, len(position_ids_L), len(position_ids_L), dtype=torch.bool).tril(-1)
    cos, sin = body.rotary(position_ids_L)
    text = body.block.keys_values(x_BLD, (cos, sin))
    return body.block(x_BLD[:, :, None], (cos[None, :, None], sin[None, :, None]), text, before_BLL)[:, :, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", COPIED)
@torch.no_grad()
def test_a_copied_layer_gives_the_outputs_of_the_base(case, dtype):
    kind, changes = COPIED[case]
    base = varied_base(kind, **changes)
    base.lm.load_state_dict(
        {name: value.to(dtype) for name, value in base.lm.state_dict().items()}
    )  # the same rounding on both sides
    x_BLD, expected_BLD, position_ids_L = layer_of(base, -1)
    for value in base.lm.parameters():
        value.data = value.data.to(dtype)
    ctc, prefixed = head(base, "drafter=ctc"), head(base, "drafter=hydra", PREFIX)
    assert ctc.initialised == "from the base's last layer (outputs agree), final norm from the base"
    assert prefixed.initialised == "as the identity, prefix layer from the base's last layer (outputs agree)"
    assert head(base, "drafter=eagle").initialised == "from the base's last layer (outputs agree)"
    for ours_BLD in (as_text(ctc.body, x_BLD, position_ids_L), prefixed.prefix(x_BLD, position_ids_L)):
        assert (ours_BLD - expected_BLD).norm() < 1e-3 * (expected_BLD - x_BLD).norm()


@torch.no_grad()
def test_the_layer_before_is_copied_where_the_last_has_no_rotary_positions():
    base = varied_base("smollm3", num_hidden_layers=4)  # every fourth layer has none
    x_BLD, expected_BLD, position_ids_L = layer_of(base, -2)
    ctc = head(base, "drafter=ctc")
    assert ctc.initialised.startswith("from the base's layer 3 of 4 (outputs agree; its last layer computes something")
    assert (as_text(ctc.body, x_BLD, position_ids_L) - expected_BLD).norm() < 1e-3 * (expected_BLD - x_BLD).norm()


@pytest.mark.parametrize("case", RANDOM)
@torch.no_grad()
def test_a_layer_that_cannot_be_copied_starts_at_random_and_reports_why(case):
    kind, changes, why, normed = RANDOM[case]
    base = varied_base(kind, **changes)
    ctc, eagle = head(base, "drafter=ctc"), head(base, "drafter=eagle")
    norm = "from the base" if normed else "of ones"
    assert re.match(rf"at random \(.*{why}.*\), final norm {norm}$", ctc.initialised)
    assert eagle.initialised.startswith("at random (")
    assert (frames_of(ctc, base).std(dim=-1) > 0.1).all()


def frames_of(drafter, base):
    """Hidden states_BATD at two anchors of a random text."""
    x_BLD, anchors_BA = torch.randn(1, 20, base.width), torch.tensor([[5, 9]])
    text = drafter.body.text_keys_values(x_BLD, torch.arange(20)[None])
    roots_BAD = base.embedding(torch.tensor([[7, 8]])).float()
    return drafter.body(
        anchor_BAD=x_BLD[:, anchors_BA[0]], root_BAD=roots_BAD, anchors_BA=anchors_BA, text=text, visible_BAL=None
    )


@pytest.mark.parametrize("case", [*COPIED, *(name for name, values in RANDOM.items() if values[3])])
@torch.no_grad()
def test_the_final_norm_is_the_bases_and_no_frame_is_zero(case):
    kind, changes = (COPIED | RANDOM)[case][:2]
    base = varied_base(kind, **changes)
    drafter, x_LD = head(base, "drafter=ctc"), torch.randn(9, base.width) + 0.5
    torch.testing.assert_close(drafter.body.norm(x_LD), base.lm.base_model.norm(x_LD), rtol=1e-4, atol=1e-5)
    assert (frames_of(drafter, base).std(dim=-1) > 0.1).all()


def test_an_untrained_gemma_gives_nonzero_frames():
    """Its norm weights are zeros and mean 1 + w: copied as w they would make every frame zero."""
    base = random_base("gemma", context=128)
    assert not any(value.any() for name, value in base.lm.named_parameters() if "norm" in name)
    assert (frames_of(head(base, "drafter=ctc"), base).std(dim=-1) > 0.1).all()


def test_the_plan_reports_what_was_copied():
    for kind in ("qwen3", "mixtral"):
        base = random_base(kind, context=64)
        drafter = head(base, "drafter=medusa", "drafter/body=attention").train()
        one = make_trainer(None, base, 3, drafter=drafter, objective=CrossEntropy(4, 0.8))
        plan = plan_training(base, drafter, one.objective, one.batches, one.engine, 3, 1, 2)
        assert f"block initialised {drafter.initialised}\n" in plan
        assert drafter.initialised.startswith("from the base's" if kind == "qwen3" else "at random (its last layer has")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_comparing_outputs_does_not_advance_the_random_state(kind):
    base = varied_base(kind)
    drafter = head(base, "drafter=ctc")
    before = torch.get_rng_state()
    drafter.body.init_from_base(base.lm)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("scaled", ["everywhere", "far off"])
@torch.no_grad()
def test_a_layer_of_the_right_names_is_refused_by_its_outputs(scaled):
    """Frequencies that the head does not have, some visible at late positions only; it keeps its random weights."""
    far = {"rope_theta": 5e6, "original_max_position_embeddings": 1024}
    rope = LLAMA3 | (far | {"high_freq_factor": 1.5} if scaled == "far off" else {})
    base = random_base("llama", context=2048, rope_parameters=rope)
    drafter = head(base, "drafter=ctc", "drafter.body.like_base=false")
    assert drafter.initialised.startswith("at random (its last layer computes something else: the output of a copy is")
    for layer in base.lm.model.layers:
        assert not torch.equal(drafter.body.block.mlp.up.weight, layer.mlp.up_proj.weight)


def test_older_configs_without_like_base_have_the_layer_they_were_trained_with():
    base = varied_base("qwen3", rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0})
    config = compose_config("train", "base=tiny", "drafter=ctc").drafter
    del config.body.like_base
    old, new = build_drafter(config, base), head(base, "drafter=ctc")
    added = {f"body.block.attention.{name}_norm.weight" for name in ("query", "key")}
    assert set(new.trainable_state_dict()) - set(old.trainable_state_dict()) == added
    cos, _ = old.body.rotary(torch.tensor([3]))
    torch.testing.assert_close(cos[0, :4], torch.cos(3 * 100.0 ** (-torch.arange(4) / 4)), rtol=0, atol=1e-6)


def test_the_initialisation_from_the_embedded_base_does_not_change():
    """Weights equal those of the last layer bit for bit; angles are computed in float64, as in published heads."""
    from hydra.utils import instantiate

    base = instantiate(compose_config("train", "base=tiny").base, _convert_="all")
    drafter, layer = head(base, "drafter=ctc"), base.lm.base_model.layers[-1]
    assert torch.equal(drafter.body.block.attention.query.weight, layer.self_attn.q_proj.weight)
    assert torch.equal(drafter.body.block.mlp_norm.weight, layer.post_attention_layernorm.weight)
    assert torch.equal(drafter.body.norm.weight, base.lm.base_model.norm.weight)
    width, theta = layer.self_attn.head_dim, base.lm.config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    cos, sin = drafter.body.rotary(torch.arange(200))
    angles = torch.arange(200)[:, None] * frequencies
    assert torch.equal(cos, torch.cat([angles.cos()] * 2, dim=-1).float())
    assert torch.equal(sin, torch.cat([-angles.sin(), angles.sin()], dim=-1).float())


def test_a_head_of_a_base_without_weights_can_be_planned():
    with torch.device("meta"):
        base = random_base("qwen3", rope_parameters=LLAMA3, context=64)
        drafter = head(base, "drafter=ctc")
    assert all(value.is_meta for value in drafter.trainable_parameters())
    assert drafter.initialised.startswith("from the base's last layer if the outputs agree")
