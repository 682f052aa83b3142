"""Process started by test_two_processes.py and test_lost_process.py, one of several of a process group.

torchrun --nproc-per-node 2 tests/training/torchrun_job.py '{"runs": [{"folder": FOLDER, "steps": 10}]}'
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from tiny_models import random_base
from training_parts import ctc_head, make_trainer

from ctcdraft.corpus import shard_folder
from ctcdraft.corpus.hidden_states import OfflineHiddenStates, compute_hidden_states
from ctcdraft.corpus.token_store import TokenSequences
from ctcdraft.distributed import ALONE, init_distributed
from ctcdraft.errors import run_cli
from ctcdraft.objectives.base import WeightedSum
from ctcdraft.objectives.cross_entropy import CrossEntropy
from ctcdraft.objectives.ctc import CTC, PrefixCTC
from ctcdraft.training.deepspeed import DeepSpeedEngine
from ctcdraft.training.loggers import JsonlLogger
from ctcdraft.training.run_directory import RunDirectory

STEPS = 20
OBJECTIVES = {
    "ctc": lambda: CTC(3),
    "sum": lambda: WeightedSum(3, {"p": PrefixCTC(3, 0.8), "c": CTC(3)}, {"p": 1.0, "c": 0.5}),
    "frames": lambda: CrossEntropy(3, 0.8),
}


def uneven_rows(count: int = 13) -> TokenSequences:
    """Return responses of unlike length, with repeats: ranks differ in their numbers of feasible windows."""
    rng = torch.Generator().manual_seed(1)
    tokens = [torch.randint(5, 8, (9 + 5 * (i % 3) ** 2,), generator=rng) for i in range(count)]
    return TokenSequences(tokens, [[(6, len(row), True)] for row in tokens])


def curve(dtype: str, objective: str, accumulate: int, processes=ALONE) -> dict[str, torch.Tensor]:
    """Return losses and final weights of 20 steps of eight rows, with four frames for three labels."""
    base = random_base("gpt2", context=64)  # whose norms stay in float64; llama's do not
    base.lm.to(getattr(torch, dtype))
    one = make_trainer(
        RunDirectory(Path("nowhere")), base, STEPS, drafter=ctc_head(base, frames=4).to(getattr(torch, dtype)),
        objective=OBJECTIVES[objective](), rows=uneven_rows(), rows_per_step=8, accumulate=accumulate,
        distributed=processes,
    )  # fmt: skip
    lines = []
    for one.step in range(STEPS):
        lines.append(one.train_step())
    weights_N = torch.cat([value.detach().flatten() for value in one.drafter.trainable_parameters()])
    series = {
        name: torch.tensor([line[name] for line in lines], dtype=torch.float64) for name in ("loss", "gradient_norm")
    }
    return series | {"weights": weights_N}


def train(case: dict, peers) -> None:
    """Train or resume a run in a folder.

    Process `victim` sends itself a signal when it calls `kill_in` with `kill_at` steps done.
    """
    base, run = random_base(context=64), RunDirectory(Path(case["folder"]))
    how = {}
    if "stage" in case:
        settings = {"zero_optimization": {"stage": case["stage"]}}
        how = {"engine": DeepSpeedEngine, "engine_options": {"deepspeed": settings}}
    one = make_trainer(
        run, base, case["steps"], accumulate=case.get("accumulate", 1), distributed=peers,
        prompt_count=3, rows_per_step=8, **how,
    )  # fmt: skip
    one.restore()
    if peers.is_main and not run.config.exists():
        run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    if peers.rank == case.get("victim", 1) and "kill_at" in case:
        owner, name = {"batch": (one.batches, "batch"), "validate": (one.validation, "metrics"),
                       "save": (one.engine, "state_dict")}[case.get("kill_in", "batch")]  # fmt: skip
        real = getattr(owner, name)

        def call_or_death(*arguments):
            if one.step == case["kill_at"]:
                os.kill(os.getpid(), signal.Signals[case.get("signal", "SIGKILL")])
            return real(*arguments)

        object.__setattr__(owner, name, call_or_death)  # the validation is frozen
    one.fit([JsonlLogger(run.metrics, one.step)] if peers.is_main else [])
    weights = [value.detach() for value in one.drafter.trainable_parameters()]
    for other in peers.all_gather_object(weights):
        assert all(torch.equal(a, b) for a, b in zip(weights, other, strict=True))


def fill(case: dict, peers) -> None:
    """Store the hidden states of 20 rows in shards of two, read all, and print what was computed and compared.

    Process `victim` ends at its second shard. remove: a shard that the last process removes before.
    """
    base, computed, compared = random_base(context=64), [], []
    source = OfflineHiddenStates(base, uneven_rows(20).tokens, "states", "float32", 2, 1.0)
    compute, is_intact = source.compute_shard, shard_folder.is_intact

    def counted(shard: int):
        if peers.rank == case.get("victim") and computed:
            os.kill(os.getpid(), signal.SIGKILL)
        computed.append(shard)
        return compute(shard)

    source.compute_shard = counted
    shard_folder.is_intact = lambda file: (compared.append(file), is_intact(file))[1]
    peers.any_process()  # waits until all have read the rows of the last call, before a shard is removed
    if "remove" in case and peers.rank == peers.world_size - 1:
        source.folder.files[case["remove"]].unlink()
    source.precompute(peers)
    shard_folder.is_intact = is_intact
    for index, tokens_L in enumerate(source.tokens):
        torch.testing.assert_close(source.row(index), compute_hidden_states(base, tokens_L[None])[0])
    with Path(f"stored-{peers.rank}.jsonl").open("a") as lines:
        lines.write(json.dumps([computed, len(compared)]) + "\n")


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    case = json.loads(arguments[0])
    peers = init_distributed("cpu", case.get("timeout_minutes", 10))
    for run in case.get("runs", []):
        train(run, peers)
    for store in case.get("fills", []):
        fill(store, peers)
    for dtype, objective, accumulate in case.get("curves", []):
        result = curve(dtype, objective, accumulate, peers)
        if peers.is_main:
            torch.save(result, f"{dtype}-{objective}-{accumulate}.pt")


if __name__ == "__main__":
    run_cli("torchrun_job.py", main)
