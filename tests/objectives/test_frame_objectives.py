"""Objectives of frames: values computed in another way, gradients in chunks, refused settings."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from truths import beginnings, slow_prefix_probability
from truths_heads import independent, slow_conditioned_texts, slow_transduce

from ctcdraft.batch import Batch
from ctcdraft.drafters.trees.ctc import PrefixSearch
from ctcdraft.errors import InputError
from ctcdraft.nn import chunks
from ctcdraft.nn.draft_vocab import DraftVocabHead
from ctcdraft.nn.frame_values import frame_values
from ctcdraft.nn.heads import BlankHead, Emissions, gather_label_log_probs
from ctcdraft.nn.logit_correction import MarkovCorrection
from ctcdraft.objectives.base import WeightedSum
from ctcdraft.objectives.compatibility import refuse_incompatible
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.objectives.ctc import CTC, PrefixCTC, PrefixTransducer, Transducer
from ctcdraft.objectives.distillation import Distill, kl, total_variation

WORDS, WIDTH = 3, 6


def emissions(frames: int = 4) -> Emissions:
    torch.manual_seed(0)
    head = BlankHead(nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False), WIDTH)
    head.blank_D.data.normal_()
    return Emissions(torch.randn(2, 5, frames, WIDTH, requires_grad=True), head)


def batch(most: int = 3) -> Batch:
    rng = torch.Generator().manual_seed(2)
    lengths_BA = torch.randint(0, most + 1, (2, 5), generator=rng)
    labels_BAS = torch.randint(0, WORDS, (2, 5, most), generator=rng)
    labels_BAS = labels_BAS.masked_fill(torch.arange(most) >= lengths_BA[..., None], -1)
    anchors_BA = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    states_BLD = torch.randn(2, 12, WIDTH, generator=rng)
    unused = torch.zeros(1)
    places_BL = torch.arange(12).expand(2, -1)
    return Batch(unused, states_BLD, anchors_BA, unused, labels_BAS, lengths_BA, places_BL)


OBJECTIVES = {
    "ctc": CTC(labels=3),
    "prefix_ctc": PrefixCTC(labels=3, decay=0.8),
    "transducer": Transducer(labels=3),
    "prefix_transducer": PrefixTransducer(labels=3, decay=0.8),
    "cross_entropy": CrossEntropy(labels=3, decay=0.8),
    "kl": Distill(labels=3, decay=0.8, distance=kl),
    "total_variation": Distill(labels=3, decay=0.8, distance=total_variation),
    "sum": WeightedSum(3, {"a": PrefixCTC(3, 0.8), "b": CrossEntropy(3, 0.5)}, {"a": 1.0, "b": 0.3}),
}


def real_labels(windows: Batch):
    """Yield (row, anchor, k, labels up to the k-th, included)."""
    for row in range(2):
        for anchor in range(5):
            for k in range(int(windows.lengths_BA[row, anchor])):
                yield row, anchor, k, windows.labels_BAS[row, anchor, : k + 1].tolist()


def weighted(values: dict[int, list[float]], decay: float) -> float:
    top = sum(decay**k * value for k, several in values.items() for value in several)
    return top / sum(decay**k * len(several) for k, several in values.items())


def test_prefix_ctc_is_the_weighted_mean_over_all_possible_prefixes():
    outputs, windows = emissions(), batch()
    probs_BATC = outputs.logits().softmax(-1).double().tolist()
    values: dict[int, list[float]] = {0: [], 1: [], 2: []}
    impossible = 0
    for row, anchor, k, prefix in real_labels(windows):
        probability = slow_prefix_probability(probs_BATC[row][anchor], prefix, blank=WORDS)
        if probability > 0:
            values[k].append(-math.log(probability))
        else:
            impossible += 1
    loss = PrefixCTC(3, 0.8)(outputs, windows)
    assert loss.value.item() == pytest.approx(weighted(values, 0.8), abs=1e-5)
    assert impossible > 0  # three equal labels in four frames
    assert loss.metrics["infeasible_share"] == pytest.approx(impossible / (impossible + sum(map(len, values.values()))))


def test_a_transducer_sums_over_frames_that_never_merge():
    outputs, windows = emissions(), batch()
    probs_BATC = outputs.logits().softmax(-1).double().tolist()
    texts, prefixes = [], {0: [], 1: [], 2: []}
    for row, anchor, k, prefix in real_labels(windows):
        distributions = independent(probs_BATC[row][anchor])
        every = slow_conditioned_texts(distributions, 4, WORDS + 1, WORDS, read=slow_transduce)
        prefixes[k].append(-math.log(beginnings(every)[tuple(prefix)]))
        if k + 1 == windows.lengths_BA[row, anchor]:
            texts.append(-math.log(every[tuple(prefix)]) / (k + 1))
    whole, by_prefix = Transducer(3)(outputs, windows), PrefixTransducer(3, 0.8)(outputs, windows)
    assert whole.value.item() == pytest.approx(sum(texts) / len(texts), abs=1e-5)
    assert by_prefix.value.item() == pytest.approx(weighted(prefixes, 0.8), abs=1e-5)
    # Three equal labels, which CTC cannot emit in four frames, are feasible here.
    assert whole.metrics["infeasible_share"] == by_prefix.metrics["infeasible_share"] == 0


def test_cross_entropy_is_that_of_label_k_at_frame_k_without_the_blank():
    outputs, windows = emissions(), batch()
    probs_BATV = outputs.logits()[..., :WORDS].softmax(-1).tolist()
    values: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for row, anchor, k, prefix in real_labels(windows):
        values[k].append(-math.log(probs_BATV[row][anchor][k][prefix[-1]]))
    assert CrossEntropy(3, 0.7)(outputs, windows).value.item() == pytest.approx(weighted(values, 0.7), abs=1e-5)


def test_a_sum_is_the_sum():
    outputs, windows = emissions(), batch()
    whole = OBJECTIVES["sum"](outputs, windows)
    parts = PrefixCTC(3, 0.8)(outputs, windows).value + 0.3 * CrossEntropy(3, 0.5)(outputs, windows).value
    assert torch.allclose(whole.value, parts)
    assert {"loss", "a/loss", "b/first_label"} <= set(whole.metrics)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_chunks_change_neither_value_nor_gradient(name, monkeypatch):
    outputs, windows = emissions(), batch()
    parameters = [outputs.states_BATD, outputs.head.blank_D]
    whole = OBJECTIVES[name](outputs, windows)
    gradients = torch.autograd.grad(whole.value, parameters, allow_unused=True)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)  # every window is a chunk of its own
    chunked = OBJECTIVES[name](outputs, windows)
    assert torch.allclose(whole.value, chunked.value)
    for a, b in zip(gradients, torch.autograd.grad(chunked.value, parameters, allow_unused=True), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-7)
    assert (gradients[0] != 0).any()


def test_rows_are_padded_with_windows_of_no_cost():
    outputs, windows = emissions(), batch()
    seen = []
    log_probs_BAS = outputs.map_label_frames(
        lambda logits_XSV, labels_XS: (seen.append(len(labels_XS)), logits_XSV.log_softmax(-1)[..., 0])[1],
        windows.labels_BAS,
    )
    real_BA = windows.lengths_BA > 0
    assert seen == [int(real_BA.sum())]
    assert seen[0] < real_BA.numel()
    every_BASV = outputs.head.token_logits(outputs.states_BATD[:, :, :3]).log_softmax(dim=-1)
    assert torch.allclose(log_probs_BAS, every_BASV[..., 0] * real_BA[..., None])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_windows_without_labels_have_no_gradient(name):
    outputs, windows = emissions(), batch()
    (gradient,) = torch.autograd.grad(OBJECTIVES[name](outputs, windows).value, outputs.states_BATD)
    empty_BA = windows.lengths_BA == 0
    assert empty_BA.any()
    assert (gradient[empty_BA] == 0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_emissions_that_do_not_fit_are_refused(name):
    with pytest.raises(InputError, match=r"2 frames cannot emit 3 labels.*drafter\.frames"):
        OBJECTIVES[name](emissions(frames=2), batch())
    with pytest.raises(InputError, match=r"the drafter returns tuple"):
        OBJECTIVES[name]((), batch())


def test_the_previous_name_of_what_frames_learn_is_refused_with_the_present_one():
    """In silence, an objective of one's own would be trained without the checks of its kind."""
    own = SimpleNamespace(supervises="words", labels=3)
    with pytest.raises(InputError, match=r'declares "words", which is called "tokens" now'):
        refuse_incompatible(own, PrefixSearch(4))
    with pytest.raises(InputError, match=r"`supervises` must be one of .*tokens, got words"):
        WeightedSum(3, {"a": own, "b": CTC(3)}, {"a": 1.0, "b": 1.0})


