"""What a step is said to cost is what it costs: counted on real tensors and on none, and added up by hand."""

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
from ctcdraft.planning.dry_run import CorpusStats, plan_dry_run
from ctcdraft.planning.memory import count_saved_bytes, describe_memory, meta_batch, step_flops_and_bytes


def paper_head(frames=6):
    base = meta_base_if_absent("owner/name", "float32", "cpu", config=random_lm().config.to_dict()).base
    with torch.device("meta"):
        return base, ctc_head(base, frames).eval()


def test_what_is_kept_is_every_tensor_once_and_no_parameter():
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(3, 4)

    def forward():
        y = x @ weight  # keeps x, and the weight
        return (y * y).exp()  # keeps y once, and what exp gives

    made, kept = count_saved_bytes(forward)
    assert kept == 3 * x.nbytes
    made.sum().backward()
    assert weight.grad is not None


def test_a_step_on_paper_is_the_real_step():
    base = random_base()
    batches = Batches(random_sequences(), base, rows_per_step=4, anchors=8, labels=3, seed=0)
    real = batches.batch(0)
    sheet, head = paper_head()
    paper = meta_batch(sheet, *real.tokens_BL.shape, anchors=8, labels=3)
    for name, tensor in vars(paper).items():
        assert tensor.is_meta
        assert tensor.shape == getattr(real, name).shape, name
    flops, kept, shape = step_flops_and_bytes(ctc_head(base).eval(), CTC(3), real)
    assert step_flops_and_bytes(head, CTC(3), paper) == (flops, kept, shape)
    assert shape == (4, 8, 6, 32)
    # The frozen head alone: logits, and the expected row that gives the gradient.
    assert flops > 2 * 2 * 4 * 8 * 6 * base.vocabulary * base.width


class Trainer:
    steps, accumulate, rows, anchors, pack, max_length = 100, 1, 4, 8, None, 40


def test_the_plan_on_paper_adds_up():
    base, head = paper_head()
    told = CorpusStats(answers=50, tokens=1500, longest=60, source="counted")
    said = plan_dry_run(base, head, CTC(3), told, Trainer, HardwareSpec(1e9, None))
    trained = sum(value.numel() for value in head.trainable_parameters())
    assert f"drafter     {trained:,} trainable parameters" in said
    assert "100 of 4 rows x 8 anchors, 8.0 epochs" in said
    assert "192.0 kB as float32, 96.0 kB as bfloat16, 54.0 kB as int8 where stored" in said
    assert "(4 rows of 40 tokens)" in said  # no more than max_length
    step, _, _ = step_flops_and_bytes(head, CTC(3), meta_batch(base, 4, 30, 8, 3))
    live = ModelStats.of(base).prefill_flops(4 * 30, 15)
    assert f"{step:.3g} operations a batch of the head, and {live:.3g} for the base to read 4 rows of 30 tokens" in said
    assert f"about {hardware.format_hours(100 * (step + live) / 1e9 / 3600)} with states=live" in said
    assert "time        not known without a rate" in plan_dry_run(
        base, head, CTC(3), told, Trainer, HardwareSpec(None, None)
    )


def test_a_step_of_several_batches_costs_them_all_and_a_pack_holds_several_answers():
    base, head = paper_head()
    told, once = CorpusStats(answers=50, tokens=1500, longest=60, source="counted"), HardwareSpec(1e6, None)
    alone = plan_dry_run(base, head, CTC(3), told, Trainer, once)
    thrice = plan_dry_run(base, head, CTC(3), told, type("Trainer", (Trainer,), {"accumulate": 3}), once)
    assert "100 of 3 x 4 rows x 8 anchors, 24.0 epochs" in thrice
    hours = [float(said.split("time        about ")[1].split(" hours ")[0]) for said in (alone, thrice)]
    assert hours[1] == pytest.approx(3 * hours[0], abs=0.1)
    packs = plan_dry_run(base, head, CTC(3), told, type("Trainer", (Trainer,), {"pack": 100}), once)
    assert "100 of 4 rows x 8 anchors, 24.0 epochs" in packs  # three answers of 30 tokens each
    assert "for the base to read 4 rows of 90 tokens" in packs
    assert "(4 rows of 100 tokens)" in packs


def test_processes_that_share_the_batches_of_a_step_take_the_time_of_their_own():
    """Eight batches a step of eight processes last as long as one of one; the corpus is read once, by one of them."""
    base, head = paper_head()
    told, rate = CorpusStats(answers=50, tokens=1500, longest=60, source="counted"), HardwareSpec(1e6, None)
    alone = plan_dry_run(base, head, CTC(3), told, Trainer, rate)
    eight = type("Trainer", (Trainer,), {"accumulate": 8})
    shared, unshared = (
        plan_dry_run(base, head, CTC(3), told, eight, rate, world=8),
        plan_dry_run(base, head, CTC(3), told, eight, rate),
    )
    assert [time_of(said) for said in (shared, alone)] == [time_of(alone)] * 2
    assert time_of(unshared)[0] == pytest.approx(8 * time_of(alone)[0], rel=0.01)
    assert "with stored, shared by 8 processes, at 1e+06 operations a second" in shared
    assert "100 of 8 x 4 rows x 8 anchors, 64.0 epochs" in shared  # of all processes together


def time_of(plan_on_paper):
    """Hours with states=live and with stored."""
    words = plan_on_paper.split("time        about ")[1].replace(",", "").split()
    assert (words[1], words[5]) == ("hours", "hours")
    return float(words[0]), float(words[4])


def test_what_drafter_and_objective_refuse_of_each_other_is_refused_on_paper_too():
    base, head = paper_head(frames=3)
    with pytest.raises(InputError, match="3 frames cannot emit 4 labels"):
        plan_dry_run(base, head, CTC(4), CorpusStats(50, 1500, 60, "counted"), Trainer, HardwareSpec(None, None))


def test_taps_that_nobody_reads_are_said():
    """A block drafter fuses them; what guesses word by word has one place for one state."""
    base = random_base()
    tapped = BaseLM(base.lm, base.tokenizer, base.name, taps=["last", 1])
    eagle, block = Eagle(tapped, 3, DynamicTree(1, None)), ctc_head(tapped)
    assert (
        describe_unused_layers(tapped, eagle)
        == "; of the 2 layers base.taps=['last', 1] Eagle reads the last one at most"
    )
    assert (
        describe_unused_layers(base, Eagle(base, 3, DynamicTree(1, None)))
        == describe_unused_layers(tapped, block)
        == ""
    )


def test_memory_adds_weights_head_and_step():
    base = random_base()
    batch = meta_batch(base, 4, 30, 8, 3)
    said = describe_memory(ModelStats.of(base), 1000, batch, kept=7000, emission_bytes=2**40)
    weights = ModelStats.of(base).weight_bytes
    states, reading = 4 * 30 * 32 * 4, ModelStats.of(base).activation_bytes(4, 30)
    whole = weights + 16_000 + states + reading + 7000 + 256 * 2**20
    assert f"about {whole / 1e6:,.1f} MB at the peak" in said
    assert "step 7.0 kB" in said
