"""Speculative sampling with drafters of several steps: drawn words have the law they carry, and the text the base's."""

from __future__ import annotations

import itertools

import pytest
import torch
from laws import MIN_P_VALUE, p_value
from stepwise_parts import make_sequential_drafter, saved_lm
from test_drawn import PROMPT, TEMPERATURE, VERIFIERS, WORDS, base, exact, texts  # noqa: F401
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.rejection import Rejection, multi_round
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.trees.request import DraftSampling
from ctcdraft.drafters.trees.sampled_chains import SampledChains
from ctcdraft.models.base_model import BaseLM


def drafter_of(kind, base, folder, tree):  # noqa: F811
    if kind == "draft_model":
        path = saved_lm(folder, "llama", seed=7, vocabulary=WORDS, context=32, eos_token_id=3)
        return DraftModel(base, path, None, 4, tree).eval()
    return make_sequential_drafter(kind, base, folder, 4, tree)


@pytest.mark.parametrize(("verify", "chains"), VERIFIERS, ids=["leviathan", "specinfer", "spectr"])
@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_the_text_has_the_bases_law(base, exact, kind, verify, chains, tmp_path):  # noqa: F811
    drafter = drafter_of(kind, base, tmp_path, SampledChains(chains))
    assert p_value(texts(base, drafter, verify, 400), exact) > MIN_P_VALUE


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["draft_model", "hydra", "eagle"])
def test_chains_are_drawn_from_the_laws_they_carry(base, kind, tmp_path):  # noqa: F811
    """Two words deep, against the drafter's own laws asked one text at a time; the laws of the tree are those."""
    drafter = drafter_of(kind, base, tmp_path, SampledChains(1))
    states = base.hidden_states(PROMPT[None, :-1], torch.ones(1, len(PROMPT) - 1, dtype=torch.int64))[0]
    context, one = Context(PROMPT, states, 3, 9), torch.zeros(1, dtype=torch.int64)
    law, counts = [], [0] * WORDS**2
    for first, second in itertools.product(range(WORDS), repeat=2):
        laws = drafter.step_function(context, None)
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
    assert p_value(counts, law) > MIN_P_VALUE
    assert p_value(counts, [1 / WORDS**2] * WORDS**2) < MIN_P_VALUE  # and a wrong law is seen to be wrong


def test_bent_by_pencil():
    """.4 .2 and a stop of .4 at T = 1/2: .16 to .04 among themselves. An impossible text stays without a law."""
    how = DecodingSettings(3, 12, 0.5, 0, 1.0, Rejection(multi_round), True)
    words = torch.tensor([[0.4, 0.2, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    bent = DraftSampling(torch.Generator(), how.process_draft_logits).warp_probs(words)
    assert bent[0].tolist() == pytest.approx([0.48, 0.12, 0])
    assert bent[1].tolist() == [0, 0, 0]
    assert torch.allclose(DraftSampling(torch.Generator()).warp_probs(words), words)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 0, 0.8), (0.7, 5, 1.0)]
)
def test_the_base_is_never_refused_as_its_own_draft(temperature, top_k, top_p, tmp_path):
    """Drafts are drawn under the law of decoding: a twin of the base claims what the base would say, whatever that is.
    Not quite at a cut of top-p: there the rounding of a tree may move a word across the edge."""
    twin = BaseLM(random_lm(initializer_range=0.12), tiny_tokenizer(), "twin")
    twin.lm.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    drafter = DraftModel(twin, str(tmp_path), None, 4, SampledChains(1)).eval()
    how = DecodingSettings(40, 8, temperature, top_k, top_p, Rejection(multi_round), True, token_for_token=False)
    passes = [one for seed in range(4) for one in generate(twin, drafter, PROMPT + 5, how, frozenset(), seed).passes]
    assert sum(one.accepted for one in passes) >= 0.99 * sum(one.drafted for one in passes) > 50


def test_a_context_keeps_its_law(base):  # noqa: F811
    seen = []

    class Watch:
        def draft(self, context, memory, rng):
            seen.append(context.logits_processor)
            return TokenTree.only_root(context.root), None

    how = DecodingSettings(5, 8, 0.5, 0, 1.0, Rejection(multi_round), True)
    generate(base, Watch(), PROMPT, how, frozenset(), 0)
    assert len(seen) == 4
    assert set(seen) == {how.process_draft_logits}
