"""`decoding.nodes=adaptive` and `=auto` against the fixed tree sizes of sizing.adaptive_nodes.

    python benchmarks/tree_sizes.py base=tiny 'contestants=[RUN,junk]' benchmark=gsm8k benchmark.path=FILE threads=1

Takes the overrides of evaluate.py. Both choices are calibrated on other prompts (sizing.path). Then all sizes, both
choices and autoregression answer the first turns of the benchmark, in an order that is shuffled for every question,
four times each; the shortest time counts, since other work on the machine only ever adds to one.
Prints the speed-up of every arm without prefill, the predicted one, and adaptive trees relative to the fixed size that
turned out best on this benchmark; one contestant after another.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from hydra.utils import instantiate

from ctcdraft.config.cli import compose_config, register_resolvers
from ctcdraft.config.contestants import build_contestant, load_base, resolve_contestants
from ctcdraft.drafters.adaptive import AdaptiveDrafter
from ctcdraft.drafters.base import has_nested_trees
from ctcdraft.drafters.tree_policy import AdaptivePolicy
from ctcdraft.errors import run_cli
from ctcdraft.evaluation.bootstrap import ratio_interval
from ctcdraft.evaluation.contestants import EvaluationSetup, generate_answer
from ctcdraft.evaluation.environment import environment, hardware_name
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.calibration import choose_adaptive
from ctcdraft.evaluation.replay.tree_size import choose_fixed
from ctcdraft.evaluation.runner import turn_prompt

REPEATS = 4
Arms = Mapping[str, tuple[Any, int]]  # drafter and tree size


def main(arguments: list[str]) -> None:
    register_resolvers()
    config = compose_config("evaluate", *arguments)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    entries, benchmark = resolve_contestants(config), instantiate(config.benchmark)
    sizing = instantiate(config.sizing, _convert_="all")
    sizing = replace(sizing, nodes=sizing.adaptive_nodes)
    sizes = sizing.nodes
    settings = instantiate(config.decoding, nodes=sizes[-1])
    print(f"{hardware_name(torch.device(config.device))}, {environment()['git']}, {' '.join(arguments)}")
    for name, entry in entries.items():
        if name == AUTOREGRESSIVE:
            continue
        # With the layers of this head alone; drafters without weights take the base of the heads.
        base = load_base(config, {name: entry} if any(entry.runs()) else entries)
        autoregressive = build_contestant(entries[AUTOREGRESSIVE], base).drafter
        drafter = build_contestant(entry, base).drafter
        setup = EvaluationSetup(base, {AUTOREGRESSIVE: autoregressive, name: drafter}, settings, config.seed)
        prompts = sizing.calibration_prompts(benchmark)
        chosen = choose_adaptive(setup, sizing, prompts, benchmark.prompts)[name]
        policy = AdaptivePolicy.from_json(chosen["policy"])
        arms: dict[str, tuple[Any, int]] = {f"{nodes} nodes": (drafter, nodes) for nodes in sizes}
        arms |= {"adaptive": (AdaptiveDrafter(drafter, policy), sizes[-1]), AUTOREGRESSIVE: (autoregressive, 1)}
        if has_nested_trees(drafter):  # others cannot be replayed
            arms["auto"] = drafter, choose_fixed(setup, sizing, prompts, benchmark.prompts)[name]["chosen"]
        predicted = {f"{size['nodes']} nodes": size["predicted_speedup"] for size in chosen["sizes"]}
        texts = [turn_prompt(base, prompt, [])[0] for prompt in benchmark.prompts]
        report(f"{benchmark.name} {name}", predicted | {"adaptive": chosen["predicted"]}, *measure(setup, arms, texts))
        for row in chosen["reliability"]:
            print(f"{benchmark.name} {name} from {row['from']:.1f}: {row['nodes']} nodes, "
                  f"probability {row['probability']:.3f}, accepted {row['accepted']:.3f}")  # fmt: skip


def measure(setup: EvaluationSetup, arms: Arms, texts: Sequence[torch.Tensor]) -> tuple[dict, dict, int]:
    """Return seconds and decoding steps of every arm by question, and the number of answers that differ."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    random_state = random.Random(0)
    steps: dict[str, list[int]] = {arm: [] for arm in arms}
    unequal, base = 0, setup.base
    for number, prompt_L in enumerate([texts[0], *texts]):  # the first one warms up
        answers: dict[str, list[Any]] = {arm: [] for arm in arms}
        for arm in (arm for _ in range(REPEATS) for arm in random_state.sample(list(arms), len(arms))):
            drafter, nodes = arms[arm]
            settings = replace(setup.settings, nodes=nodes)
            answers[arm].append(generate_answer(base, drafter, prompt_L, settings, base.stop_token_ids, number))
        if number:
            for arm, repeats in answers.items():
                seconds[arm].append(min(answer.seconds_decode for answer in repeats))
                steps[arm].append(len(repeats[0].passes))
            truth = answers[AUTOREGRESSIVE][0].tokens
            unequal += sum(any(answer.tokens != truth for answer in repeats) for repeats in answers.values())
    return seconds, steps, unequal


def report(name: str, predicted: Mapping[str, float], seconds: Mapping, steps: Mapping, unequal: int) -> None:
    """Print an arm per line, and adaptive trees against the best fixed size."""
    total = {arm: sum(times) for arm, times in seconds.items()}
    for arm in seconds:
        low, high = ratio_interval(seconds[AUTOREGRESSIVE], seconds[arm], 0) or (0.0, 0.0)
        tau = sum(steps[AUTOREGRESSIVE]) / sum(steps[arm])  # autoregression commits one token in every step
        print(
            f"{name} {arm}: tau {tau:.3f}, speed-up {total[AUTOREGRESSIVE] / total[arm]:.3f} [{low:.3f}, {high:.3f}]"
            + (f", predicted {predicted[arm]:.3f}" if arm in predicted else "")
        )
    best = min((arm for arm in total if arm.endswith(" nodes")), key=total.__getitem__)
    low, high = ratio_interval(seconds[best], seconds["adaptive"], 0) or (0.0, 0.0)
    ratio = total[best] / total["adaptive"]
    print(f"{name} adaptive / best fixed ({best}): {ratio:.3f} [{low:.3f}, {high:.3f}], {unequal} answers differ")


if __name__ == "__main__":
    run_cli("tree_sizes", main)
