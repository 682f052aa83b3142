"""PrefixDistill against next-label distributions by enumeration of all alignments, in value and in gradient."""

from __future__ import annotations

import math
from functools import cache, partial

import pytest
import torch
from torch import nn
from truths import beginnings
from truths_heads import slow_conditioned_texts, slow_kl, slow_next_tokens, slow_total_variation

from ctcdraft.batch import Batch
from ctcdraft.nn import chunks
from ctcdraft.nn.draft_vocab import DraftVocabHead
from ctcdraft.nn.heads import BlankHead, Emissions
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.objectives import prefix_distillation
from ctcdraft.objectives.base import WeightedSum
from ctcdraft.objectives.ctc import PrefixCTC
from ctcdraft.objectives.distillation import kl, total_variation
from ctcdraft.objectives.prefix_distillation import SMALLEST, PrefixDistill, base_top_tokens

VOCABULARY, WIDTH, FRAMES, LABELS = 4, 6, 4, 3
DISTANCES = [(total_variation, slow_total_variation), (kl, partial(slow_kl, smallest=math.exp(SMALLEST)))]
CORRECTIONS = {"independent": None, "markov": partial(MarkovCorrection, rank=3), "gru": partial(GRUCorrection, rank=3)}


def emissions(correction: str = "independent", some: bool = False) -> Emissions:
    torch.manual_seed(0)
    head = BlankHead(nn.Linear(WIDTH, VOCABULARY).requires_grad_(False), WIDTH)
    head.blank_D.data.normal_()
    if some:
        head.words = DraftVocabHead(head.words, 3)
    made = CORRECTIONS[correction] and CORRECTIONS[correction](
        nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False), epsilon=1e-6
    )
    start_BAR = None
    if made is not None:
        nn.init.normal_(made.out.weight)
        start_BAR = made.start(torch.randn(2, 5, WIDTH), torch.randint(0, VOCABULARY, (2, 5)))
    return Emissions(torch.randn(2, 5, FRAMES, WIDTH, requires_grad=True), head, made, start_BAR)


def windows(length: int = 12) -> Batch:
    """Return windows with up to three labels; three labels of row 0 are equal, which four frames cannot emit."""
    rng = torch.Generator().manual_seed(2)
    lengths_BA = torch.randint(0, LABELS + 1, (2, 5), generator=rng)
    labels_BAS = torch.randint(0, VOCABULARY, (2, 5, LABELS), generator=rng)
    lengths_BA[0, 0], labels_BAS[0, 0] = LABELS, 2
    labels_BAS = labels_BAS.masked_fill(torch.arange(LABELS) >= lengths_BA[..., None], -1)
    anchors_BA = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    states_BLD = 2 * torch.randn(2, length, WIDTH, generator=rng)
    unused, position_ids_BL = torch.zeros(1), torch.arange(length).expand(2, -1)
    return Batch(unused, states_BLD, anchors_BA, unused, labels_BAS, lengths_BA, position_ids_BL)


def slow_beginnings(outputs: Emissions, row: int, anchor: int) -> dict[tuple[int, ...], float]:
    """P(the text begins with it) for every prefix, from probabilities of every frame after every text."""
    head, correction = outputs.head, outputs.correction

    @cache
    def distribution(frame: int, text: tuple[int, ...]) -> list[float]:
        logits_C = head(outputs.states_BATD[row, anchor, frame : frame + 1])[0].double()
        if correction is not None:
            memory_1R = outputs.start_BAR[row, anchor][None]
            for token in text:
                memory_1R = correction.step(memory_1R, torch.tensor([token]))
            logits_C[:VOCABULARY] += correction(memory_1R)[0].double()
        return logits_C.softmax(-1).tolist()

    texts = slow_conditioned_texts(distribution, FRAMES, VOCABULARY + 1, VOCABULARY)
    return beginnings(texts)


