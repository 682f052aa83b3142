"""The narrow ReDrafter against Apple's code; the published width is in test_golden_sequential.py."""

from __future__ import annotations

import pytest
import torch
import transformers
from golden_files import configured_drafter, load_golden, load_mapped
from tiny_models import random_base, tiny_tokenizer
from truths_trees import texts

from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.redrafter import ReDrafter
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.models.base_model import BaseLM

WEIGHTS = {  # Apple's names -> ours; their lm_head is trained, this one is the base's
    "input_proj.weight": "project.weight",
    "input_proj.bias": "project.bias",
    "rnn_w.weight": "token.weight",
    "rnn_u.weight": "recurrent.weight",
    "rnn_u.bias": "recurrent.bias",
    **{f"lm_head.{n}.linear.{part}": f"layers.{n}.{part}" for n in (0, 1) for part in ("weight", "bias")},
}


@pytest.mark.parametrize("own_head", [True, False])
def test_it_starts_at_random_only_with_an_lm_head_of_its_own(own_head):
    """As torch draws linear layers, like Apple's; or so that the base's lm_head reads nearly the base's own states."""
    base = random_base()
    drafter = ReDrafter(base, 5, 2, DynamicTree(4, 4), own_head=own_head)
    anchors = torch.randn(3, base.width)
    states = drafter.step(anchors, torch.tensor([1, 2, 3]), torch.zeros_like(anchors))[0]
    assert states.shape == (3, 2 * base.width if own_head else base.width)
    weights = {name for name in drafter.trainable_state_dict() if name.startswith("head")}
    assert weights == ({"head.words.weight"} if own_head else set())
    if own_head:
        bound = (2 * base.width) ** -0.5
        for layer in (drafter.head.words, *drafter.layers):
            assert 0.9 * bound < float(layer.weight.detach().abs().max()) <= bound
    else:
        assert float((states - anchors).detach().abs().max()) < 0.5


@torch.inference_mode()
def test_redrafter_drafts_as_apples_code_does():
    golden = load_golden("redrafter")
    theirs = {name.removeprefix("drafter."): golden[name].float() for name in golden if name.startswith("drafter.")}
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    base = BaseLM(transformers.LlamaForCausalLM(config), tiny_tokenizer(), "golden")
    base.stop_token_ids = frozenset()
    base.head.weight.copy_(theirs.pop("lm_head.2.weight"))
    base.embedding.weight.copy_(golden["embedding"])
    tree = ["drafter.tree.width=4", "drafter.tree.children=4"]
    drafter = configured_drafter("redrafter", base, "drafter.own_head=false", *tree).eval()
    load_mapped(drafter, theirs, WEIGHTS)

    context = Context(torch.cat([torch.tensor([3]), golden["root"]]), golden["state"], 30, 64)
    step_function, row = drafter.step_function(context, None), torch.zeros(1, dtype=torch.int64)
    for token, log_probs in zip(golden["chain"][:-1], golden["log_probs"], strict=True):
        assert torch.allclose(step_function(token[None], row)[0], log_probs, atol=1e-5)
    tree, _ = drafter.draft(context, None, torch.Generator())
    ours = dict(zip(texts(tree), tree.path_probs_N.tolist()[1:], strict=True))
    for beam, score in zip(golden["beams"].tolist(), golden["scores"].exp().tolist(), strict=True):
        assert ours[tuple(beam[1:])] == pytest.approx(score, rel=1e-4)
