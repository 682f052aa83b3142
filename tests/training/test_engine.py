"""One optimiser step of several batches follows the gradient of their mean."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_models import random_base
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torchrun_job import uneven_rows
from training_parts import ctc_head, make_trainer
from truths_training import slow_orthogonalize

from ctcdraft.distributed import ALONE, Distributed
from ctcdraft.objectives.base import Loss
from ctcdraft.training.engine import MuonEngine, OptimizerSettings, TorchEngine, warmup_cosine
from ctcdraft.training.run_directory import RunDirectory

SETTINGS = OptimizerSettings(
    steps=10, learning_rate=1e-3, warmup_steps=1, min_lr_ratio=0.1, betas=(0.9, 0.95), weight_decay=0.0,
    max_grad_norm=1e9, clip_value=None, autocast=False,
)  # fmt: skip


def engine(kind):
    torch.manual_seed(0)
    module = nn.Linear(32, 32).double()
    return module, kind(module, list(module.parameters()), SETTINGS, ALONE)


def stepped(kind, inputs, batches):
    """Return gradient norm and gradients of a step on the mean square of the outputs, split into so many batches."""
    module, one = engine(kind)
    gradients = []
    one.clip = lambda norm: gradients.extend(p.grad.clone() for p in one.parameters)
    norm = one.step([lambda part=part: Loss(module(part).square().mean(), {}) for part in inputs.chunk(batches)])
    return norm, gradients


@pytest.mark.parametrize("batches", [2, 3, 6])
@pytest.mark.parametrize("kind", [TorchEngine, MuonEngine])
def test_accumulated_batches_have_the_gradient_of_one_batch_of_all(kind, batches):
    inputs = torch.randn(12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    norm, whole = stepped(kind, inputs, 1)
    norm_of_parts, parts = stepped(kind, inputs, batches)
    assert norm_of_parts == pytest.approx(norm, rel=1e-12)
    assert len(whole) == len(parts) == 2
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_muon_orthogonalises_in_the_dtype_of_the_weights_on_a_cpu():
    module, one = engine(MuonEngine)
    inputs = torch.randn(12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = module.weight.detach().clone()
    (gradient,) = torch.autograd.grad(module(inputs).square().mean(), module.weight)
    one.step([lambda: Loss(module(inputs).square().mean(), {})])
    expected = SETTINGS.learning_rate * 0.2 * math.sqrt(32) * slow_orthogonalize(gradient)
    assert expected.abs().max() > 1e-4
    assert torch.allclose(before - module.weight, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [TorchEngine, MuonEngine])
def test_a_run_that_is_continued_with_more_steps_has_their_learning_rate_at_once(kind):
    _, one = engine(kind)
    before = [one.optimisers[0].param_groups[0]["lr"]]
    for _ in range(5):
        one.step([lambda: Loss(one.parameters[0].square().mean(), {})])
        before.append(one.optimisers[0].param_groups[0]["lr"])
    _, same = engine(kind)
    same.load_state_dict(one.state_dict())
    assert [group["lr"] for part in same.optimisers for group in part.param_groups] == [before[-1]] * 2
    assert same.schedules[0].get_last_lr() == [before[-1]]
    _, longer = engine(kind)
    longer.settings = replace(SETTINGS, steps=100)
    longer.lr_factor = lambda step: warmup_cosine(step, longer.settings)
    longer.schedules = [LambdaLR(part, longer.lr_factor) for part in longer.optimisers]
    longer.load_state_dict(one.state_dict())
    wanted = SETTINGS.learning_rate * warmup_cosine(5, longer.settings)
    assert wanted > 1.2 * before[-1]
    assert [group["lr"] for part in longer.optimisers for group in part.param_groups] == [wanted] * 2
    assert longer.schedules[0].get_last_lr() == [wanted]


def test_gradients_are_reduced_while_the_backward_pass_runs():
    """The gradient of the last layer is on its way before that of the first is computed."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))  # 1 MiB each, as DDP's first bucket
        one = TorchEngine(module, list(module.parameters()), SETTINGS, Distributed(0, 2))
        events: list[str] = []
        one.loss_of = one.data_parallel()

        def reduce(state, bucket):
            events.append("reduced")
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        one.loss_of.register_comm_hook(None, reduce)
        module[0].weight.register_post_accumulate_grad_hook(lambda weight: events.append("first layer"))
        one.step([lambda: Loss(module(torch.ones(2, 512)).square().mean(), {})])
        assert events.index("reduced") < events.index("first layer")
    finally:
        torch.distributed.destroy_process_group()


def test_accumulated_batches_are_one_step_along_the_mean_of_all_their_windows(tmp_path):
    base, seen = random_base(context=64), []
    one = make_trainer(
        RunDirectory(tmp_path), base, 5, accumulate=2, rows=uneven_rows(), drafter=ctc_head(base, frames=4)
    )
    one.engine.clip = lambda norm: seen.append([p.grad.clone() for p in one.engine.parameters])
    losses = [one.objective(one.drafter(batch), batch) for batch in map(one.batches.batch, range(2))]
    first, second = (int(loss.count) for loss in losses)
    assert first != second
    mean = (first * losses[0].value + second * losses[1].value) / (first + second)
    wanted = torch.autograd.grad(mean, one.engine.parameters)
    figures = one.train_step()
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(wanted, seen[0], strict=True))
    assert figures["loss"] == pytest.approx(float(mean.detach()))
