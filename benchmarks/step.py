"""Where the time of a training step goes: `python benchmarks/step.py`; other shapes by --words --width --anchors ...

data: choosing rows, cutting windows. base: its states of the text. head: the body's forward pass. projection: scores
of labels and blank, the vocabulary's gradient included, which is formed there. loss: the alignment recursion.
backward: through loss and body. optimiser: clipping and the update. A random base; medians, in seconds.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from functools import partial
from typing import Any

import torch
import transformers

from ctcdraft.base import BaseLM
from ctcdraft.corpus.batches import Batches, Rows
from ctcdraft.ctc.forward import likelihoods
from ctcdraft.drafters.block import BlockDrafter
from ctcdraft.drafters.paths import PrefixSearch
from ctcdraft.nn.bodies import AttentionBody
from ctcdraft.objectives.ctc import CTC
from ctcdraft.training.engine import TorchEngine
from ctcdraft.training.peers import Peers


class Timed(BaseLM):
    """A base that says how long its newest states took."""

    seconds = 0.0

    def states(self, *given: Any) -> torch.Tensor:
        since = time.perf_counter()
        states_BLD = super().states(*given)
        self.seconds = time.perf_counter() - since
        return states_BLD


def base_of(options: argparse.Namespace) -> Timed:
    config = transformers.LlamaConfig(
        vocab_size=options.words, hidden_size=options.width, intermediate_size=3 * options.width,
        num_hidden_layers=options.layers, num_attention_heads=options.width // 64,
        max_position_embeddings=options.length,
    )  # fmt: skip
    torch.manual_seed(0)
    return Timed(transformers.LlamaForCausalLM(config).eval(), Plain(), "random")


class Plain:
    """All that a base asks of a tokenizer that is never used."""

    chat_template = None
    eos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {}


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    base = base_of(options)
    body = partial(AttentionBody, root_input=True, causal=False)
    drafter = BlockDrafter(base, options.frames, body, PrefixSearch(16)).train()
    rng = torch.Generator().manual_seed(0)
    tokens = [torch.randint(options.words, (options.length,), generator=rng) for _ in range(options.rows)]
    rows = Rows(tokens, [torch.ones(options.length, dtype=torch.int)] * options.rows, [True] * options.rows)
    batches = Batches(rows, base, options.rows, options.anchors, options.labels, 0)
    engine = TorchEngine(
        drafter, drafter.own_parameters(), steps=100, learning_rate=1e-4, warmup=1, final_share=0.1, betas=(0.9, 0.95),
        weight_decay=0.0, clip_norm=1.0, clip_value=None, autocast=False, peers=Peers(),
    )  # fmt: skip
    seconds: dict[str, list[float]] = {}
    for number in range(options.repeats + 1):
        parts = one_step(base, drafter, CTC(options.labels), batches, engine, number)
        for name, value in parts.items():
            seconds.setdefault(name, []).append(value)
    medians = {name: statistics.median(several[1:]) for name, several in seconds.items()}  # the first warms up
    whole = sum(medians.values())
    print(
        f"{options.rows} rows x {options.length} tokens, {options.anchors} anchors x {options.frames} frames, "
        f"{options.words:,} words, width {options.width}, {options.layers} layers, {options.threads} thread"
    )
    for name, value in medians.items():
        print(f"{name:11} {value:7.3f} s  {value / whole:6.1%}")
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{'step':11} {whole:7.3f} s          peak memory of the process {held:,.0f} MiB")


def one_step(
    base: Timed, drafter: BlockDrafter, objective: CTC, batches: Batches, engine: TorchEngine, number: int
) -> dict[str, float]:
    times = [time.perf_counter()]

    def passed() -> float:
        times.append(time.perf_counter())
        return times[-1] - times[-2]

    batch = batches.batch(number)
    parts = {"data": passed() - base.seconds, "base": base.seconds}
    emissions = drafter(batch)
    parts["head"] = passed()
    scores = emissions.scores(batch.labels_BAS)
    parts["projection"] = passed()
    told = (scores.label_BATS, scores.hold_BATS, scores.blank_BATP, batch.labels_BAS, batch.lengths_BA)
    value_BA = likelihoods(*told).text_X
    value = -value_BA.where(value_BA.isfinite(), 0).mean() / objective.labels
    parts["loss"] = passed()
    value.backward()
    parts["backward"] = passed()
    engine.step([])  # what is left of a step when the gradients are there
    parts["optimiser"] = passed()
    return parts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {
        "words": 32_000, "width": 256, "layers": 8, "rows": 4, "length": 256, "anchors": 64, "frames": 8, "labels": 4,
        "repeats": 5, "threads": 1,
    }  # fmt: skip
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
