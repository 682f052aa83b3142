"""EAGLE's objective and the released code's CTC term, compared with loops over anchors."""

from __future__ import annotations

import math

import pytest
import torch
from sequential_parts import make_sequential_drafter
from tiny_models import random_base
from training_parts import ctc_head
from training_parts import random_sequences as some_rows
from truths import slow_log_likelihood

from ctcdraft.corpus.batches import Batches
from ctcdraft.errors import InputError
from ctcdraft.objectives.compatibility import describe_reading
from ctcdraft.objectives.ctc import CTC
from ctcdraft.objectives.eagle import Eagle, EagleCTC


@pytest.fixture
def base():
    return random_base(context=64)


def emitted(base, tmp_path, labels, kind="eagle", frames=6):
    drafter = make_sequential_drafter(kind, base, tmp_path, frames)
    batch = Batches(some_rows(4), base, rows_per_step=4, anchors=12, labels=labels, seed=0).batch(0)
    return batch, drafter(batch)


def real_anchors(batch, least=1):
    for row, anchors in enumerate(batch.anchors_BA.tolist()):
        for place, anchor in enumerate(anchors):
            if batch.lengths_BA[row, place] >= least:
                yield row, place, anchor


@torch.no_grad()
def test_both_terms_equal_a_loop(base, tmp_path):
    batch, emissions = emitted(base, tmp_path, labels=1)
    states, tokens, count = 0.0, 0.0, 0
    for row, place, anchor in real_anchors(batch):
        predicted, true = emissions.states_BATD[row, place, 0], batch.states_BLD[row, anchor + 1]
        difference = (predicted - true).abs()
        states += float(torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean())
        distribution = base.head(true).softmax(dim=-1)
        tokens -= float((distribution * base.head(predicted).log_softmax(dim=-1)).sum())
        count += 1
    loss = Eagle(1, 1.0, 0.1)(emissions, batch)
    assert count > 20
    assert float(loss.metrics["states"]) == pytest.approx(states / count, rel=1e-4)
    assert float(loss.metrics["words"]) == pytest.approx(tokens / count, rel=1e-4)
    assert float(loss.value) == pytest.approx((states + 0.1 * tokens) / count, rel=1e-4)


@torch.no_grad()
def test_the_ctc_term_is_that_of_all_alignments(base, tmp_path):
    """Six teacher-forced frames, three labels, blank 0, whole windows only.

    Alignments are enumerated over the blank, the labels and one class for all other tokens.
    """
    objective = EagleCTC(3, 6, 1.0, 0.1, 0.5)
    batch, emissions = emitted(base, tmp_path, objective.labels)
    total, count = 0.0, 0
    probs = emissions.logits().softmax(dim=-1)
    for row, place, anchor in real_anchors(batch, least=5):
        assert anchor + 6 < len(batch.tokens_BL[row])  # the last frame has read a token of this sequence
        labels = batch.labels_BAS[row, place, :3].tolist()
        classes = [0, *sorted(set(labels))]
        few = [[float(frame[c]) for c in classes] for frame in probs[row, place]]
        few = [[*frame, 1 - sum(frame)] for frame in few]
        total -= slow_log_likelihood(few, [classes.index(label) for label in labels], 0) / 3
        count += 1
    loss, plain = objective(emissions, batch), Eagle(1, 1.0, 0.1)(emissions, batch)
    assert count > 5
    assert float(loss.metrics["ctc"]) == pytest.approx(total / count, rel=1e-4)
    assert float(loss.value) == pytest.approx(float(plain.value) + 0.5 * total / count, rel=1e-4)
    assert float(EagleCTC(3, 6, 1.0, 0.1, 0.0)(emissions, batch).value) == pytest.approx(float(plain.value))


@torch.no_grad()
def test_a_label_that_is_the_blank_is_left_out_and_counted(base, tmp_path):
    objective = EagleCTC(3, 6, 1.0, 0.1, 0.5)
    batch, emissions = emitted(base, tmp_path, objective.labels)
    row, place, _ = next(real_anchors(batch, least=5))
    whole = sum(1 for _ in real_anchors(batch, least=5))
    batch.labels_BAS[row, place, 1] = 0
    loss = objective(emissions, batch)
    assert float(loss.metrics["infeasible_share"]) == pytest.approx(1 / whole)
    assert math.isfinite(float(loss.value))


@torch.no_grad()
def test_nan_is_not_counted_as_infeasible(base, tmp_path):
    objective = EagleCTC(3, 6, 1.0, 0.1, 0.5)
    batch, emissions = emitted(base, tmp_path, objective.labels)
    emissions.states_BATD[:, :, 1:] = torch.nan  # Eagle's own terms read the first frame alone
    assert objective(emissions, batch).metrics["ctc"].isnan()


@torch.no_grad()
def test_impossible_combinations_are_refused(base, tmp_path):
    batch, emissions = emitted(base, tmp_path, labels=3)
    with pytest.raises(InputError, match=r"have no blank; use objective=cross_entropy or distill"):
        CTC(3)(emissions, batch)
    with pytest.raises(InputError, match=r"objective\.frames must be >= objective\.labels=3, got 2"):
        EagleCTC(3, 2, 1.0, 0.1, 0.1)
    batch, short = emitted(base, tmp_path, labels=5, frames=4)
    with pytest.raises(InputError, match="4 frames"):
        EagleCTC(3, 6, 1.0, 0.1, 0.1)(short, batch)
    batch, narrow = emitted(base, tmp_path, labels=1, kind="draft_model")
    with pytest.raises(InputError, match=r"width 16 and the base's 32.*drafter=eagle"):
        Eagle(1, 1.0, 0.1)(narrow, batch)
    # The parallel drafter's frames have the width of hidden states, so there would be a loss, but a meaningless one.
    for objective in (Eagle(1, 1.0, 0.1), EagleCTC(3, 6, 1.0, 0.1, 0.1)):
        with pytest.raises(InputError, match=r"ParallelDrafter does not make; .* are for drafter=eagle"):
            describe_reading(objective, ctc_head(base), 6)
        assert (
            describe_reading(objective, make_sequential_drafter("eagle", base, tmp_path, 6), 6)
            == "in the drafter's own way"
        )
