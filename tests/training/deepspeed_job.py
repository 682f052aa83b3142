"""Process started by test_two_processes.py: DeepSpeed skips gradients that are not finite as the torch engine does.

python tests/training/deepspeed_job.py STAGE...      of ZeRO; 2+offload: AdamW's state in the memory of the host
"""

from __future__ import annotations

import sys
from math import isfinite
from pathlib import Path

import torch
from tiny_models import random_base
from training_parts import Sometimes, make_trainer

from ctcdraft.training.deepspeed import DeepSpeedEngine
from ctcdraft.training.run_directory import RunDirectory


def trained(base, **how):
    """Return gradient norms and learning rates of six steps of two batches, and the weights after them."""
    one = make_trainer(RunDirectory(Path("nowhere")), base, 6, objective=Sometimes(4, steep=9), accumulate=2, **how)
    metrics = []
    for one.step in range(6):
        metrics.append(one.train_step())
    norms, rates = ([line[name] for line in metrics] for name in ("gradient_norm", "learning_rate"))
    return norms, rates, torch.cat([value.detach().flatten() for value in one.drafter.trainable_parameters()])


def main(*stages: str) -> None:
    torch.set_num_threads(1)
    base = random_base(context=64)
    norms, rates, weights_N = trained(base)
    assert [isfinite(norm) for norm in norms] == [True, False, True, True, False, True]
    for stage in stages:
        number, _, offload = stage.partition("+")
        zero = {"stage": int(number)} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
        settings = {"zero_optimization": zero}
        theirs = trained(base, engine=DeepSpeedEngine, engine_options={"deepspeed": settings})
        for ours, norm in zip(norms, theirs[0], strict=True):
            assert isfinite(norm) == isfinite(ours), (stage, norms, theirs[0])
            assert not isfinite(norm) or abs(norm - ours) < 1e-4 * ours, (stage, norms, theirs[0])
        assert theirs[1] == rates, (stage, rates, theirs[1])
        assert torch.allclose(theirs[2], weights_N, atol=1e-5), stage


if __name__ == "__main__":
    main(*sys.argv[1:])
