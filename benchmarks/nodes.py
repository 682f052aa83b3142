"""`decoding.nodes=auto` against every fixed tree size: `python benchmarks/nodes.py runs/demo ...`.

The size is chosen on one half of the held-out prompts; then all sizes and the chosen one answer the other half in one
process, in turns, in an order that is shuffled for every prompt. Several runs or drafters may be named.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path

import torch

from ctcdraft.config.cli import register_resolvers
from ctcdraft.config.contestants import build_contestant, resolve
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.evaluation.benchmarks import project_prompts
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.environment import hardware_name
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.tree_size import TreeSizeSearch, choose_sizes
from ctcdraft.evaluation.runner import turn_prompt
from ctcdraft.models.loading import load_base

# Of the answers; on a machine that others work on too, the processor's own time does not count their turns.
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"


def main() -> None:
    options = arguments()
    register_resolvers()
    torch.set_num_threads(options.threads)
    clock = CLOCKS[options.clock]
    base = load_base(options.base, options.dtype, options.device).for_inference()
    path = str(TINY / "prompts" / "held_out.jsonl")
    prompts = project_prompts(path, "benchmark", None).prompts
    for_choice, for_test = prompts[::2][: options.prompts], prompts[1::2][: options.prompts]
    sizing = TreeSizeSearch(options.nodes, path, options.prompts, timed=2, timed_tokens=48, repeats=5)
    how = DecodingSettings(options.max_new_tokens, sizing.nodes[-1], 0.0, 0, 1.0, match, lossless=True)
    drafters = {name: build_contestant(resolve(name), base).drafter for name in options.contestants}
    found = choose_sizes(
        EvaluationSetup(base, {AUTOREGRESSIVE: Autoregressive(base), **drafters}, how, 0), sizing, for_choice
    )
    print(f"{hardware_name(base.device)}, {options.dtype}, base {base.name}, {options.clock} time")
    for name, choice in found.items():
        chosen = choice.best.nodes
        arms = {f"{nodes} nodes": nodes for nodes in sizing.nodes} | {"auto": chosen, "autoregression": 1}
        seconds, tokens = dict.fromkeys(arms, 0.0), 0
        for round_ in range(options.repeats + 1):
            for number, prompt in enumerate(for_test if round_ else for_test[:1]):  # a warm-up first
                prompt_L = turn_prompt(base, prompt, [])[0]
                for arm in random.Random(f"{round_} {number}").sample(list(arms), len(arms)):
                    drafter = drafters[name] if arms[arm] > 1 else Autoregressive(base)
                    began = clock()
                    said = generate(base, drafter, prompt_L, replace(how, nodes=arms[arm]), base.stop_token_ids, 0)
                    seconds[arm] += clock() - began if round_ else 0.0
                tokens += len(said.tokens) - 1 if round_ else 0
        fixed = {arm: taken for arm, taken in seconds.items() if arm not in ("auto", "autoregression")}
        best = min(fixed, key=lambda arm: fixed[arm])
        for size in choice.sizes:
            measured = seconds["autoregression"] / seconds[f"{size.nodes} nodes"]
            print(
                f"{name}  {size.nodes:3} nodes: tau {size.tau:.3f}, cost {size.cost:.3f}, "
                f"predicted {size.predicted_speedup:.3f}, measured {measured:.3f}"
            )
        print(
            f"{name}  auto chose {chosen}: {tokens / seconds['auto']:.1f} tokens/s, "
            f"{fixed[best] / seconds['auto']:.3f} times as fast as the best fixed size ({best}); "
            f"{seconds[f'{chosen} nodes'] / seconds['auto']:.3f} times as fast as that size once more: noise"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestants", nargs="+", help="run directories, or drafters without weights")
    parser.add_argument("--base", default=str(TINY / "base"))
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 6, 8, 12, 16, 24, 32, 48, 64])
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
