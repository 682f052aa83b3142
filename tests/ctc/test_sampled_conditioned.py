"""Sampled chains of label-conditioned frames: their draft probabilities against every alignment."""

from __future__ import annotations

import pytest
import torch
from chi_square import MIN_P_VALUE, assert_draft_probs, p_value, path_tokens
from test_conditioned_search import begin, frame_distribution_of, frames
from truths import beginnings
from truths_heads import slow_conditioned_texts

from ctcdraft.decoding.verification import sampling_order
from ctcdraft.drafters.trees.request import DraftSampling, TreeRequest
from ctcdraft.drafters.trees.sampled import SampledLabels, SampledTokens
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("chains", [1, 3])
def test_a_correction_composes_with_the_exact_distribution(kind, chains):
    """Against every alignment: the draft probabilities of sampled chains, and how often they stop."""
    log_probs_TC = frames(2, 4)
    conditioned = begin(kind, log_probs_TC)
    texts = slow_conditioned_texts(frame_distribution_of(conditioned), 4, 4, 3)
    masses = beginnings(texts)
    counts = dict.fromkeys(sorted(texts), 0)

    def distribution(text):
        return [masses.get((*text, token), 0) / (masses[text] if text else 1) for token in range(3)]

    for seed in range(200):
        rng = torch.Generator().manual_seed(seed)
        tree = SampledLabels(chains)(
            log_probs_TC, TreeRequest(torch.tensor(1), 4, 1 + 4 * chains, (), DraftSampling(rng)), conditioned
        )
        if seed < 20:
            assert_draft_probs(tree, distribution, 4)
        samples_NK, node = sampling_order(tree), 0
        while (child := int(samples_NK[node, 0])) >= 0:
            node = child
        counts[path_tokens(tree, node)] += 1
    assert p_value(list(counts.values()), [texts[text] for text in counts]) > MIN_P_VALUE


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("kind", [None, MarkovCorrection])
def test_tokens_sampled_frame_by_frame_carry_their_distribution(kind, chains):
    log_probs_TC = frames(4, 3)
    conditioned = begin(kind, log_probs_TC) if kind else None
    plain = log_probs_TC[:, :-1].softmax(-1).tolist()

    def distribution(text):
        if conditioned is None:
            return plain[len(text)]
        probs = frame_distribution_of(conditioned)(len(text), text)[:-1]
        return [p / sum(probs) for p in probs]

    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        tree = SampledTokens(chains)(
            log_probs_TC, TreeRequest(torch.tensor(1), 9, 1 + 3 * chains, (), DraftSampling(rng)), conditioned
        )
        assert len(tree) > 3  # tokens never stop
        assert_draft_probs(tree, distribution, 3)
