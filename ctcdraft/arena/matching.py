"""Equal budgets before anybody is trained: a dial of each entrant is turned until it costs what the reference costs.

parameters   trained numbers, counted
latency      draft time of untrained heads, all interleaved; where the clock is too unsteady to tell 5 %, operations and
             bytes of a draft instead
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ctcdraft.arena.book import MATCHING, Book
from ctcdraft.arena.rules import PARAMETERS, Dial, Entrant, Rules
from ctcdraft.decoding.loop import Context, Settings
from ctcdraft.evaluation.sizing import rising
from ctcdraft.evaluation.timing import instrument
from ctcdraft.front_door import build_drafter

CANDIDATES = 6  # sizes of a dial that are timed before one is chosen between them
NEVER: frozenset[int] = frozenset()  # random words may not end a text


@dataclass(frozen=True)
class Matched:
    """value: of the dial; None where the entrant stays as it is. ratio: its cost over the reference's. interval: of
    the ratio, where it was timed. how: in words."""

    key: str
    value: int | None
    ratio: float
    interval: tuple[float, float] | None
    how: str


def match(rules: Rules, book: Book, arm: str) -> dict[str, Matched]:
    """Every entrant's dial in an arm; found once, then read from the book."""
    there = book.read(MATCHING)
    if arm not in there or there[arm].keys() != rules.entrants.keys():
        bench = Bench(rules)
        found = {name: bench.matched(entrant, arm) for name, entrant in rules.entrants.items()}
        book.add(MATCHING, arm, {name: asdict(one) for name, one in found.items()})
    return {name: Matched(**one) for name, one in book.read(MATCHING)[arm].items()}


def composed(rules: Rules, words: Sequence[str]) -> Any:
    """The config of train.py for these words."""
    from hydra import compose

    return compose("train", overrides=[*rules.work, *words])


class Bench:
    """Builds entrants on the base, untrained, and says what they cost."""

    def __init__(self, rules: Rules) -> None:
        from hydra.utils import instantiate

        self.rules, config = rules, composed(rules, ())
        self.configs: dict[str, Any] = {}  # by entrant: a search builds each of them many times
        if config.trainer.threads:
            torch.set_num_threads(config.trainer.threads)
        self.base = instantiate(config.base)
        self.settings: Settings = replace(
            instantiate(config.decoding), nodes=rules.timing.nodes[0], max_new_tokens=rules.matching.passes + 1
        )
        self.text_L = torch.randint(
            self.base.vocabulary, (rules.matching.context,), generator=torch.Generator().manual_seed(rules.seed)
        ).to(self.base.device)

    def build(self, entrant: Entrant, dial: Dial | None = None, value: int | None = None) -> Any:
        from omegaconf import OmegaConf

        if entrant.name not in self.configs:
            self.configs[entrant.name] = composed(self.rules, entrant.words)
        config = self.configs[entrant.name]
        if dial is not None:
            config = config.copy()
            OmegaConf.update(config, dial.key, value)
        torch.manual_seed(self.rules.seed)
        return build_drafter(config.drafter, self.base).to(self.base.dtype).eval()

    def matched(self, entrant: Entrant, arm: str) -> Matched:
        reference = self.build(self.rules.entrants[self.rules.reference])
        if entrant.name == self.rules.reference:
            return Matched("", None, 1.0, None, "the reference")
        dial = entrant.dials.get(arm)
        if arm == PARAMETERS:
            return self.counted(entrant, dial, count, count(reference), "parameters counted")
        if dial is None:
            ratio, interval = self.ratio(self.build(entrant), reference)
            return Matched("", None, ratio, interval, "timed as it is: it has no dial")
        value = self.timed(entrant, dial, reference)
        ratio, interval = self.ratio(self.build(entrant, dial, value), reference)
        if interval[1] - interval[0] <= 2 * self.rules.matching.tolerance * ratio:
            return Matched(dial.key, value, ratio, interval, "draft time, medians of interleaved repeats")
        how = (
            f"operations and bytes of a draft, because the clock told {ratio:.2f} [{interval[0]:.2f}, "
            f"{interval[1]:.2f}] only"
        )
        return self.counted(entrant, dial, self.work, self.work(reference), how)

    def counted(
        self, entrant: Entrant, dial: Dial | None, cost: Callable[[Any], float], wanted: float, how: str
    ) -> Matched:
        if dial is None:
            return Matched("", None, cost(self.build(entrant)) / wanted, None, f"{how}; it has no dial")

        def at(value: int) -> float:
            return cost(self.build(entrant, dial, value))

        value = nearest(at, wanted, dial.least, dial.most)
        return Matched(dial.key, value, at(value) / wanted, None, how)

    def timed(self, entrant: Entrant, dial: Dial, reference: Any) -> int:
        """The value whose draft takes as long as the reference's, between sizes that were timed in turns with it."""
        values = spaced(dial.least, dial.most, CANDIDATES)
        heads = {str(value): self.build(entrant, dial, value) for value in values}
        medians = {name: statistics.median(some) for name, some in self.seconds({"": reference, **heads}).items()}
        return between(values, rising([medians[str(value)] for value in values]), medians[""])

    def ratio(self, drafter: Any, reference: Any) -> tuple[float, tuple[float, float]]:
        taken = self.seconds({"ours": drafter, "theirs": reference})
        return ratio_of_medians(taken["ours"], taken["theirs"], self.rules.seed)

    def seconds(self, drafters: Mapping[str, Any]) -> dict[str, list[float]]:
        """Of a draft, tree building included, one number a repeat; all take turns in an order of its own each time."""
        taken: dict[str, list[float]] = {name: [] for name in drafters}
        rng = random.Random(self.rules.seed)
        for repeat in range(self.rules.matching.repeats + 1):  # the first one warms up
            for name in rng.sample(list(drafters), len(drafters)):
                spent = instrument(self.base, drafters[name], self.text_L, self.settings, self.rules.seed, NEVER)
                if repeat:
                    taken[name].append((spent.seconds["draft"] + spent.seconds["tree"]) / spent.passes)
        return taken

    def work(self, drafter: Any) -> float:
        """Of one draft: the geometric mean of its operations and of the bytes that its products read and write."""
        traffic = Traffic()
        with torch.no_grad():
            context = self.context()
            _, memory = drafter.draft(context, None, torch.Generator(self.text_L.device))
            later = replace(context, tokens_L=torch.cat([context.tokens_L, context.tokens_L[-1:]]))
            later = replace(later, fresh_KD=context.fresh_KD[-1:])
            with FlopCounterMode(display=False) as counter, traffic:
                drafter.draft(later, memory, torch.Generator(self.text_L.device))
        return float((max(counter.get_total_flops(), 1) * max(traffic.bytes, 1)) ** 0.5)

    def context(self) -> Context:
        mask_1L = torch.ones_like(self.text_L)[None]
        states_LD = self.base.states(self.text_L[None], mask_1L)[0]
        tokens_L = torch.cat([self.text_L, self.text_L[-1:]])
        return Context(tokens_L, states_LD, 64, self.settings.nodes, self.settings.draft_law)


