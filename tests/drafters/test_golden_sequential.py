"""Medusa, Hydra, EAGLE, EAGLE-3 and ReDrafter against their reference implementations, whose outputs are stored."""

from __future__ import annotations

import pytest
import torch
from golden_files import configured_drafter, load_golden, load_mapped
from tiny_models import random_lm

from ctcdraft.batch import Batch
from ctcdraft.decoding.loop import Context
from ctcdraft.models.base_model import BaseLM

WIDTH, FRAMES = 8, 3
CHOICES = ["drafter.tree.choices=[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,1]]"]
DYNAMIC, CHAIN = ["drafter.tree.width=4", "drafter.tree.children=4"], ["drafter/tree=chain"]
LAYER = {
    "self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key", "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down", "post_attention_layernorm": "mlp_norm",
}  # fmt: skip
PAIR = {"input_layernorm": "attention_norm.norms.0", "hidden_norm": "attention_norm.norms.1"}
EAGLE3 = {"fc.weight": "fuse.weight", "norm.weight": "norm.weight", "lm_head.weight": "head.words.weight"}


def layer_names(theirs: str, ours: str, parts: dict[str, str]) -> dict[str, str]:
    return {f"{theirs}.{part}.weight": f"{ours}.{name}.weight" for part, name in parts.items()}


