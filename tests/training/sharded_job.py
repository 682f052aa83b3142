"""Process started by torchrun in test_zero3.py: train with a sharded base model and compare with an unsharded one.

torchrun --nproc-per-node 2 tests/training/sharded_job.py BASE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from training_parts import ctc_head, make_trainer

from ctcdraft.distributed import init_distributed
from ctcdraft.models.loading import load_base
from ctcdraft.training.run_directory import RunDirectory


def trained(base, peers):
    with base.gathered_parameters():
        drafter = ctc_head(base)
    one = make_trainer(RunDirectory(Path("nowhere")), base, 6, drafter=drafter, accumulate=2, distributed=peers)
    losses = []
    for one.step in range(6):
        losses.append(one.train_step()["loss"])
    return losses, torch.cat([value.detach().flatten() for value in drafter.trainable_parameters()])


def main(folder: str) -> None:
    torch.set_num_threads(1)
    peers = init_distributed("cpu")
    whole = load_base(folder, "float32", "cpu", aux_layers=["last", 1])
    sharded = load_base(folder, "float32", "cpu", aux_layers=["last", 1], zero3=True)
    held = sum(weight.ds_tensor.numel() for weight in sharded.lm.base_model.parameters())
    assert held <= 0.51 * sum(weight.numel() for weight in whole.lm.base_model.parameters())
    assert sharded.fingerprint() == whole.fingerprint()
    ours, theirs = trained(sharded, peers), trained(whole, peers)
    assert ours[0] == theirs[0], (ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    print(f"process {peers.rank} holds {held:,} values")


if __name__ == "__main__":
    main(sys.argv[1])
