"""Process started by torchrun in test_two_processes.py: train the small run of training_parts and write its results.

torchrun --nproc-per-node 2 tests/training/torchrun_job.py FOLDER STEPS [STAGE]      STAGE: of DeepSpeed's ZeRO
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_models import random_base
from training_parts import make_trainer

from ctcdraft.distributed import init_distributed
from ctcdraft.training.deepspeed import DeepSpeedEngine
from ctcdraft.training.loggers import JsonlLogger
from ctcdraft.training.run_directory import RunDirectory


def main(folder: Path, steps: int, *stage: str) -> None:
    torch.set_num_threads(1)
    peers = init_distributed("cpu")
    base = random_base(context=64)
    run = RunDirectory(folder)
    how = {}
    if stage:
        settings = {"zero_optimization": {"stage": int(stage[0])}}
        how = {"engine": DeepSpeedEngine, "engine_options": {"deepspeed": settings}}
    one = make_trainer(run, base, steps, accumulate=2, distributed=peers, **how)
    one.restore()
    peers.barrier()
    if peers.is_main and not run.config.exists():
        run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one.fit([JsonlLogger(run.metrics, one.step)] if peers.is_main else [])
    weights = [value.detach() for value in one.drafter.trainable_parameters()]
    assert all(
        torch.equal(a, b) for other in peers.all_gather_object(weights) for a, b in zip(weights, other, strict=True)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
