"""The planned cost of a step is the real one: counted on real and on meta tensors, and added up by hand."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_base, random_lm
from torch import nn
from training_parts import ctc_head, random_sequences

from ctcdraft import hardware
from ctcdraft.corpus.batches import Batches
from ctcdraft.drafters.eagle import Eagle
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.errors import InputError
from ctcdraft.hardware import HardwareSpec
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.meta import meta_base_if_absent
from ctcdraft.models.stats import ModelStats
from ctcdraft.objectives.compatibility import describe_unused_layers
from ctcdraft.objectives.ctc import CTC
from ctcdraft.planning.dry_run import CorpusStats, TrainingCost, meta_batch, plan_dry_run, step_flops_and_bytes
from ctcdraft.planning.training import StepMemory, count_saved_bytes


def meta_head(frames=6):
    base = meta_base_if_absent("owner/name", "float32", "cpu", config=random_lm().config.to_dict()).base
    with torch.device("meta"):
        return base, ctc_head(base, frames).eval()


def test_saved_bytes_count_every_tensor_once_and_no_parameter():
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(3, 4)

    def forward():
        y = x @ weight  # saves x, and the weight
        return (y * y).exp()  # saves y once, and the result of exp

    result, saved = count_saved_bytes(forward)
    assert saved == 3 * x.nbytes
    result.sum().backward()
    assert weight.grad is not None


def test_a_step_on_the_meta_device_is_the_real_step():
    base = random_base()
    batches = Batches(random_sequences(), base, rows_per_step=4, anchors=8, labels=3, seed=0)
    real = batches.batch(0)
    meta_base, head = meta_head()
    meta = meta_batch(meta_base, *real.tokens_BL.shape, anchors=8, labels=3)
    for name, tensor in vars(meta).items():
        assert tensor.is_meta
        assert tensor.shape == getattr(real, name).shape, name
    flops, saved, shape = step_flops_and_bytes(ctc_head(base).eval(), CTC(3), real)
    assert step_flops_and_bytes(head, CTC(3), meta) == (flops, saved, shape)
    assert shape == (4, 8, 6, 32)
    # The frozen lm_head alone: logits, and the expected embedding for the gradient.
    assert flops > 2 * 2 * 4 * 8 * 6 * base.vocabulary * base.width


class Trainer:
    steps, gradient_accumulation_steps, batch_size = 100, 1, 4
    anchors_per_sequence, pack_length, max_length, save_total_limit = 8, None, 40, 2


def test_a_step_of_more_rows_than_the_corpus_has_is_named():
    base, head = meta_head()
    stats = CorpusStats(rows=3, answers=3, tokens=90, longest=60, source="counted")
    plan = plan_dry_run(base, head, CTC(3), stats, Trainer, HardwareSpec(1e9, None))
    assert "; training refuses a step of 4 rows, as the corpus has 3: prepare more prompts (corpus.limit=)\n" in plan


def test_the_plan_adds_up():
    base, head = meta_head()
    stats = CorpusStats(rows=50, answers=50, tokens=1500, longest=60, source="counted")
    plan = plan_dry_run(base, head, CTC(3), stats, Trainer, HardwareSpec(1e9, None))
    trained = sum(value.numel() for value in head.trainable_parameters())
    assert f"drafter     {trained:,} trainable parameters" in plan
    assert "100 of 4 rows x 8 anchors, 8.0 epochs\n" in plan
    assert "192.0 kB as float32, 96.0 kB as bfloat16, 54.0 kB as int8 with offline" in plan
    assert "(4 rows of 40 tokens)" in plan  # no more than max_length
    step, _, _ = step_flops_and_bytes(head, CTC(3), meta_batch(base, 4, 30, 8, 3))
    live = ModelStats.of(base).prefill_flops(4 * 30, 15)
    assert f"{step:.3g} operations per batch of the head; of the base {live:.3g} for 4 rows of 30 tokens" in plan
    assert f"about {hardware.format_hours(100 * (step + live) / 1e9 / 3600)} with hidden_states=online" in plan
    assert "time        not known without a rate" in plan_dry_run(
        base, head, CTC(3), stats, Trainer, HardwareSpec(None, None)
    )


def test_accumulated_batches_and_packs_are_counted():
    base, head = meta_head()
    stats, once = CorpusStats(rows=50, answers=50, tokens=1500, longest=60, source="counted"), HardwareSpec(1e6, None)
    alone = plan_dry_run(base, head, CTC(3), stats, Trainer, once)
    thrice = plan_dry_run(
        base, head, CTC(3), stats, type("Trainer", (Trainer,), {"gradient_accumulation_steps": 3}), once
    )
    assert "100 of 3 x 4 rows x 8 anchors, 24.0 epochs" in thrice
    hours = [float(plan.split("time        about ")[1].split(" hours ")[0]) for plan in (alone, thrice)]
    assert hours[1] == pytest.approx(3 * hours[0], abs=0.1)
    packs = plan_dry_run(base, head, CTC(3), stats, type("Trainer", (Trainer,), {"pack_length": 100}), once)
    assert "100 of 4 rows x 8 anchors, 26.7 epochs" in packs  # 3.3 rows of 30 tokens each
    assert " for 4 rows of 100 tokens with hidden_states=online" in packs
    assert "(4 rows of 100 tokens)" in packs


def test_all_windows_are_those_of_mean_rows_and_for_memory_of_the_longest():
    base, head = meta_head()
    stats = CorpusStats(rows=50, answers=50, tokens=1500, longest=60, source="counted")
    every = type("Trainer", (Trainer,), {"anchors_per_sequence": None})
    plan = plan_dry_run(base, head, CTC(3), stats, every, HardwareSpec(None, None))
    assert "100 of 4 rows x 30 anchors, 8.0 epochs" in plan
    assert TrainingCost.of(base, head, CTC(3), stats, every).shape.anchors == 40


def test_hours_are_those_of_the_rows_of_one_process():
    """Two processes with twice the rows take as long as one, and read the corpus in half the time."""
    base, head = meta_head()
    stats, rate = CorpusStats(rows=50, answers=50, tokens=1500, longest=60, source="counted"), HardwareSpec(1e6, None)
    alone = plan_dry_run(base, head, CTC(3), stats, Trainer, rate)
    twice = type("Trainer", (Trainer,), {"batch_size": 8, "gradient_accumulation_steps": 2})
    shared, unshared = (plan_dry_run(base, head, CTC(3), stats, twice, rate, world=world) for world in (2, 1))
    assert time_of(shared)[0] == pytest.approx(2 * time_of(alone)[0], rel=0.01)
    assert time_of(unshared)[0] == pytest.approx(4 * time_of(alone)[0], rel=0.01)
    assert time_of(shared)[1] == pytest.approx(time_of(unshared)[1] / 2, rel=0.01)
    assert "with offline, shared by 2 processes, at 1e+06 FLOP/s" in shared
    assert "100 of 2 x 8 rows x 8 anchors, 32.0 epochs" in shared  # of all processes together
    assert "(4 rows of 40 tokens)" in shared
    assert "(8 rows of 40 tokens)" in unshared


def test_the_update_and_the_sum_of_the_gradients_take_time():
    """Per step: 92 bytes of memory per parameter, and what a ring sends beyond the time of the backward pass."""
    base, head = meta_head()
    stats = CorpusStats(rows=50, answers=50, tokens=1500, longest=60, source="counted")
    cost = TrainingCost.of(base, head, CTC(3), stats, Trainer, world=4)
    trained = sum(value.numel() for value in head.trainable_parameters())
    fast = cost.seconds(10, HardwareSpec(1e30, 1e6))
    assert fast == pytest.approx((10 * trained * 92 / 1e6,) * 2)
    slow = cost.seconds(10, HardwareSpec(1e30, 1e6, link=1e5))
    assert slow[0] - fast[0] == pytest.approx(10 * 2 * 3 / 4 * 4 * trained / 1e5)
    backward = cost.step * 2 / 3  # seconds at 1 FLOP/s
    hidden = cost.seconds(10, HardwareSpec(1.0, None, link=1.5 * 4 * trained / backward))
    assert hidden == pytest.approx(cost.seconds(10, HardwareSpec(1.0, None)))


def test_the_plan_says_whether_a_card_is_large_enough():
    base, head = meta_head()
    stats = CorpusStats(rows=50, answers=50, tokens=1500, longest=60, source="counted")
    ends = [
        next(line for line in plan_dry_run(base, head, CTC(3), stats, Trainer, rate).splitlines() if "memory " in line)
        for rate in (HardwareSpec(None, None), HardwareSpec(None, None, 1e9), HardwareSpec(None, None, 1e5))
    ]
    assert ends[0].endswith("(4 rows of 40 tokens)")
    assert ends[1].endswith("; fits a card of 1.0 GB")
    assert "; DOES NOT FIT a card of 100.0 kB: lower trainer.batch_size= and raise" in ends[2]


def time_of(plan):
    """Hours with hidden_states=online and with offline."""
    parts = plan.split("time        about ")[1].replace(",", "").split()
    assert (parts[1], parts[5]) == ("hours", "hours")
    return float(parts[0]), float(parts[4])


def test_incompatible_drafter_and_objective_are_refused_on_the_meta_device_too():
    base, head = meta_head(frames=3)
    with pytest.raises(InputError, match="3 frames cannot emit 4 labels"):
        plan_dry_run(base, head, CTC(4), CorpusStats(50, 50, 1500, 60, "counted"), Trainer, HardwareSpec(None, None))


def test_unused_auxiliary_layers_are_named():
    """A parallel drafter fuses auxiliary layers; a sequential one takes one hidden state."""
    base = random_base()
    tapped = BaseLM(base.lm, base.tokenizer, base.name, aux_layers=["last", 1])
    eagle, block = Eagle(tapped, 3, DynamicTree(1, None)), ctc_head(tapped)
    assert (
        describe_unused_layers(tapped, eagle)
        == "; of the 2 layers base.aux_layers=['last', 1] Eagle reads the last one at most"
    )
    assert (
        describe_unused_layers(base, Eagle(base, 3, DynamicTree(1, None)))
        == describe_unused_layers(tapped, block)
        == ""
    )


def test_memory_adds_weights_head_and_step():
    base = random_base()
    batch = meta_batch(base, 4, 30, 8, 3)
    plan = str(StepMemory(ModelStats.of(base), 1000, batch, saved_bytes=7000, emission_bytes=2**40))
    weights = ModelStats.of(base).weight_bytes
    states, reading = 4 * 30 * 32 * 4, ModelStats.of(base).activation_bytes(4, 30)
    whole = weights + 16_000 + states + reading + 7000 + 256 * 2**20
    assert f"about {whole / 1e6:,.1f} MB at the peak" in plan
    assert "step 7.0 kB" in plan
