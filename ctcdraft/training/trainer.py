"""Training a drafter: batch, loss, step, probe, checkpoint. It knows contracts; it has never heard of CTC or Hydra."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from signal import SIGTERM
from time import monotonic
from typing import Any

import torch
from tqdm import tqdm

from ctcdraft.corpus.batches import Batches
from ctcdraft.corpus.prefetch import Prefetched
from ctcdraft.drafters.drafter import Batch, DraftHead
from ctcdraft.errors import InputError
from ctcdraft.objectives.objective import Loss, Objective
from ctcdraft.training.adapting import Adapter
from ctcdraft.training.checkpoint import RunDirectory, fill
from ctcdraft.training.engine import TorchEngine
from ctcdraft.training.logger import Logger
from ctcdraft.training.pace import Pace
from ctcdraft.training.peers import in_turn, share_of
from ctcdraft.training.probe import Probe
from ctcdraft.training.step_lines import StepLines
from ctcdraft.training.stopping import Stop, listening


@dataclass(frozen=True)
class Care:
    """What is done for a run that goes wrong.

    Its state is saved every so many steps, and every so many minutes if they are given; the last `keep` states stay.
    A step whose gradient is not finite is not taken; after `patience` of them in a row the run stops.
    """

    checkpoint_every: int
    checkpoint_minutes: float | None
    keep: int
    patience: int


class Trainer:
    """Steps from where the run stands to `steps`, each of `accumulate` batches that peers share; a probe now and then.

    The run's head is that of the best probe, whose tau `fit` returns; without probes it is the last one.
    """

    def __init__(
        self,
        run: RunDirectory,
        drafter: DraftHead,
        objective: Objective,
        batches: Batches | Prefetched,
        engine: TorchEngine,
        probe: Probe,
        steps: int,
        accumulate: int,
        probe_every: int,
        care: Care,
        adapter: Adapter | None = None,
    ) -> None:
        self.run = run
        self.drafter = drafter
        self.objective = objective
        self.batches = batches
        self.engine = engine
        self.probe = probe
        self.steps = steps
        self.accumulate = accumulate
        self.peers = engine.peers
        self.share = share_of(accumulate, self.peers)
        self.probe_every = probe_every
        self.care = care
        self.adapter = adapter  # of the base, where that learns too
        self.step = 0
        self.tokens = 0  # of the step: what this process read
        self.newest: Batch | None = None  # the first of the step
        self.best_tau = 0.0
        self.skipped = 0  # in all
        self.skipped_now = 0  # in a row

    def fit(self, loggers: Sequence[Logger], clock: Callable[[], float] = monotonic) -> float:
        """Train to the last step; returns the best tau a probe measured, which a sweep maximises."""
        in_turn(self.peers, self.batches.states.fill)
        saved_at = monotonic()
        last = stopped = False
        quiet = None if self.peers.leads else True  # None: where nobody watches
        lines = StepLines(self.step, self.steps, clock)
        bar = tqdm(total=self.steps, initial=self.step, unit="step", desc="training", disable=quiet)
        with contextlib.ExitStack() as closing, bar, listening() as stop:
            for logger in loggers:
                closing.callback(logger.close)
            while self.step < self.steps and not stopped:
                pace = Pace()
                figures = self.train_step()
                self.step += 1
                figures |= pace.figures(self.tokens)
                last = self.step == self.steps
                if self.peers.leads and (self.step % self.probe_every == 0 or last):
                    figures |= self.measure()
                    tqdm.write(f"step {self.step:>6}   loss {figures['loss']:.3f}   tau {figures['tau']:.3f}")
                for logger in loggers:
                    logger.log(self.step, figures)
                bar.set_postfix(loss=f"{figures['loss']:.3f}", tau=f"{self.best_tau:.2f}", refresh=False)
                bar.update()
                if self.peers.leads:
                    lines.after(figures)
                # Processes agree, or one would wait for the others for ever.
                stopped, due = self.peers.any(stop.asked is not None, self.due(saved_at))
                if last or stopped:
                    self.save()
                elif due:
                    self.write_or_go_on(self.save)
                    saved_at = monotonic()
        if stopped and not last:
            self.leave(stop)
        return self.best_tau

    def train_step(self) -> dict[str, Any]:
        """`accumulate` batches, one optimiser step; the figures of the step as plain numbers."""
        said: list[Loss] = []

        def loss(number: int) -> torch.Tensor:
            batch = self.batches.batch(number)
            self.tokens += batch.tokens_BL.numel()
            if not said:
                self.newest = batch
            said.append(self.objective(self.drafter(batch), batch))
            return said[-1].value

        learning_rate, self.tokens = self.engine.learning_rate, 0
        first = self.step * self.accumulate
        norm = self.engine.step([partial(loss, first + number) for number in self.share])
        self.count_skipped(norm, said)
        means = {name: torch.stack([one.metrics[name].float() for one in said]).mean() for name in said[0].metrics}
        self.peers.average(list(means.values()))
        figures: dict[str, Any] = {name: float(mean) for name, mean in means.items()}
        figures |= {"gradient_norm": norm, "learning_rate": learning_rate}
        return figures | ({"skipped": self.skipped} if self.skipped else {})

    def count_skipped(self, norm: float, said: Sequence[Loss]) -> None:
        """The engine has not taken a step along a gradient that is not finite; what keeps happening will not pass."""
        if math.isfinite(norm):
            self.skipped_now = 0
            return
        self.skipped += 1
        self.skipped_now += 1
        if self.skipped_now >= self.care.patience:
            raise InputError(
                f"the gradient of step {self.step + 1} is {norm} (loss {float(said[0].value.detach()):.4g}), and so "
                f"were those of {self.skipped_now - 1} steps before it, none of which was taken (trainer.patience="
                f"{self.care.patience}); begin again with a lower trainer.learning_rate, the weights of before are in "
                f"{self.run.path}"
            )

    def measure(self) -> dict[str, Any]:
        """What the probe saw, tau above all, and what the drafter says of the newest batch; the best head is kept."""
        self.drafter.eval()
        figures = self.probe.figures(self.drafter) | (self.drafter.figures(self.newest) if self.newest else {})
        self.drafter.train()
        tau = figures["tau"]
        if tau > self.best_tau and self.write_or_go_on(self.save_head):
            self.best_tau = tau
        return figures

    def due(self, saved_at: float) -> bool:
        minutes = self.care.checkpoint_minutes
        late = minutes is not None and monotonic() - saved_at >= 60 * minutes
        return late or self.step % self.care.checkpoint_every == 0

    def write_or_go_on(self, write: Callable[[], None]) -> bool:
        """Whether it was written. A full disk in the middle of a run is said, and tried again with the next checkpoint:
        to stop would lose what has been learned since the last one."""
        try:
            write()
            return True
        except InputError as error:
            tqdm.write(f"step {self.step}: {error} (training goes on, and tries again at the next checkpoint)")
            return False

    def leave(self, stop: Stop) -> None:
        asked = stop.asked or SIGTERM  # by a peer
        if self.peers.leads:
            print(f"{asked.name} after step {self.step:,}: all is saved; go on with resume={self.run.path}")
        raise SystemExit(128 + asked)

    def save(self) -> None:
        """Everything needed to go on as if nothing had happened; and the head, where no probe has chosen one yet.

        Of the corpus that is the step alone: what a batch holds follows from it, the run's config and its corpus. No
        random state is kept: a step draws nothing from torch's global stream (held by tests/training).
        """
        engine = self.engine.state_dict()
        if not self.peers.leads:
            return
        if self.best_tau == 0 or not self.run.head.is_file():
            self.save_head()
        state = {
            "step": self.step,  # batches are a function of it and the seed: it is their place, too
            "best_tau": self.best_tau,
            "skipped": [self.skipped, self.skipped_now],
            "head": {name: value.detach() for name, value in self.drafter.own_state().items()},
            "engine": engine,
            **({} if self.adapter is None else {"adapter": self.adapter.state()}),
        }
        self.run.save_state(self.step, state, self.care.keep)

    def save_head(self) -> None:
        """And the base's adapter as it is now: of another step it would be another base than this head's."""
        adapter = None if self.adapter is None else self.adapter.save(self.run.adapter)
        if adapter is not None:
            self.run.belong_to(adapter)
        self.run.save_head(self.drafter, adapter)

    def restore(self) -> None:
        """Stand where the last whole checkpoint stood; a run without one begins at step 0."""
        state = self.run.load_state()
        if state is None:
            return
        fill(self.drafter, state["head"], self.run.path)
        if self.adapter is not None:
            self.adapter.restore(state["adapter"])
        self.engine.load_state_dict(state["engine"])
        self.step = state["step"]
        self.best_tau = state["best_tau"]
        self.skipped, self.skipped_now = state["skipped"]
