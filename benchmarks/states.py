"""Cost of stored hidden states and their effect on the loss: `python benchmarks/states.py --corpus PREPARED`.

The same training run with online hidden states and with each precision of the store: differences of the losses, bytes
per token, and read speed. A run with another seed shows how far two runs on different data lie apart. The store has
just been written, so it is read from the page cache, not from the disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from ctcdraft.corpus import prepared
from ctcdraft.corpus.hidden_states import PRECISIONS, OfflineHiddenStates
from ctcdraft.corpus.token_store import TokenSequences
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.loading import load_base
from ctcdraft.training.validation import split_held_out

REPOSITORY = Path(__file__).resolve().parent.parent
BASE = REPOSITORY / "data" / "tiny" / "base"
ROWS = 12  # batch size, as in the demo


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as place:
        store = Path(place) / "states"
        read(options, store)
        if not options.steps:
            return
        stored = {
            name: [f"hidden_states.path={store / name}", f"hidden_states.precision={name}"] for name in PRECISIONS
        }
        live = losses(options, Path(place) / "live", ["hidden_states=online"])
        print(f"{options.steps} steps of {ROWS} rows, float32; loss online {live[0]:.4f} to {live[-1]:.4f}")
        for name, overrides in stored.items():
            compare(name, live, losses(options, Path(place) / name, ["hidden_states=offline", *overrides]))
        compare("online, seed 1", live, losses(options, Path(place) / "seed", ["hidden_states=online", "seed=1"]))


def losses(options: argparse.Namespace, run: Path, overrides: list[str]) -> list[float]:
    """Return the loss of every step of a run of train.py."""
    command = [
        sys.executable, str(REPOSITORY / "train.py"), "experiment=demo", f"corpus.path={options.corpus}", f"run={run}",
        f"trainer.steps={options.steps}", f"trainer.num_threads={options.threads}", "trainer.probe_prompts=1",
        f"trainer.probe_every={options.steps}", "trainer.autocast=false", "dtype=float32", "device=cpu", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-1000:] + done.stderr[-3000:])
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def compare(name: str, live: list[float], other: list[float]) -> None:
    apart = [abs(one - two) for one, two in zip(live, other, strict=True)]
    last = len(apart) // 3
    print(
        f"{name:12} first step {apart[0]:.2e} apart, largest {max(apart):.2e}, median {statistics.median(apart):.2e}; "
        f"mean loss of the last {last} steps {statistics.mean(other[-last:]):.4f} "
        f"(online {statistics.mean(live[-last:]):.4f})"
    )


def read(options: argparse.Namespace, store: Path) -> None:
    """Print bytes per token and read speed of every precision, over the rows that the runs trained on."""
    base = load_base(str(BASE), "float32", "cpu", "tiny")
    rows, _ = split_held_out(
        prepared.read_corpus(Path(options.corpus), base.fingerprint()).rows, 1, base.context_length
    )
    tokens = sum(map(len, rows.tokens))
    print(f"{len(rows):,} rows, {tokens:,} tokens, states of {base.width} values; in batches of {ROWS} rows")
    rates = [rate(lambda batch: live(base, rows, batch), rows, seed, 5) for seed in range(options.repeats)]
    print(f"online    {spread(rates)}, read by the base")
    bytes_of: dict[str, int] = {}
    for name in PRECISIONS:
        states = OfflineHiddenStates(base, rows.tokens, str(store / name), name, 64, 100)
        start = time.perf_counter()
        states.precompute()
        written = time.perf_counter() - start
        bytes_of[name] = sum(file.stat().st_size for file in store.glob(f"{name}/*/*.safetensors"))
        rates = [rate(partial(stored_rows, states), rows, seed, None) for seed in range(options.repeats)]
        a_token = bytes_of[name] / tokens
        print(
            f"{name:9} {spread(rates)}, {statistics.median(rates) * a_token / 1e6:,.1f} MB/s; {a_token:,.1f} bytes a "
            f"token on disk, {bytes_of[name] / 1e6:,.1f} MB in all, written in {written:.2f} s"
        )
    for name in ("bfloat16", "float32"):
        print(f"int8 takes {bytes_of['int8'] / bytes_of[name]:.3f} of the disk of {name}")


def live(base: BaseLM, rows: TokenSequences, batch: Sequence[int]) -> None:
    tokens_BL = pad_sequence([rows.tokens[index] for index in batch], batch_first=True)
    base.hidden_states(tokens_BL, torch.ones_like(tokens_BL))


def stored_rows(states: OfflineHiddenStates, batch: Sequence[int]) -> None:
    for index in batch:
        states.row(index)


def rate(read_rows: Callable[[Sequence[int]], None], rows: TokenSequences, seed: int, limit: int | None) -> float:
    """Return tokens per second, through all rows in random batches, or through `limit` batches."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = [order[start : start + ROWS] for start in range(0, len(order), ROWS)][:limit]
    start = time.perf_counter()
    for batch in batches:
        read_rows(batch)
    seconds = time.perf_counter() - start
    return sum(len(rows.tokens[index]) for batch in batches for index in batch) / seconds


def spread(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):9,.0f} tokens/s ({min(rates):,.0f} to {max(rates):,.0f})"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="a prepared corpus of the embedded base")
    parser.add_argument("--steps", type=int, default=150, help="of each training; 0: none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
