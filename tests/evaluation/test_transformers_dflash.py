"""transformers' DFlash with the weights of one of our heads: it drafts and commits what ours does, step by step."""

from __future__ import annotations

import pytest
import torch
import transformers
from test_lossless import settings
from tiny_models import random_base

from ctcdraft.config.cli import compose_config
from ctcdraft.config.contestants import resolve
from ctcdraft.config.drafters import build_drafter
from ctcdraft.decoding import loop
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import generate_answer
from ctcdraft.evaluation.transformers_dflash import TransformersDFlash
from ctcdraft.models.aux_layers import view_of_layers
from ctcdraft.models.base_model import BaseLM

PROMPT = torch.tensor([0, 3, 1, 2, 2, 4, 0, 5])
has_dflash = pytest.mark.skipif(
    not hasattr(transformers, "MuseGlimmerAssistantModel"),
    reason=f"no DFlash in transformers {transformers.__version__}",
)


@pytest.fixture
def base():
    # Few tokens, so that some draft tokens are right by chance.
    made = random_base(context=128, vocabulary=6)
    return BaseLM(made.lm, made.tokenizer, made.name, aux_layers=["last", 1, 0])


def head_for(base, *overrides: str, seed: int = 0):
    overrides = (
        "drafter=dflash",
        "drafter.frames=4",
        "drafter.body.blocks=2",
        "drafter/tree=per_frame_chain",
        *overrides,
    )
    torch.manual_seed(seed)
    drafter = build_drafter(compose_config("train", *overrides).drafter, base)
    with torch.no_grad():  # norms that are not all one, and a mask that is not near zero
        for weight in drafter.trainable_parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
        drafter.head.blank_bias.fill_(-1e4)  # transformers has no blank
    return drafter.for_inference(base)


@has_dflash
@pytest.mark.parametrize("layers", [["last", 1, 0], ["last", 0, 1], ["last", 0]])
def test_steps_equal_ours(base, layers):
    """With all layers of the base, in another order, and with one of them."""
    committed: list[int] = []
    for seed in range(4):
        head = head_for(view_of_layers(base, layers), seed=seed)
        stock = TransformersDFlash(base, head)
        for tokens in (37, 60):
            theirs = generate_answer(base, stock, PROMPT, settings(tokens=tokens), frozenset(), 0)
            ours = generate_answer(base, head, PROMPT, settings(tokens=tokens), frozenset(), 0)
            truth = loop.generate(base, Autoregressive(base), PROMPT, settings(tokens=tokens), frozenset(), 0)
            assert theirs.tokens == ours.tokens == truth.tokens
            steps = [step.committed for step in theirs.passes]
            assert steps == [step.committed for step in ours.passes]
            committed += steps
    assert 1 < sum(committed) / len(committed) < 5
    assert "get_input_embeddings" not in vars(base.lm)


@has_dflash
def test_other_heads_are_refused(base):
    ctc_frames = ["drafter=ctc", "drafter/body=dflash", "drafter/tree=collapse_chain"]
    for overrides in (["drafter=ctc"], ctc_frames, ["drafter/correction=gru"], ["drafter.body.causal=true"]):
        with pytest.raises(InputError, match="needs a head of drafter=dflash as published"):
            TransformersDFlash(base, head_for(base, *overrides))
    with pytest.raises(InputError, match=r"got base.aux_layers=\[last\]"):
        TransformersDFlash(base, head_for(view_of_layers(base, ["last"])))


@has_dflash
def test_rotary_frequencies_are_float32_in_half_precision(base):
    base = base.to(torch.bfloat16)
    stock = TransformersDFlash(base, head_for(base))
    assert stock.assistant.dtype == torch.bfloat16
    assert stock.assistant.rotary_emb.inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)


def test_the_head_is_a_part():
    with pytest.raises(InputError, match="transformers_dflash needs its part head"):
        resolve("transformers_dflash")
