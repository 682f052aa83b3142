"""Drawn chains of frames that listen to the text: the rows they carry, against every alignment."""

from __future__ import annotations

import pytest
import torch
from laws import MIN_P_VALUE, assert_draft_probs, p_value, path_tokens
from test_listening import begin, frames, law_of
from truths_heads import beginnings, slow_conditioned_texts

from ctcdraft.decoding.rejection import sampling_order
from ctcdraft.drafters.trees.request import DraftSampling, TreeRequest
from ctcdraft.drafters.trees.sampled_labels import SampledLabels, SampledTokens
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("chains", [1, 3])
def test_a_correction_composes_with_the_exact_law(kind, chains):
    """Frames that listen to the text, every alignment: the rows of drawn chains, and that they stop as often."""
    log_probs_TC = frames(2, 4)
    listening = begin(kind, log_probs_TC)
    texts = slow_conditioned_texts(law_of(listening), 4, 4, 3)
    masses = beginnings(texts)
    seen = dict.fromkeys(sorted(texts), 0)

    def law(text):
        return [masses.get((*text, word), 0) / (masses[text] if text else 1) for word in range(3)]

    for seed in range(200):
        rng = torch.Generator().manual_seed(seed)
        tree = SampledLabels(chains)(
            log_probs_TC, TreeRequest(torch.tensor(1), 4, 1 + 4 * chains, (), DraftSampling(rng)), listening
        )
        if seed < 20:
            assert_draft_probs(tree, law, 4)
        draws_NK, node = sampling_order(tree), 0
        while (child := int(draws_NK[node, 0])) >= 0:
            node = child
        seen[path_tokens(tree, node)] += 1
    assert p_value(list(seen.values()), [texts[text] for text in seen]) > MIN_P_VALUE


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("kind", [None, MarkovCorrection])
def test_words_drawn_frame_by_frame_carry_their_law(kind, chains):
    log_probs_TC = frames(4, 3)
    listening = begin(kind, log_probs_TC) if kind else None
    plain = log_probs_TC[:, :-1].softmax(-1).tolist()

    def law(text):
        if listening is None:
            return plain[len(text)]
        words = law_of(listening)(len(text), text)[:-1]
        return [p / sum(words) for p in words]

    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        tree = SampledTokens(chains)(
            log_probs_TC, TreeRequest(torch.tensor(1), 9, 1 + 3 * chains, (), DraftSampling(rng)), listening
        )
        assert len(tree) > 3  # words never stop
        assert_draft_probs(tree, law, 3)