class Traffic(TorchDispatchMode):
    """Bytes that matrix products read and write."""

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.PRODUCTS:
            self.bytes += sum(one.nbytes for one in (*args, made) if isinstance(one, torch.Tensor))
        return made


def count(drafter: Any) -> float:
    return float(sum(weight.numel() for weight in drafter.own_parameters()))


def nearest(cost: Callable[[int], float], wanted: float, least: int, most: int) -> int:
    """The whole number whose cost, which grows with it, is nearest to what is wanted."""
    low, high = least, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) < wanted else (low, middle)
    return min((low, high), key=lambda value: abs(cost(value) - wanted))


def spaced(least: int, most: int, count: int) -> list[int]:
    """1 .. 64, 4 of them   ->   1 4 16 64"""
    ratio = (most / least) ** (1 / max(count - 1, 1))
    return sorted({round(least * ratio**step) for step in range(count)})


def between(values: Sequence[int], costs: Sequence[float], wanted: float) -> int:
    """The value at which the line through (values, costs), which never falls, comes to what is wanted.

    values 1 4, costs 10 16, wanted 12   ->   2
    """
    return round(float(np.interp(wanted, costs, values)))


def ratio_of_medians(
    ours: Sequence[float], theirs: Sequence[float], seed: int, draws: int = 2000
) -> tuple[float, tuple[float, float]]:
    """With its 95 % interval over repeats, drawn in pairs: what disturbs a repeat disturbs both."""
    pairs_R2 = np.stack([np.asarray(ours), np.asarray(theirs)], axis=1)
    drawn_DR = np.random.default_rng(seed).integers(len(pairs_R2), size=(draws, len(pairs_R2)))
    medians_D2 = np.median(pairs_R2[drawn_DR], axis=1)
    low, high = np.quantile(medians_D2[:, 0] / medians_D2[:, 1], [0.025, 0.975])
    whole = partial(np.median, axis=0)(pairs_R2)
    return float(whole[0] / whole[1]), (float(low), float(high))
