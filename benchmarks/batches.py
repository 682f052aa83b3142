"""Speed-up from packed sequences and from prefetching: `python benchmarks/batches.py --prepared FOLDER`.

Every way trains a drafter of its own on the same corpus, in turns within one process, `--steps` steps per turn. A step
of packed rows takes as many responses and windows as one of padded rows, up to whole packs. Medians over turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from ctcdraft.config.cli import compose_config
from ctcdraft.config.drafters import build_drafter
from ctcdraft.corpus import prepared
from ctcdraft.corpus.batches import Batches, PackingFunction, PrefetchingBatches, first_fit_packing, one_per_row
from ctcdraft.corpus.token_store import TokenSequences
from ctcdraft.distributed import Distributed
from ctcdraft.training.engine import OptimizerSettings
from ctcdraft.training.run_directory import RunDirectory
from ctcdraft.training.trainer import Trainer, TrainerSettings
from ctcdraft.training.validation import DecodingValidation, split_held_out


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    config = compose_config("train", "experiment=demo", *options.overrides)
    base = instantiate(config.base)
    corpus = prepared.read_corpus(Path(options.prepared), base.fingerprint())
    rows, _ = split_held_out(corpus.rows, 0, min(config.trainer.max_length, base.context_length))
    with ExitStack() as stack:
        ways = {}
        for pack in (None, *options.pack):
            for ahead in (False, True):
                name = f"{'rows' if pack is None else f'packs of {pack}'}{', prefetched' if ahead else ''}"
                ways[name] = way(config, base, rows, pack, options.steps * (options.repeats + 1), ahead)
                stack.enter_context(closing(ways[name].batches))
        measure(ways, options.steps, options.repeats)


def way(config: DictConfig, base: Any, rows: TokenSequences, pack: int | None, steps: int, pending: bool) -> Trainer:
    """Return a trainer whose steps take `trainer.batch_size` responses, or as many packs, and equally many windows."""
    objective, settings = instantiate(config.objective), config.trainer
    per_step, anchors = settings.batch_size, settings.anchors_per_sequence
    filling: PackingFunction = one_per_row
    if pack is not None:
        tokens = per_step * statistics.mean(map(len, rows.tokens))
        filling = first_fit_packing(pack)
        per_step = max(1, round(tokens / pack))
        anchors = round(anchors * settings.batch_size / per_step)
    batches = Batches(rows, base, per_step, anchors, objective.labels, 0, instantiate(config.hidden_states), filling)
    batches.hidden_states.precompute()
    torch.manual_seed(0)
    drafter = build_drafter(config.drafter, base).train()
    optimizer = replace(OptimizerSettings.from_config(settings), steps=steps)
    engine = instantiate(config.engine)(drafter, drafter.trainable_parameters(), optimizer, Distributed())
    feed = PrefetchingBatches(batches, steps) if pending else batches
    nowhere, silent = RunDirectory(Path()), DecodingValidation(base, [], instantiate(config.decoding))
    once = TrainerSettings(
        steps=steps, gradient_accumulation_steps=1, probe_every=steps, checkpoint_every=steps, checkpoint_minutes=None,
        save_total_limit=1,
        max_nonfinite_steps=steps,
    )  # fmt: skip
    return Trainer(nowhere, drafter, objective, feed, engine, silent, once)


def measure(ways: dict[str, Trainer], steps: int, repeats: int) -> None:
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, trainer in ways.items():
            feed = trainer.batches
            batches = feed.batches if isinstance(feed, PrefetchingBatches) else feed
            first, began = trainer.step, time.perf_counter()
            for _ in range(steps):
                trainer.train_step()
                trainer.step += 1
            seconds = time.perf_counter() - began
            if turn:  # the first turn is a warm-up
                found[name].append((seconds / steps, *held(batches, range(first, first + steps))))
    for name, turns in found.items():
        seconds, tokens, windows, padding = map(statistics.median, zip(*turns, strict=True))
        print(
            f"{name:24} {seconds * 1000:7.1f} ms a step  {tokens / seconds:8,.0f} tokens/s  "
            f"{windows / seconds:7,.0f} windows/s  {padding:6.1%} padding"
        )


def held(batches: Batches, steps: range) -> tuple[float, float, float]:
    """Return the mean per step of response tokens and of windows, and the share of padding in all steps."""
    tokens = cells = windows = 0
    for step in steps:
        lengths = [sum(len(batches.rows.tokens[i]) for i in pack) for pack in batches.packs(step)]
        tokens, cells = tokens + sum(lengths), cells + len(lengths) * max(lengths)
        windows += int((batches.prepare(step)["lengths_BA"] > 0).sum())
    return tokens / len(steps), windows / len(steps), 1 - tokens / cells


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", required=True, help="a prepared corpus of the base")
    parser.add_argument("--pack", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="as train.py takes them, over experiment=demo")
    return parser.parse_args()


if __name__ == "__main__":
    main()
