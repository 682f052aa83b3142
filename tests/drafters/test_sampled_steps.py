"""Speculative sampling with sequential drafters: sampled tokens and outputs follow their distributions."""

from __future__ import annotations

import itertools

import pytest
import torch
from chi_square import MIN_P_VALUE, p_value
from sequential_parts import make_sequential_drafter, saved_lm
from test_sampled_drafts import PROMPT, TEMPERATURE, VERIFIERS, WORDS, base, exact, texts  # noqa: F401
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import Rejection, multi_round
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.trees.request import DraftSampling
from ctcdraft.drafters.trees.sampled import SampledChains
from ctcdraft.models.base_model import BaseLM


def drafter_of(kind, base, folder, tree):  # noqa: F811
    if kind == "draft_model":
        path = saved_lm(folder, "llama", seed=7, vocabulary=WORDS, context=32, eos_token_id=3)
        return DraftModel(base, path, None, 4, tree).eval()
    return make_sequential_drafter(kind, base, folder, 4, tree)


@pytest.mark.parametrize(("verify", "chains"), VERIFIERS, ids=["leviathan", "specinfer", "spectr"])
@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_the_output_follows_the_bases_distribution(base, exact, kind, verify, chains, tmp_path):  # noqa: F811
    drafter = drafter_of(kind, base, tmp_path, SampledChains(chains))
    assert p_value(texts(base, drafter, verify, 400), exact) > MIN_P_VALUE


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["draft_model", "hydra", "eagle", "eagle3"])
def test_chains_follow_the_distributions_in_the_tree(base, kind, tmp_path):  # noqa: F811
    """Two tokens deep, against the drafter's own distributions for one text at a time."""
    drafter = drafter_of(kind, base, tmp_path, SampledChains(1))
    states = base.hidden_states(PROMPT[None, :-1], torch.ones(1, len(PROMPT) - 1, dtype=torch.int64))[0]
    context, one = Context(PROMPT, states, 3, 9), torch.zeros(1, dtype=torch.int64)
    truth, counts = [], [0] * WORDS**2
    for first, second in itertools.product(range(WORDS), repeat=2):
        step_function = drafter.step_function(context, None)
        p = step_function(PROMPT[-1:], one).double().softmax(-1)[0, first]
        truth.append(float(p * step_function(torch.tensor([first]), one).double().softmax(-1)[0, second]))
    drafter.stops = ()
    rng = torch.Generator().manual_seed(0)
    for _ in range(500):
        tree, _ = drafter.draft(context, None, rng)
        _, first, second = tree.tokens_N.tolist()
        counts[first * WORDS + second] += 1
        in_tree = float(tree.draft_probs_NV[0, first] * tree.draft_probs_NV[1, second])
        assert in_tree == pytest.approx(truth[first * WORDS + second], rel=1e-4)
    assert p_value(counts, truth) > MIN_P_VALUE
    assert p_value(counts, [1 / WORDS**2] * WORDS**2) < MIN_P_VALUE  # and another distribution is rejected


def test_temperature_of_sampled_drafts_by_hand():
    """.4 .2 and the end with .4 at T = 1/2: the tokens become .16 to .04 among themselves; zeros stay zeros."""
    how = DecodingSettings(3, 12, 0.5, 0, 1.0, Rejection(multi_round), True)
    probs_KV = torch.tensor([[0.4, 0.2, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    warped_KV = DraftSampling(torch.Generator(), how.process_draft_logits).warp_probs(probs_KV)
    assert warped_KV[0].tolist() == pytest.approx([0.48, 0.12, 0])
    assert warped_KV[1].tolist() == [0, 0, 0]
    assert torch.allclose(DraftSampling(torch.Generator()).warp_probs(probs_KV), probs_KV)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 0, 0.8), (0.7, 5, 1.0)]
)
def test_the_bases_own_draft_is_accepted(temperature, top_k, top_p, tmp_path):
    """Draft tokens are sampled after temperature, top-k and top-p, so a copy of the base drafts its distribution.

    Not exactly with top-p, where the rounding of a forward pass over a tree may move a token across the threshold.
    """
    twin = BaseLM(random_lm(initializer_range=0.12), tiny_tokenizer(), "twin")
    twin.lm.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    drafter = DraftModel(twin, str(tmp_path), None, 4, SampledChains(1)).eval()
    how = DecodingSettings(40, 8, temperature, top_k, top_p, Rejection(multi_round), True, token_for_token=False)
    steps = [one for seed in range(4) for one in generate(twin, drafter, PROMPT + 5, how, frozenset(), seed).passes]
    assert sum(one.accepted for one in steps) >= 0.99 * sum(one.drafted for one in steps) > 50


def test_contexts_have_the_logits_processor_of_decoding(base):  # noqa: F811
    seen = []

    class Recorder:
        def draft(self, context, memory, rng):
            seen.append(context.logits_processor)
            return TokenTree.only_root(context.root), None

    how = DecodingSettings(5, 8, 0.5, 0, 1.0, Rejection(multi_round), True)
    generate(base, Recorder(), PROMPT, how, frozenset(), 0)
    assert len(seen) == 4
    assert set(seen) == {how.process_draft_logits}
