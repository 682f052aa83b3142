"""Training a drafter: batch, loss, step, probe, checkpoint. It knows contracts; it has never heard of CTC or Hydra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from ctcdraft.corpus.batches import Batches
from ctcdraft.corpus.prefetch import Prefetched
from ctcdraft.drafters.drafter import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.objectives.objective import Loss, Objective
from ctcdraft.training.checkpoint import RunDirectory, fill
from ctcdraft.training.engine import TorchEngine
from ctcdraft.training.logger import Logger
from ctcdraft.training.probe import Probe


class Trainer:
    """Steps from where the run stands to `steps`; state is saved every `checkpoint_every` and at the end.

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
        checkpoint_every: int,
        probe_every: int,
    ) -> None:
        self.run = run
        self.drafter = drafter
        self.objective = objective
        self.batches = batches
        self.engine = engine
        self.probe = probe
        self.steps = steps
        self.checkpoint_every = checkpoint_every
        self.probe_every = probe_every
        self.step = 0
        self.best_tau = 0.0

    def fit(self, loggers: Sequence[Logger]) -> float:
        """Train to the last step; returns the best tau a probe measured, which a sweep maximises."""
        self.batches.states.fill()
        with tqdm(total=self.steps, initial=self.step, unit="step", desc="training", disable=None) as bar:
            while self.step < self.steps:
                figures = self.train_step()
                self.step += 1
                if self.step % self.probe_every == 0 or self.step == self.steps:
                    figures["tau"] = self.measure()
                    figures |= self.drafter.figures(self.batches.batch(self.step - 1))
                    tqdm.write(f"step {self.step:>6}   loss {figures['loss']:.3f}   tau {figures['tau']:.3f}")
                for logger in loggers:
                    logger.log(self.step, figures)
                bar.set_postfix(loss=f"{figures['loss']:.3f}", tau=f"{self.best_tau:.2f}", refresh=False)
                bar.update()
                if self.step % self.checkpoint_every == 0 or self.step == self.steps:
                    self.save()
        for logger in loggers:
            logger.close()
        return self.best_tau

    def train_step(self) -> dict[str, Any]:
        """One batch, one optimiser step; the figures of the step as plain numbers."""
        with self.engine.precision():
            batch = self.batches.batch(self.step)
        said: list[Loss] = []

        def value() -> torch.Tensor:
            said.append(self.objective(self.drafter(batch), batch))
            return said[0].value

        learning_rate = self.engine.learning_rate
        norm = self.engine.step(value)
        if not math.isfinite(norm):
            raise InputError(
                f"the gradient of step {self.step + 1} is {norm} (loss {float(said[0].value):.4g}), so the step was "
                f"not taken; lower trainer.learning_rate, or go on from the last checkpoint with resume={self.run.path}"
            )
        figures = {name: float(number) for name, number in said[0].metrics.items()}
        figures |= {"gradient_norm": norm, "learning_rate": learning_rate}
        return figures

    def measure(self) -> float:
        self.drafter.eval()
        tau = self.probe.tau(self.drafter)
        self.drafter.train()
        if tau > self.best_tau:
            self.best_tau = tau
            self.run.save_head(self.drafter)
        return tau

    def save(self) -> None:
        """Everything needed to go on as if nothing had happened; and the head, where no probe has chosen one yet.

        Of the corpus that is the step alone: what a batch holds follows from it, the run's config and its corpus.
        """
        if self.best_tau == 0 or not self.run.head.is_file():
            self.run.save_head(self.drafter)
        self.run.save_state(
            {
                "step": self.step,
                "best_tau": self.best_tau,
                "head": {name: value.detach() for name, value in self.drafter.own_state().items()},
                "engine": self.engine.state_dict(),
            }
        )

    def restore(self) -> None:
        """Stand where the last checkpoint stood; a run without one begins at step 0."""
        state = self.run.load_state()
        if state is None:
            return
        fill(self.drafter, state["head"], self.run.resume)
        self.engine.load_state_dict(state["engine"])
        self.step = state["step"]
        self.best_tau = state["best_tau"]
