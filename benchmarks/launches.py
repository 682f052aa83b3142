"""Launches, host synchronisations and bytes transferred per decoding step: `python benchmarks/launches.py --nodes 16`.

Every drafter of configs/drafter with random weights on the embedded base, moved to the simulated accelerator. Counted
are a few steps after the first ones, which read the prompt and allocate, as they are before they are captured: in a
graph all launches of a step are one. "Beside the base's" leaves out the launches within the layers of the base; its
lm_head is counted. An operation of `ctcdraft/fused.py` counts the kernels that it launches on CUDA, and a topk, a sort
or a product as one. No times: only an accelerator has them.

    exact shapes         steps as they are without base.static_shapes, all in PyTorch
    fixed shapes         with kernels of Triton
    searches in PyTorch  with these but for the prefix searches
    all in PyTorch       as on an accelerator without Triton
    synchronisations     of the host, and bytes transferred, with exact and with fixed shapes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.decoding import settings
from benchmarks.drafter_cases import NAMES, drafter_cases
from benchmarks.simulated.device import active, count, device
from benchmarks.simulated.records import Report
from benchmarks.simulated.rules import without_kernels
from ctcdraft.config.cli import REPOSITORY
from ctcdraft.decoding.loop import Context, generate, why_not_captured
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.errors import check_int, run_cli
from ctcdraft.fused import OPERATIONS
from ctcdraft.models.loading import load_base

TINY = str(REPOSITORY / "data" / "tiny" / "base")
SEARCHES = ("fused_prefix_search", "expand_level", "select_children", "select_levels")
AUX_LAYERS = ("last", 0.22, 0.61)  # those of configs/aux_layers/of_ctc_gru.yaml


class StepCounter:
    """A drafter whose steps, from `first` to `last`, are counted."""

    def __init__(self, drafter: Any, report: Report, base: Any, first: int, last: int) -> None:
        self.drafter, self.report, self.first, self.last = drafter, report, first, last
        self.steps, self.of_base, self.totals = 0, 0, dict[str, int]()
        layers, entered = base.lm.base_model, [0]
        self.base, self.fused_layers = base, base.fused_layers
        if self.fused_layers is not None:
            base.fused_layers = self.run_fused
        self.hooks = [
            layers.register_forward_pre_hook(lambda *_: entered.append(report.launches.total())),
            layers.register_forward_hook(lambda *_: self.leave(entered.pop())),
        ]

    def run_fused(self, *read: Any) -> torch.Tensor:
        launches = self.report.launches.total()
        states_ND = self.fused_layers(*read)
        self.leave(launches)
        return states_ND

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
        self.base.fused_layers = self.fused_layers
        return {name: total / (self.last - self.first) for name, total in self.totals.items()}


@dataclass(frozen=True)
class Case:
    """What is run on the simulated accelerator."""

    base: Any
    prompt_L: torch.Tensor
    settings: DecodingSettings
    steps: int

    def count(self, drafter: Any, fixed_shapes: bool, in_torch: Iterable[str]) -> dict[str, float]:
        """Return the counts per step. in_torch: operations of ctcdraft that no kernel does."""
        self.base.static_shapes = StaticShapes() if fixed_shapes else None
        if fixed_shapes:
            self.base.fuse_layers()
        try:
            with without_kernels(in_torch):
                counts = measure(self.base, drafter, self.prompt_L, self.settings, self.steps)
        finally:
            self.base.static_shapes = None
        return counts | {"beside": counts["launches"] - counts["of_base"]}


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    with active():
        base = load_base(TINY, "float32", str(device()), aux_layers=AUX_LAYERS)
        drafters = drafter_cases(base, TINY)
    prompt = base.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Natalia has 4 boxes of 12 pens. How many pens has she?"}],
        add_generation_prompt=True, return_dict=False,
    )  # fmt: skip
    how = settings(options.nodes, options.nodes * (options.steps + 3), options.temperature)
    case = Case(base, torch.tensor(prompt), how, options.steps)
    print("| drafter | exact shapes | fixed shapes | searches in PyTorch | all in PyTorch | synchronisations | bytes |")
    print("|---|---|---|---|---|---|---|")
    for name in options.drafters:
        print(row(name, drafters[name], case), flush=True)


def row(name: str, drafter: Any, case: Case) -> str:
    before = case.count(drafter, False, OPERATIONS)
    if (reason := why_not_captured(drafter)) is not None:
        cells = [f"none: {reason}", "", "", f"{before['synchronisations']:.1f}", f"{before['bytes']:.0f}"]
    else:
        after, *in_torch = (case.count(drafter, True, names) for names in ((), SEARCHES, OPERATIONS))
        cells = [f"{one['beside']:.0f}" for one in (after, *in_torch)]
        for kind in ("synchronisations", "bytes"):
            cells.append(f"{before[kind]:.1f} -> {after[kind]:.1f}".replace(".0", ""))
    return f"| {name} | {before['beside']:.0f} | {' | '.join(cells)} |"


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
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafters", nargs="+", default=list(NAMES), choices=NAMES)
    options = parser.parse_args()
    for key in ("nodes", "steps"):
        check_int(getattr(options, key), f"--{key}")
    return options


if __name__ == "__main__":
    run_cli("launches", lambda arguments: main())
