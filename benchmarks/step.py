"""Time and memory of a training step by part: `python benchmarks/step.py`; other sizes by --vocabulary --width.

data: choosing sequences, cutting windows. base: hidden states of the text. head: the body's forward pass. projection:
scores of labels and blank, including the gradient of the vocabulary matrix, which is formed there. loss: the alignment
recursion. backward: through loss and body. optimiser: clipping and the update. A random base model; medians, in
seconds.

Two ways, in turns, each in a process of its own, so that both have a peak: `ours`, and `native`, which is what one
would write without this project: all logits, their log-softmax, F.ctc_loss.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.corpus.batches import Batches
from ctcdraft.corpus.token_store import TokenSequences
from ctcdraft.distributed import Distributed
from ctcdraft.drafters.parallel import ParallelDrafter
from ctcdraft.drafters.trees.ctc import PrefixSearch
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.meta import NullTokenizer
from ctcdraft.nn.bodies import AttentionBody
from ctcdraft.nn.heads import AlignmentScores, Emissions
from ctcdraft.objectives.ctc import ctc_window_likelihoods
from ctcdraft.training.engine import OptimizerSettings, TorchEngine

# A way: how emissions are projected, and the loss of the result.
Way = tuple[Callable[[Emissions, Batch], Any], Callable[[Any, Batch], Tensor]]


class Timed(BaseLM):
    """A base model that records the seconds of its last `hidden_states` call."""

    seconds = 0.0

    def hidden_states(self, *given: Any) -> torch.Tensor:
        since = time.perf_counter()
        states_BLD = super().hidden_states(*given)
        self.seconds = time.perf_counter() - since
        return states_BLD


def base_of(options: argparse.Namespace) -> Timed:
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.width, intermediate_size=3 * options.width,
        num_hidden_layers=options.layers, num_attention_heads=options.width // 64,
        max_position_embeddings=options.length,
    )  # fmt: skip
    torch.manual_seed(0)
    return Timed(transformers.LlamaForCausalLM(config).eval(), NullTokenizer(), "random")


def main() -> None:
    options = arguments()
    if options.way:
        print(json.dumps(measured(options, WAYS[options.way])))
        return
    given = {name: value for name, value in vars(options).items() if name != "way"}
    child_arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, several in found.items():
            command = [sys.executable, __file__, *child_arguments, "--way", way]
            several.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    print(
        f"{options.rows} rows x {options.length} tokens, {options.anchors} anchors x {options.frames} frames, "
        f"{options.vocabulary:,} tokens, width {options.width}, {options.layers} layers, {options.threads} thread"
    )
    medians = {
        way: {part: statistics.median(one[part] for one in each) for part in each[0]} for way, each in found.items()
    }
    print("part        " + "".join(f"{way:>18}" for way in WAYS))
    for part in medians["ours"]:
        print(f"{part:12}" + "".join(f"{medians[way][part]:18,.3f}" for way in WAYS))


def measured(options: argparse.Namespace, way: Way) -> dict[str, float]:
    """Medians of seconds by part, their sum, and MiB at the peak of this process."""
    torch.set_num_threads(options.threads)
    base = base_of(options)
    body = partial(AttentionBody, root_input=True, causal=False)
    drafter = ParallelDrafter(base, options.frames, body, PrefixSearch(16)).train()
    rng = torch.Generator().manual_seed(0)
    tokens = [torch.randint(options.vocabulary, (options.length,), generator=rng) for _ in range(options.rows)]
    rows = TokenSequences(tokens, [[(0, options.length, True)]] * options.rows)
    batches = Batches(rows, base, options.rows, options.anchors, options.labels, 0)
    optimizer = OptimizerSettings(
        steps=100, learning_rate=1e-4, warmup_steps=1, min_lr_ratio=0.1, betas=(0.9, 0.95), weight_decay=0.0,
        max_grad_norm=1.0,
        clip_value=None, autocast=False,
    )  # fmt: skip
    engine = TorchEngine(drafter, drafter.trainable_parameters(), optimizer, Distributed())
    parts = [one_step(base, drafter, way, batches, engine, number) for number in range(options.repeats + 1)]
    medians = {part: statistics.median(one[part] for one in parts[1:]) for part in parts[0]}  # the first warms up
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return medians | {"step, s": sum(medians.values()), "peak, MiB": held}


def one_step(
    base: Timed, drafter: ParallelDrafter, way: Way, batches: Batches, engine: TorchEngine, number: int
) -> dict[str, float]:
    times = [time.perf_counter()]

    def passed() -> float:
        times.append(time.perf_counter())
        return times[-1] - times[-2]

    batch = batches.batch(number)
    parts = {"data": passed() - base.seconds, "base": base.seconds}
    emissions = drafter(batch)
    parts["head"] = passed()
    project, lose = way
    projected = project(emissions, batch)
    parts["projection"] = passed()
    value = lose(projected, batch)
    parts["loss"] = passed()
    value.backward()
    parts["backward"] = passed()
    engine.step([])  # what is left of a step when the gradients are there
    parts["optimiser"] = passed()
    return parts


def aligned(scores: AlignmentScores, batch: Batch) -> Tensor:
    value_BA = ctc_window_likelihoods(scores, batch).text_X
    return -value_BA.where(value_BA.isfinite(), 0).mean()


def native(log_probs_BATC: Tensor, batch: Batch) -> Tensor:
    log_probs_TXC = log_probs_BATC.flatten(0, 1).transpose(0, 1)
    lengths_X = batch.lengths_BA.flatten()
    frames_X = torch.full_like(lengths_X, len(log_probs_TXC))
    labels_XS = batch.labels_BAS.flatten(0, 1).clamp(min=0)
    blank = log_probs_TXC.shape[-1] - 1
    return F.ctc_loss(log_probs_TXC, labels_XS, frames_X, lengths_X, blank, "none", zero_infinity=True).mean()


WAYS: dict[str, Way] = {
    "ours": (lambda emissions, batch: emissions.scores(batch.labels_BAS), aligned),
    "native": (lambda emissions, batch: emissions.logits().log_softmax(-1), native),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {
        "vocabulary": 32_000, "width": 256, "layers": 8, "rows": 4, "length": 256, "anchors": 64, "frames": 8,
        "labels": 4,
        "repeats": 5, "rounds": 3, "threads": 1,
    }  # fmt: skip
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--way", choices=list(WAYS), help="one way alone, in this process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
