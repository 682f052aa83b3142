"""Time of a training step as the dry run plans it, against steps that are taken: python -m benchmarks.plan_steps

The rate that plan.flops= asks for is taken from the steps of one small base, and plan.bandwidth= from copying memory.
The plans of two other shapes at this rate are then compared with their steps. Processor time of one thread counts, so
that other work on the machine matters little. Options: steps=3.
"""

from __future__ import annotations

import sys
from time import process_time

import torch
from hydra.utils import instantiate

from ctcdraft.config.build import build_batches, build_engine
from ctcdraft.config.cli import compose_config
from ctcdraft.config.drafters import build_drafter
from ctcdraft.corpus.token_store import TokenSequences
from ctcdraft.distributed import ALONE
from ctcdraft.hardware import HardwareSpec
from ctcdraft.models.meta import build_meta_base, random_weights_base
from ctcdraft.planning.dry_run import UPDATE_BYTES, CorpusStats, TrainingCost

LENGTH = 256
# width, layers, MLP, heads, KV heads, vocabulary; the rate is taken from the first.
SHAPES = {
    "rate": (512, 8, 1408, 8, 8, 8000),
    "wide": (1024, 6, 2816, 16, 4, 16000),
    "deep": (640, 20, 1792, 10, 10, 24000),
}
KEYS = [
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
]


def memory_bandwidth() -> float:
    """Return bytes per second that are read and written while memory is copied."""
    source = torch.empty(2**26)
    copy = torch.empty_like(source).copy_(source)
    began = process_time()
    for _ in range(4):
        copy.copy_(source)
    return 4 * 2 * source.nbytes / (process_time() - began)


def measure_and_plan(name: str, steps: int) -> tuple[float, TrainingCost]:
    """Return the processor seconds of a step of the default head on a base of random weights, and its planned cost."""
    of = {"model_type": "llama", "max_position_embeddings": 2048, **dict(zip(KEYS, SHAPES[name], strict=True))}
    overrides = ["trainer.batch_size=4", "trainer.anchors_per_sequence=48", "device=cpu", "trainer.autocast=false"]
    config = compose_config("train", *overrides)
    layers = list(config.base.aux_layers)
    base = random_weights_base(of, name, "float32", "cpu", aux_layers=layers)
    drafter, objective = build_drafter(config.drafter, base).train(), instantiate(config.objective)
    rng = torch.Generator().manual_seed(0)
    tokens = [torch.randint(5, 5000, (LENGTH,), generator=rng) for _ in range(16)]
    rows = TokenSequences(tokens, [[(32, LENGTH, 1)] for _ in tokens])
    states = instantiate(config.hidden_states)
    batches = build_batches(config, rows, base, states, objective.labels, None, ALONE)
    engine = build_engine(config, drafter, ALONE)
    seconds = []
    for number in range(steps + 1):
        began = process_time()
        engine.step([lambda number=number: objective(drafter(batch := batches.batch(number)), batch)])
        seconds.append(process_time() - began)
    meta = build_meta_base("owner/name", "float32", name=name, aux_layers=layers, config=of)
    with torch.device("meta"):
        planned = build_drafter(config.drafter, meta).eval()
    corpus = CorpusStats(len(tokens), len(tokens), len(tokens) * LENGTH, LENGTH, "as built")
    # The first step chooses kernels and allocates the moments.
    return min(seconds[1:]), TrainingCost.of(meta, planned, objective, corpus, config.trainer)


def main(steps: int = 3) -> None:
    torch.set_num_threads(1)
    bandwidth = memory_bandwidth()
    took, cost = measure_and_plan("rate", steps)
    flops = (cost.step + cost.online_reading) / (took - cost.memory.trained * UPDATE_BYTES / bandwidth)
    rate = HardwareSpec(flops, bandwidth)
    print(
        f"rate {rate}, from steps of {took:.2f} s\n\n| base | parameters of the head | measured s | planned s | error |"
    )
    print("|---|---|---|---|---|")
    for name in list(SHAPES)[1:]:
        took, cost = measure_and_plan(name, steps)
        seconds = cost.seconds(1, rate)
        assert seconds is not None
        print(f"| {name} | {cost.memory.trained:,} | {took:.2f} | {seconds[0]:.2f} | {seconds[0] / took - 1:+.0%} |")


if __name__ == "__main__":
    main(**{key: int(value) for key, _, value in (argument.partition("=") for argument in sys.argv[1:])})
