"""DFlash, DSpark, Domino and P-EAGLE against their reference implementations: the same logits and the same draft."""

from __future__ import annotations

import pytest
import torch
from golden_files import GOLDEN, configured_drafter, load_golden, load_mapped
from tiny_models import random_base

from ctcdraft.decoding.loop import Context
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.base_layer import BASE_PARAMETER_NAMES

FRAMES, WIDTH = 3, 8
FUSION = {"fc.weight": "body.fc.weight", "hidden_norm.weight": "body.text_norm.weight"}
RENAMED = {
    "dflash": {
        "encoder.fc.weight": "body.fc.weight",
        "encoder.output_norm_enc.weight": "body.text_norm.weight",
    },
    "dspark": {
        **FUSION,
        "markov_head.markov_w1.weight": "correction.enter.weight",
        "markov_head.markov_w2.weight": "correction.out.weight",
    },
    "domino": {
        **FUSION,
        "prefix_gru.weight_ih_l0": "correction.cell.weight_ih",
        "prefix_gru.weight_hh_l0": "correction.cell.weight_hh",
        "embed_proj.0.weight of frames": "correction.of_frame.weight",
        "embed_proj.0.weight of the GRU": "correction.of_tokens.weight",
        "embed_proj.2.weight": "correction.out.weight",
    },
    "peagle": {
        "fc.weight": "body.fc.weight",
        "mask_hidden": "body.mask_state_E",
        "layers.0.input_layernorm.weight": "body.block.attention_norm.norms.0.weight",
        "layers.0.hidden_norm.weight": "body.block.attention_norm.norms.1.weight",
    },
}
SIZES = {
    "dspark": ["drafter.correction.rank=4"],
    "domino": ["drafter.correction.rank=4", "drafter.correction.memory=6"],
}
OUTPUTS = {"logits", "draft", "first_logits", "first_draft", "second_logits", "second_draft"}
NOT_WEIGHTS = {"layers", "tokens", "embedding", "lm_head", *OUTPUTS}


def names_of_layers(tensors) -> dict[str, str]:
    """Return our names of the weights of the reference's layers."""
    places = {"layers.0": "body.block", "layers.1": "body.deeper.0"}
    names = {f"{layer}.{theirs}": f"{place}.{ours}" for layer, place in places.items()
             for ours, theirs in BASE_PARAMETER_NAMES.items()}  # fmt: skip
    return {theirs: ours for theirs, ours in names.items() if theirs in tensors}


def make_drafter(method: str, golden):
    """Return the drafter of configs/drafter with the reference's weights and sizes, on a base with its embedding."""
    base = random_base(
        hidden_size=WIDTH, intermediate_size=6, num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocabulary=16
    )
    base = BaseLM(base.lm, base.tokenizer, base.name, aux_layers=["last", 0, 1])
    base.embedding.weight.data = golden["embedding"]
    base.head.weight.data = golden["lm_head"]
    sizes = [f"drafter.frames={FRAMES}", "drafter.body.blocks=2", "drafter/tree=per_frame_chain"]
    torch.manual_seed(0)
    drafter = configured_drafter(method, base, *sizes, *SIZES.get(method, ()))
    drafter.head.requires_grad_(False)  # the blank, which cross-entropy leaves untrained
    weights = {name: value for name, value in golden.items() if name not in NOT_WEIGHTS}
    if method == "domino":
        mlp = weights.pop("embed_proj.0.weight")
        weights["embed_proj.0.weight of frames"], weights["embed_proj.0.weight of the GRU"] = mlp.split([WIDTH, 6], 1)
    if method == "peagle":
        weights["mask_hidden"] = weights["mask_hidden"].flatten()
    weights["embedding of the mask"] = golden["embedding"][-1]
    mapping = {
        **names_of_layers(weights), **RENAMED[method], "norm.weight": "body.norm.weight",
        "embedding of the mask": "body.mask_D",
    }  # fmt: skip
    load_mapped(drafter, weights, mapping)
    return drafter.eval()


def draft_of(drafter, tokens_L, layers_LE, memory=None):
    """Return the logits of the frames along the draft, the draft, and the memory after it. layers_LE: of new tokens."""
    last_LD = torch.zeros(len(layers_LE), WIDTH)  # of the base's last layer, which none of them reads
    context = Context(tokens_L, torch.cat([last_LD, layers_LE], dim=1), FRAMES + 1, FRAMES + 1)
    tree, after = drafter.draft(context, memory, torch.Generator())
    after.crop(len(tokens_L) - 1 - len(layers_LE))
    emissions = drafter.emit(context, after)
    logits_TV, draft = emissions.logits()[0, 0, :, :-1], tree.tokens_N[1:]
    if drafter.correction is not None:
        memories_PR = drafter.correction.memories_along(emissions.start_BAR[:, 0], draft[None])[0]
        logits_TV = logits_TV + drafter.correction(memories_PR[:-1])
    return logits_TV, draft, after


@pytest.mark.parametrize("method", ["dspark", "domino", "peagle"])
@torch.inference_mode()
def test_draft_equals_the_reference(method):
    golden = load_golden(method)
    with torch.inference_mode(False):
        drafter = make_drafter(method, golden)
    logits_TV, draft, _ = draft_of(drafter, golden["tokens"][0], golden["layers"][0])
    torch.testing.assert_close(logits_TV, golden["logits"], rtol=0, atol=1e-5)
    assert draft.tolist() == golden["draft"].tolist()


@torch.inference_mode()
def test_dflash_drafts_what_transformers_does():
    """Twice: after the prompt, and after two draft tokens were accepted."""
    golden = load_golden("dflash")
    with torch.inference_mode(False):
        drafter = make_drafter("dflash", golden)
    tokens_L, layers_LE, memory = golden["tokens"][0], golden["layers"][0], None
    first = len(layers_LE) - FRAMES
    for name, start, end in (("first", 0, first), ("second", first, len(layers_LE))):
        logits_TV, draft, memory = draft_of(drafter, tokens_L[: end + 1], layers_LE[start:end], memory)
        torch.testing.assert_close(logits_TV, golden[f"{name}_logits"], rtol=0, atol=1e-5)
        assert draft.tolist() == golden[f"{name}_draft"].tolist()


def test_golden_tensors_are_small():
    names = [file.stem for file in GOLDEN.glob("*.safetensors")]
    assert len(names) > 8
    assert sum(tensor.nbytes for name in names for tensor in load_golden(name).values()) <= 100_000
