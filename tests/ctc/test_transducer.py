"""The transducer against every alignment: likelihoods, prefix search, and sampled chains."""

from __future__ import annotations

import pytest
import torch
from chi_square import MIN_P_VALUE, assert_draft_probs, p_value, path_tokens
from test_conditioned_search import ROOT, VOCABULARY, WIDTH, begin, correction, frame_distribution_of, frames
from test_likelihoods import close_to, conditioned_frames, objective_scores, windows
from torch import nn
from truths import beginnings, slow_best, texts_of
from truths_heads import independent, slow_conditioned_texts, slow_transduce

from ctcdraft.ctc.conditioned_search import conditioned_prefix_search
from ctcdraft.ctc.forward import transducer_likelihoods
from ctcdraft.ctc.topology import TRANSDUCER_TOPOLOGY
from ctcdraft.decoding.verification import sampling_order
from ctcdraft.drafters.trees.ctc import TransducerSearch
from ctcdraft.drafters.trees.request import ConditionedFrames, DraftSampling, TreeRequest, UnconditionedFrames
from ctcdraft.drafters.trees.sampled import SampledTransductions
from ctcdraft.nn.heads import BlankHead, Emissions
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection


def texts_by_enumeration(distribution, count: int, vocabulary: int = VOCABULARY):
    texts = slow_conditioned_texts(distribution, count, vocabulary + 1, blank=vocabulary, read=slow_transduce)
    assert sum(texts.values()) == pytest.approx(1)
    return texts


def test_likelihoods_by_hand():
    label_TS = torch.tensor([[1 / 2], [1 / 4]], dtype=torch.float64).log()
    blank_TP = torch.tensor([[1 / 2, 1 / 3], [3 / 4, 1 / 3]], dtype=torch.float64).log()
    result = transducer_likelihoods(label_TS, blank_TP, torch.tensor(1))
    assert result.text_X.exp().item() == pytest.approx(7 / 24)
    assert result.prefix_XS.exp().tolist() == pytest.approx([5 / 8])


@pytest.mark.parametrize("seed", range(12))
def test_likelihoods_sum_every_alignment(seed):
    count, vocabulary = 1 + seed % 5, 2 + seed % 2
    log_probs_TUC = conditioned_frames(seed, count, vocabulary)
    labels_XS, lengths_X = windows(seed, 8, 3, vocabulary)
    label, _, blank = objective_scores(log_probs_TUC, labels_XS)
    result = transducer_likelihoods(label, blank, lengths_X)
    texts = texts_by_enumeration(
        lambda t, text: log_probs_TUC[t, text[-1] if text else vocabulary].exp().tolist(), count, vocabulary
    )
    masses = beginnings(texts)
    for window in range(8):
        text = tuple(labels_XS[window, : lengths_X[window]].tolist())
        assert close_to(float(result.text_X[window]), texts.get(text, 0.0))
        for s in range(len(text)):
            assert close_to(float(result.prefix_XS[window, s]), masses.get(text[: s + 1], 0.0))