@torch.no_grad()
def slow_loss(outputs: Emissions, batch: Batch, tokens: int, decay: float, distance) -> tuple[float, int]:
    """The objective in loops, and the number of labels that it leaves out."""
    total = weights = 0.0
    impossible = 0
    for row in range(2):
        for anchor in range(5):
            masses = slow_beginnings(outputs, row, anchor)
            for k in range(int(batch.lengths_BA[row, anchor])):
                prefix = tuple(batch.labels_BAS[row, anchor, :k].tolist())
                if prefix and masses.get(prefix, 0) == 0:
                    impossible += 1
                    continue
                state_1D = batch.states_BLD[row, batch.anchors_BA[row, anchor] + 1 + k][None]
                lm_head = getattr(
                    outputs.head.words, "all", outputs.head.words
                )  # all tokens, in a draft vocabulary or not
                base = lm_head(state_1D)[0].double().softmax(-1).tolist()
                best = sorted(range(VOCABULARY), key=lambda token: -base[token])[:tokens]
                p = [base[token] for token in best]
                total += decay**k * distance([*p, 1 - sum(p)], slow_next_tokens(masses, prefix, best))
                weights += decay**k
    return total / weights, impossible


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("distance", "slow"), DISTANCES)
@pytest.mark.parametrize("tokens", [1, 2])
def test_it_is_the_distance_between_the_bases_and_the_enumerated_distribution(tokens, distance, slow, correction, some):
    outputs, batch = emissions(correction, some), windows()
    loss = PrefixDistill(LABELS, 0.8, tokens, distance)(outputs, batch)
    wanted, impossible = slow_loss(outputs, batch, tokens, 0.8, slow)
    assert loss.value.item() == pytest.approx(wanted, rel=1e-4)
    assert (impossible > 0) == some  # a label outside the draft vocabulary
    loss.value.backward()
    assert bool(outputs.states_BATD.grad.isfinite().all())


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("distance", [total_variation, kl])
def test_its_gradient_is_that_of_differences(distance, correction):
    outputs, batch = emissions(correction), windows()
    objective = PrefixDistill(LABELS, 0.8, 2, distance)
    learned = [outputs.states_BATD, outputs.head.blank_D]
    if outputs.correction is not None:
        learned.append(outputs.correction.out.weight)
    gradients = torch.autograd.grad(objective(outputs, batch).value, learned)
    for tensor, gradient in zip(learned, gradients, strict=True):
        along = torch.randn_like(tensor)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                tensor += sign * 1e-3 * along
                values.append(objective(outputs, batch).value.item())
                tensor -= sign * 1e-3 * along
        assert (values[0] - values[1]) / 2e-3 == pytest.approx(float((gradient * along).sum()), rel=2e-2, abs=2e-4)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_chunks_change_neither_value_nor_gradient(correction, monkeypatch):
    outputs, batch = emissions(correction), windows()
    objective = PrefixDistill(LABELS, 0.8, 2, total_variation)
    whole = objective(outputs, batch).value
    (gradient,) = torch.autograd.grad(whole, outputs.states_BATD, retain_graph=True)
    for module in (chunks, prefix_distillation):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    chunked = objective(outputs, batch).value
    assert torch.allclose(whole, chunked)
    assert torch.allclose(gradient, torch.autograd.grad(chunked, outputs.states_BATD)[0], atol=1e-7)
    assert (gradient[batch.lengths_BA == 0] == 0).all()
    assert (gradient[batch.lengths_BA > 0] != 0).any()


def test_the_base_is_computed_once_per_position_or_once_per_label():
    """Whichever is less; both give the same tokens."""
    long, short = windows(16), windows()
    short.states_BLD[:] = long.states_BLD[:, :12]
    for of_long, of_short in zip(*(base_top_tokens(emissions().head, one, 3) for one in (long, short)), strict=True):
        real_BAS = long.labels_BAS >= 0
        torch.testing.assert_close(of_long[real_BAS], of_short[real_BAS])


def test_a_sum_computes_the_scores_of_the_labels_once(monkeypatch):
    outputs, batch = emissions("gru"), windows()
    parts = {"ctc": PrefixCTC(LABELS, 0.8), "tv": PrefixDistill(LABELS, 0.8, 2, total_variation)}
    wanted = sum(part(outputs, batch).value for part in parts.values())
    calls, original = [], Emissions._score_labels
    monkeypatch.setattr(Emissions, "_score_labels", lambda self, labels: calls.append(1) or original(self, labels))
    loss = WeightedSum(LABELS, parts, {"ctc": 1.0, "tv": 1.0})(outputs, batch)
    assert len(calls) == 1
    torch.testing.assert_close(loss.value, wanted)
