"""Speed-up from column-major weights on a CPU: `python benchmarks/few_rows.py runs/demo prompt_lookup`.

Two copies of a base model and of every drafter, one with the memory layout of evaluate.py (nn/weight_layout.py) and one
as loaded, answer the same prompts in one process, in an order that is shuffled for every prompt. Time alone; the tokens
are counted as equal or not.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decoding import TINY, benchmark_prompts, settings
from ctcdraft.config.cli import register_resolvers
from ctcdraft.config.contestants import build_contestant, resolve
from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.evaluation.environment import hardware_name
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.models.loading import load_base

AS_LOADED, AS_STORED = "as loaded", "as stored"


def main() -> None:
    options = arguments()
    register_resolvers()
    torch.set_num_threads(1)
    sides = {AS_LOADED: side(options, stored=False), AS_STORED: side(options, stored=True)}
    print(
        f"{hardware_name(torch.device('cpu'))}, float32, base {Path(options.base).name}, {options.nodes} nodes, wall "
        "time"
    )
    seconds: dict[tuple[str, str], list[float]] = {(how, name): [] for how in sides for name in sides[how][1]}
    same = answers = 0
    prompts = benchmark_prompts(sides[AS_LOADED][0], options)
    for round_ in range(options.repeats + 1):
        for number, prompt_L in enumerate(prompts if round_ else prompts[:1]):  # a warm-up first
            responses = {}
            for how, name in random.Random(f"{round_} {number}").sample(list(seconds), len(seconds)):
                began = time.perf_counter()
                responses[how, name] = answered(*sides[how], name, prompt_L, options)
                if round_:
                    seconds[how, name].append(time.perf_counter() - began)
            same += sum(tokens == responses[AS_STORED, AUTOREGRESSIVE] for tokens in responses.values())
            answers += len(responses)
    for name in sides[AS_LOADED][1]:
        loaded, stored = seconds[AS_LOADED, name], seconds[AS_STORED, name]
        gain = statistics.median(old / new for old, new in zip(stored, loaded, strict=True))
        ups = [sum(seconds[how, AUTOREGRESSIVE]) / sum(seconds[how, name]) for how in (AS_STORED, AS_LOADED)]
        print(f"{name:20} {gain:.3f} times as fast; speed-up {ups[0]:.3f} {AS_STORED}, {ups[1]:.3f} {AS_LOADED}")
    print(f"{same} of {answers} answers are equal, token for token")


def side(options: argparse.Namespace, stored: bool) -> tuple[Any, dict[str, Any]]:
    """Return a base model and its drafters."""
    base = load_base(options.base, "float32", "cpu").for_inference()
    drafters: dict[str, Any] = {AUTOREGRESSIVE: Autoregressive(base)}
    drafters |= {Path(name).name: build_contestant(resolve(name), base).drafter for name in options.contestants}
    modules = [base.lm, *(each for each in drafters.values() if isinstance(each, nn.Module))]
    for weight in (weight for module in modules if stored for weight in module.parameters()):
        weight.data = weight.data.contiguous()
    return base, drafters


def answered(
    base: Any, drafters: dict[str, Any], name: str, prompt_L: Tensor, options: argparse.Namespace
) -> tuple[int, ...]:
    how = settings(options.nodes, options.max_new_tokens)
    return generate(base, drafters[name], prompt_L, how, base.stop_token_ids, 0).tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestants", nargs="+", help="run directories, or drafters without weights")
    parser.add_argument("--base", default=str(TINY / "base"))
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