def test_impossible_values_are_refused():
    with pytest.raises(InputError, match=r"objective\.decay must be a number > 0"):
        PrefixCTC(3, 0)
    with pytest.raises(InputError, match=r"objective\.labels must be an integer >= 1, got 0"):
        CrossEntropy(0, 0.8)
    with pytest.raises(InputError, match=r"objective\.weights must be >= 0 for each of a, b"):
        WeightedSum(3, {"a": CTC(3), "b": CTC(3)}, {"a": 1.0})
    with pytest.raises(InputError, match=r"objective\.parts=a, b disagree"):
        WeightedSum(3, {"a": CTC(3), "b": Transducer(3)}, {"a": 1.0, "b": 1.0})
    with pytest.raises(InputError, match=r"objective\.labels=3, but b has 2"):
        WeightedSum(3, {"a": CTC(3), "b": CTC(2)}, {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_entropy_without_all_logits_is_the_same(bias, corrected, some):
    """The fused log-normaliser against map_label_frames, which has all logits, in value and gradient."""
    outputs, windows = emissions(), batch()
    if bias:
        outputs.head.words.bias = nn.Parameter(torch.randn(WORDS), requires_grad=False)
    learned = [outputs.states_BATD]
    if some:
        outputs.head.words = DraftVocabHead(outputs.head.words, 2)
    if corrected:
        correction = MarkovCorrection(nn.Embedding(WORDS, WIDTH).requires_grad_(False), 4, 1e-6)
        learned.append(nn.init.normal_(correction.out.weight))
        start_BAR = correction.start(torch.zeros(2, 5, WIDTH), torch.zeros(2, 5, dtype=torch.long))
        outputs = Emissions(outputs.states_BATD, outputs.head, correction, start_BAR)
    short = outputs.label_log_probs(windows.labels_BAS)
    whole = outputs.map_label_frames(partial(frame_values, gather_label_log_probs), windows.labels_BAS)
    can_BAS = ~whole.isneginf()
    assert bool(can_BAS.all()) is not some
    weights = torch.randn(short.shape)
    assert torch.allclose(short, whole, atol=1e-5)
    gradients = [torch.autograd.grad((weights * one).where(can_BAS, 0).sum(), learned) for one in (short, whole)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nan_shows_in_the_loss(name):
    """Left out as infeasible, it would hide that training has diverged."""
    outputs = emissions()
    with torch.no_grad():
        outputs.states_BATD[0, 2] = torch.nan
        assert int(batch().lengths_BA[0, 2]) > 0
        assert OBJECTIVES[name](outputs, batch()).value.isnan()