def test_one_row_of_blanks_stands_for_all():
    label, _, blank = objective_scores(conditioned_frames(0, 4, 2)[:, :1].expand(-1, 3, -1), torch.tensor([[0, 0, 1]]))
    lengths_X = torch.tensor([3])
    for a, b in zip(
        vars(transducer_likelihoods(label, blank, lengths_X)).values(),
        vars(transducer_likelihoods(label, blank[..., :1], lengths_X)).values(),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_gradients_by_finite_differences():
    """Equal tokens, padding and a window without a label among them; three labels fit into three frames."""
    log_probs_TUC = conditioned_frames(3, 3, 2)
    labels_XS = torch.tensor([[0, 0, 0], [0, 1, -1], [-1, -1, -1]])
    lengths_X = torch.tensor([3, 2, 0])
    label, _, blank = (scores.clone().requires_grad_() for scores in objective_scores(log_probs_TUC, labels_XS))

    def finite(*scores):
        result = transducer_likelihoods(*scores, lengths_X)
        assert result.prefix_XS.isfinite().sum(1).tolist() == [3, 2, 0]
        assert result.text_X.isfinite().all()
        return torch.cat([result.text_X, result.prefix_XS.masked_fill(result.prefix_XS.isinf(), 0).flatten()])

    assert torch.autograd.gradcheck(finite, (label, blank))


def test_too_few_frames_are_impossible_and_have_no_gradient():
    label, _, blank = objective_scores(conditioned_frames(3, 2, 2).float(), torch.tensor([[0, 0, 1]]))
    label.requires_grad_()
    result = transducer_likelihoods(label, blank, torch.tensor([3]))
    assert result.text_X.tolist() == [-torch.inf]
    assert result.prefix_XS.isfinite().tolist() == [[True, True, False]]
    (gradient,) = torch.autograd.grad(result.text_X.masked_fill(result.text_X.isinf(), 0).sum(), label)
    assert (gradient == 0).all()
    with pytest.raises(ValueError, match=r"scores are torch\.bfloat16"):
        transducer_likelihoods(label.bfloat16(), blank, torch.tensor([3]))


@pytest.mark.parametrize("kind", [MarkovCorrection, GRUCorrection])
@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_the_search_sums_every_alignment(kind, seed):
    log_probs_TC = frames(seed, 1 + seed % 5)
    conditioned = begin(kind, log_probs_TC)
    masses = beginnings(texts_by_enumeration(frame_distribution_of(conditioned), len(log_probs_TC)))
    for nodes, stops, depth in [(1, (), 99), (9, (), 99), (400, (), 99), (30, (0,), 99), (30, (), 2)]:
        result = conditioned_prefix_search(log_probs_TC, conditioned, nodes, stops, depth, TRANSDUCER_TOPOLOGY)
        truth = slow_best(masses, nodes, stops, depth)
        assert texts_of(result) == [text for text, _ in truth]
        assert result.masses_N.tolist() == pytest.approx([mass for _, mass in truth], abs=1e-10)


@torch.no_grad()
def test_unconditioned_frames_are_searched_too():
    log_probs_TC = frames(1, 4)
    masses = beginnings(texts_by_enumeration(independent(log_probs_TC.exp().tolist()), 4))
    result = conditioned_prefix_search(
        log_probs_TC, UnconditionedFrames.empty(log_probs_TC), 40, topology=TRANSDUCER_TOPOLOGY
    )
    truth = slow_best(masses, 40)
    assert texts_of(result) == [text for text, _ in truth]
    assert result.masses_N.tolist() == pytest.approx([mass for _, mass in truth], abs=1e-10)


@torch.no_grad()
def test_training_scores_the_distribution_that_decoding_searches():
    torch.manual_seed(0)
    head = BlankHead(nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False), WIDTH).double()
    logit_correction = correction(GRUCorrection)
    anchor_11D = torch.linspace(-1, 1, WIDTH, dtype=torch.float64).view(1, 1, -1)
    start_BAR = logit_correction.start(anchor_11D, ROOT.view(1, 1))
    emissions = Emissions(torch.randn(1, 1, 4, WIDTH, dtype=torch.float64), head, logit_correction, start_BAR)
    log_probs_TC = emissions.logits()[0, 0].log_softmax(-1)
    begun = ConditionedFrames.empty(log_probs_TC, logit_correction, start_BAR[0])
    result = conditioned_prefix_search(log_probs_TC, begun, 200, topology=TRANSDUCER_TOPOLOGY)
    masses = dict(zip(texts_of(result), result.masses_N.tolist(), strict=True))
    assert (1, 1, 1, 1) in masses
    for text, mass in masses.items():
        scores = emissions.scores(torch.tensor(text).view(1, 1, -1))
        prefix_XS = transducer_likelihoods(scores.label_BATS, scores.blank_BATP, torch.tensor([[len(text)]])).prefix_XS
        assert prefix_XS[0, 0, -1].exp().item() == pytest.approx(mass, abs=1e-12)


@pytest.mark.parametrize("kind", [None, GRUCorrection])
@pytest.mark.parametrize("chains", [1, 3])
@torch.no_grad()
def test_sampled_chains_carry_their_distribution_and_stop_as_often(kind, chains):
    log_probs_TC = frames(2, 4)
    conditioned = begin(kind, log_probs_TC) if kind else None
    frame_distribution = frame_distribution_of(conditioned) if conditioned else independent(log_probs_TC.exp().tolist())
    texts = texts_by_enumeration(frame_distribution, 4)
    masses = beginnings(texts)
    counts = dict.fromkeys(sorted(texts), 0)

    def distribution(text):
        return [masses.get((*text, token), 0) / (masses[text] if text else 1) for token in range(VOCABULARY)]

    for seed in range(200):
        rng = torch.Generator().manual_seed(seed)
        paths = SampledTransductions(chains)
        tree = paths(log_probs_TC, TreeRequest(ROOT, 4, 1 + 4 * chains, (), DraftSampling(rng)), conditioned)
        if seed < 20:
            assert_draft_probs(tree, distribution, 4)
        samples_NK, node = sampling_order(tree), 0
        while (child := int(samples_NK[node, 0])) >= 0:
            node = child
        counts[path_tokens(tree, node)] += 1
    assert p_value(list(counts.values()), [texts[text] for text in counts]) > MIN_P_VALUE


def test_equal_tokens_need_no_blank_between_them():
    classes = [2, 2, 6, 5, 5]  # CTC reads 2 5
    sure = torch.full((5, 7), -20.0)
    sure[torch.arange(5), torch.tensor(classes)] = 0.0
    tree = TransducerSearch()(sure.log_softmax(-1), TreeRequest(ROOT, 5, 5))
    assert tree.tokens_N.tolist() == [1, 2, 2, 5, 5]
    assert len(TransducerSearch()(sure.log_softmax(-1), TreeRequest(ROOT, 0, 5))) == 1
