"""Losslessness on real pretrained models, to the last position of their context.

The models are expected in a folder beside the repository, or in CTCDRAFT_MODELS=FOLDER; without them the tests skip.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from sequential_parts import make_sequential_drafter
from simple_drafters import Stutter, oracle_drafter, random_drafter
from training_parts import DECODING, block_heads, ctc_head

from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.merged import Merged
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.suffix import SuffixDecoding
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.models.loading import load_base

MODELS = Path(os.environ.get("CTCDRAFT_MODELS", Path(__file__).resolve().parents[2] / "shared" / "models"))
NAMES = ("stories260K", "tinystories-656K", "tinytalk-3M")


@pytest.fixture(scope="module", params=NAMES)
def base(request):
    folder = MODELS / request.param
    if not folder.is_dir():
        pytest.skip(f"no base at {folder}; set CTCDRAFT_MODELS= to the folder that contains {request.param}")
    return load_base(str(folder), "float32", "cpu")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossless_to_the_last_position(base, temperature, tmp_path):
    from dataclasses import replace

    settings = replace(DECODING, max_new_tokens=10_000, nodes=16, temperature=temperature)
    prompt = torch.tensor(base.tokenizer("Once upon a time there was a little dog").input_ids)
    prompt = prompt.repeat(base.context_length // len(prompt))[: base.context_length - 70]
    expected = generate(base, Autoregressive(base), prompt, settings, frozenset(), 1).tokens
    assert len(expected) == 70
    if temperature == 0:
        output = base.lm.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=70, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert expected == tuple(output[0, len(prompt) :].tolist())
    text = torch.cat([prompt, torch.tensor(expected)])
    drafters = [
        oracle_drafter(text, 6),
        Stutter(text, 4),
        random_drafter(base.vocabulary, 12),
        PromptLookup(base, 3, 10),
        SuffixDecoding(base, 8, 2.0, 1.0, 0.1, lambda base: (), 99, remember=False),
        ctc_head(base),
    ]
    drafters += [make_sequential_drafter(kind, base, tmp_path) for kind in ("hydra_own", "hydra++", "eagle", "eagle3")]
    own_draft_model = DraftModel(
        base, str(MODELS / base.name), None, 5, DynamicTree(4, 4)
    ).eval()  # the base as its own draft model
    drafters += [
        own_draft_model,
        Merged(base, drafters[3], own_draft_model),
    ]
    for drafter in drafters + block_heads(base):
        assert generate(base, drafter, prompt, settings, frozenset(), 1).tokens == expected, type(drafter).__name__