def golden_base(golden, aux_layers=("last",)) -> BaseLM:
    """Return a base with the embedding and the lm_head of the reference, and no stop tokens; its layers are not run."""
    vocabulary = len(golden["embedding"])
    sizes = dict(hidden_size=WIDTH, intermediate_size=6, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    lm = random_lm(vocabulary=vocabulary, context=64, rms_norm_eps=1e-6, eos_token_id=0, **sizes)
    lm.get_input_embeddings().weight.data = golden["embedding"]
    lm.get_output_embeddings().weight.data = golden["lm_head"]
    base = BaseLM(lm, None, "golden")
    base.aux_layers, base.stop_token_ids = list(aux_layers), frozenset()
    return base


def fill(drafter, golden, mapping):
    load_mapped(drafter, {name: golden[name] for name in mapping}, mapping)
    unmapped = set(golden) - set(mapping) - {"layers", "tokens", "embedding", "lm_head"}
    assert unmapped <= {"logits", "draft", "ancestors", "drafted", "lm_head.weight"}
    return drafter.eval()


def states_of(golden, width):
    """Return the hidden states of the base: those of the last layer, which a head of auxiliary layers ignores."""
    aux = golden["layers"]
    return aux if aux.shape[-1] == width else torch.cat([torch.full_like(aux[..., :width], torch.nan), aux], dim=-1)


def training_logits(drafter, golden, frames):
    """Return logits_LTV of the training forward with every position as an anchor."""
    tokens, length = golden["tokens"], golden["layers"].shape[1]
    anchors = torch.arange(length)[None]
    labels = torch.zeros(1, length, frames, dtype=torch.long)
    places = torch.arange(length + 1)[None]
    states = torch.cat([states_of(golden, WIDTH), torch.zeros(1, 1, states_of(golden, WIDTH).shape[-1])], dim=1)
    batch = Batch(tokens, states, anchors, tokens[:, 1:], labels, torch.ones_like(anchors), places)
    return drafter(batch).logits()[0]


def draft(drafter, golden, nodes):
    context = Context(golden["tokens"][0], states_of(golden, WIDTH)[0], 30, nodes)
    return drafter.draft(context, None, torch.Generator())[0]


def texts(tokens, ancestors) -> set[tuple[int, ...]]:
    return {tuple(tokens[row].tolist()) for row in ancestors.bool()}


EAGLE_NAMES = {
    "fc.weight": "fuse.weight", "fc.bias": "fuse.bias", **layer_names("layers.0", "block", LAYER)
}  # fmt: skip
# Overrides of configs/drafter, auxiliary layers of the base, and the reference's names of weights with ours.
CASES = {
    "eagle": (DYNAMIC, ("last",), EAGLE_NAMES),
    "eagle3": (
        [*DYNAMIC, "drafter.vocabulary=9"],
        ("last", 0, 1, 2),
        {**EAGLE3, **layer_names("midlayer", "block", LAYER | PAIR)},
    ),
    "eagle3_1": (
        CHAIN,
        ("last", 0, 1),
        {
            **EAGLE3,
            **layer_names("layers.0", "block", LAYER | PAIR),
            **{f"fc_norm.{n}.weight": f"layer_norms.norms.{n}.weight" for n in range(2)},
        },
    ),
}


def hydra_names(layers: int) -> dict[str, str]:
    """Return the names of a first residual layer, which also condenses, and of further ones; and of lm_heads."""
    names = {}
    for frame in range(FRAMES):
        # With dropout the reference's residual layers have every second number.
        places = [f"hydra_mlp.{frame}.{n if layers == 1 else 2 * n + 1}" for n in range(layers)]
        lm_head = f"hydra_lm_head.{frame}{'' if layers == 1 else '.1'}"
        for kind in ("weight", "bias"):
            names[f"{places[0]}.res_connection.{kind}"] = f"heads.{frame}.condense.{kind}"
            names |= {f"{place}.linear.{kind}": f"heads.{frame}.layers.{n}.{kind}" for n, place in enumerate(places)}
            names[f"{lm_head}.{kind}"] = f"head.frames.{frame}.{kind}"
    return names


PREFIX = "prefix_embeding_layer"
CASES |= {
    "medusa": (
        CHOICES,
        ("last",),
        {f"{n}.0.linear.{kind}": f"body.heads.{n}.0.{kind}" for n in range(FRAMES) for kind in ("weight", "bias")}
        | {f"{n}.1.weight": f"head.frames.{n}.weight" for n in range(FRAMES)},
    ),
    "hydra": (CHOICES, ("last",), hydra_names(1)),
    "hydra_plus": (
        [*CHAIN, "drafter.layers=2"],
        ("last",),
        hydra_names(2)
        | layer_names(f"{PREFIX}.layers.0", "prefix", LAYER | {"input_layernorm": "attention_norm"})
        | {f"{PREFIX}.norm.weight": "prefix_norm.weight"},
    ),
    "redrafter_wide": (
        CHAIN,
        ("last",),
        {"rnn_w.weight": "token.weight", "rnn_u.weight": "recurrent.weight", "rnn_u.bias": "recurrent.bias"}
        | {f"lm_head.{n}.linear.{kind}": f"layers.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")}
        | {"lm_head.2.weight": "head.words.weight"},
    ),
}
# Rows whose tokens lie behind the text, or in Hydra's reference at its beginning.
UNKNOWN = {"medusa": lambda step: 0, "hydra": lambda step: step + 1, "hydra_plus": lambda step: step + 1}


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_logits_and_draft_equal_those_of_the_reference(name):
    overrides, aux_layers, mapping = CASES[name]
    golden = {key: value if value.dtype == torch.int64 else value.float() for key, value in load_golden(name).items()}
    base = golden_base(golden, aux_layers)
    method = name.removesuffix("_wide")
    drafter = fill(configured_drafter(method, base, f"drafter.frames={FRAMES}", *overrides), golden, mapping)
    if "drafted" in golden:
        drafter.head.words.words_N.copy_(golden["drafted"])
        drafter.after_load()
    logits, expected = training_logits(drafter, golden, FRAMES), golden["logits"]
    if "drafted" in golden:
        logits = logits[..., golden["drafted"]]
    if name == "medusa":
        logits = logits[..., :-1]  # without the blank
    if expected.dim() == 2:  # of the first step alone
        expected, logits = expected[None], logits[:, :1]
    for step, rows in enumerate(expected):
        known = len(rows) - UNKNOWN.get(name, lambda step: step)(step)
        torch.testing.assert_close(logits[:known, step], rows[:known], rtol=0, atol=1e-5)
    if "ancestors" in golden:
        tree = draft(drafter, golden, len(golden["draft"]))
        assert texts(tree.tokens_N, tree.ancestors_NN) == texts(golden["draft"], golden["ancestors"])
    else:
        assert draft(drafter, golden, 1 + FRAMES).tokens_N[1:].tolist() == golden["draft"].tolist()
