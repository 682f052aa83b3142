"""Launches, host synchronisations and bytes transferred per decoding step: `python benchmarks/launches.py --nodes 16`.

Every drafter of configs/drafter with random weights on the embedded base, moved to the simulated accelerator. Counted
are a few steps after the first ones, which read the prompt and allocate, as they are before they are captured: in a
graph all launches of a step are one. "Beside the base's" leaves out the launches within the layers of the base; its
lm_head is counted. No times: only an accelerator has them.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.drafter_cases import NAMES, drafter_cases
from benchmarks.simulated.device import active, count, device
from benchmarks.simulated.records import Report
from ctcdraft.config.cli import REPOSITORY
from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.verification import match
from ctcdraft.models.loading import load_base

TINY = str(REPOSITORY / "data" / "tiny" / "base")
AUX_LAYERS = ("last", 0.22, 0.61)  # those of configs/base/tiny.yaml


class StepCounter:
    """A drafter whose steps, from `first` to `last`, are counted."""

    def __init__(self, drafter: Any, report: Report, base: Any, first: int, last: int) -> None:
        self.drafter, self.report, self.first, self.last = drafter, report, first, last
        self.steps, self.of_base, self.totals = 0, 0, dict[str, int]()
        layers, entered = base.lm.base_model, [0]
        self.hooks = [
            layers.register_forward_pre_hook(lambda *_: entered.append(report.launches.total())),
            layers.register_forward_hook(lambda *_: self.leave(entered.pop())),
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def leave(self, launches: int) -> None:
        self.of_base += self.report.launches.total() - launches

    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> Any:
        if self.steps == self.first:
            self.report.clear()
            self.of_base = 0
        if self.steps == self.last:
            self.totals = {**self.report.totals(), "of_base": self.of_base}
        self.steps += 1
        return self.drafter.draft(context, memory, rng)

    def per_step(self) -> dict[str, float]:
        for hook in self.hooks:
            hook.remove()
        return {name: total / (self.last - self.first) for name, total in self.totals.items()}


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    settings = DecodingSettings(
        max_new_tokens=options.nodes * (options.steps + 3),
        nodes=options.nodes,
        temperature=options.temperature,
        top_k=0,
        top_p=1.0,
        verify=match,
        lossless=True,
    )
    with active():
        base = load_base(TINY, "float32", str(device()), aux_layers=AUX_LAYERS, static_shapes=not options.exact)
        cases = drafter_cases(base, TINY)
    print("| drafter | launches beside the base's | synchronisations | transfers | bytes transferred |")
    print("|---|---|---|---|---|")
    prompt = base.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Natalia has 4 boxes of 12 pens. How many pens has she?"}],
        add_generation_prompt=True, return_dict=False,
    )  # fmt: skip
    for name in options.drafters:
        step = measure(base, cases[name], torch.tensor(prompt), settings, options.steps)
        print(
            f"| {name} | {step['launches'] - step['of_base']:.0f} | {step['synchronisations']:.1f} | "
            f"{step['transfers']:.1f} | {step['bytes']:.0f} |",
            flush=True,
        )


def measure(
    base: Any, drafter: Any, prompt_L: torch.Tensor, settings: DecodingSettings, steps: int
) -> dict[str, float]:
    """Return the counts per step."""
    with count() as report:
        counter = StepCounter(drafter, report, base, first=2, last=2 + steps)
        generate(base, counter, prompt_L.to(device()), settings, frozenset(), 0, steps + 3)
    return counter.per_step()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--exact", action="store_true", help="steps of exact shapes, which cannot be captured")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafters", nargs="+", default=list(NAMES), choices=NAMES)
    return parser.parse_args()


if __name__ == "__main__":
    main()
