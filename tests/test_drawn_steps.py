"""Speculative sampling with drafters of several steps: drawn words have the law they carry, and the text the base's."""

from __future__ import annotations

import itertools

import pytest
import torch
from laws import CHANCE, p_value
from stepwise_parts import saved_lm, stepwise
from test_drawn import PROMPT, TEMPERATURE, VERIFIERS, WORDS, base, exact, texts  # noqa: F401

from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.drawn import Drawn


def drafter_of(kind, base, folder, growth):  # noqa: F811
    if kind == "draft_model":
        path = saved_lm(folder, "llama", seed=7, vocabulary=WORDS, context=32, eos_token_id=3)
        return DraftModel(base, path, None, 4, growth).eval()
    return stepwise(kind, base, folder, 4, growth)


@pytest.mark.parametrize(("verify", "chains"), VERIFIERS, ids=["leviathan", "specinfer", "spectr"])
@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_the_text_has_the_bases_law(base, exact, kind, verify, chains, tmp_path):  # noqa: F811
    drafter = drafter_of(kind, base, tmp_path, Drawn(chains))
    assert p_value(texts(base, drafter, verify, 400), exact) > CHANCE


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["draft_model", "hydra", "eagle"])
def test_chains_are_drawn_from_the_laws_they_carry(base, kind, tmp_path):  # noqa: F811
    """Two words deep, against the drafter's own laws asked one text at a time; the laws of the tree are those."""
    drafter = drafter_of(kind, base, tmp_path, Drawn(1))
    states = base.states(PROMPT[None, :-1], torch.ones(1, len(PROMPT) - 1, dtype=torch.int64))[0]
    context, one = Context(PROMPT, states, 3, 9), torch.zeros(1, dtype=torch.int64)
    law, counts = [], [0] * WORDS**2
    for first, second in itertools.product(range(WORDS), repeat=2):
        laws = drafter.laws(context, None)
        p = laws(PROMPT[-1:], one).double().softmax(-1)[0, first]
        law.append(float(p * laws(torch.tensor([first]), one).double().softmax(-1)[0, second]))
    drafter.stops = ()
    rng = torch.Generator().manual_seed(0)
    for _ in range(500):
        tree, _ = drafter.draft(context, None, rng)
        _, first, second = tree.tokens_N.tolist()
        counts[first * WORDS + second] += 1
        carried = float(tree.draft_probs_NV[0, first] * tree.draft_probs_NV[1, second])
        assert carried == pytest.approx(law[first * WORDS + second], rel=1e-4)
    assert p_value(counts, law) > CHANCE
    assert p_value(counts, [1 / WORDS**2] * WORDS**2) < CHANCE  # and a wrong law is seen to be wrong
