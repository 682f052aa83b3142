"""Training a drafter: batch, loss, step, probe, checkpoint. It knows contracts; it has never heard of CTC or Hydra."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from signal import SIGTERM
from time import monotonic
from typing import Any, Self

import torch
from tqdm import tqdm

from ctcdraft.batch import Batch
from ctcdraft.corpus.batches import Batches
from ctcdraft.corpus.prefetch import PrefetchingBatches
from ctcdraft.distributed import local_batches, main_process_first
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.objectives.base import Loss, Objective
from ctcdraft.training.engine import TorchEngine
from ctcdraft.training.loggers import Logger
from ctcdraft.training.lora import LoRAAdapter
from ctcdraft.training.progress import ProgressLines, StepTimer
from ctcdraft.training.run_directory import RunDirectory, load_trainable_state
from ctcdraft.training.shutdown import ShutdownRequest, catch_signals
from ctcdraft.training.validation import DecodingValidation


@dataclass(frozen=True)
class CheckpointPolicy:
    """When the state of a run is saved, and when a run that diverges stops.

    Args:
        checkpoint_every: steps between two saved states.
        checkpoint_minutes: save also after so many minutes; None: by steps alone.
        keep: number of the newest states that stay on disk.
        patience: consecutive steps with a gradient that is not finite after which the run stops. None of them is taken.
    """

    checkpoint_every: int
    checkpoint_minutes: float | None
    keep: int
    patience: int

    @classmethod
    def from_config(cls, trainer: Any) -> Self:
        """Return the policy of a `trainer` node."""
        return cls(**{field.name: trainer[field.name] for field in fields(cls)})


class Trainer:
    """Steps from where the run stands to `steps`, each of `accumulate` batches that peers share; a probe now and then.

    The run's head is that of the best probe, whose tau `fit` returns; without probes it is the last one.
    """

    def __init__(
        self,
        run: RunDirectory,
        drafter: DraftHead,
        objective: Objective,
        batches: Batches | PrefetchingBatches,
        engine: TorchEngine,
        probe: DecodingValidation,
        steps: int,
        accumulate: int,
        probe_every: int,
        checkpoint_policy: CheckpointPolicy,
        adapter: LoRAAdapter | None = None,
    ) -> None:
        self.run = run
        self.drafter = drafter
        self.objective = objective
        self.batches = batches
        self.engine = engine
        self.probe = probe
        self.steps = steps
        self.accumulate = accumulate
        self.distributed = engine.distributed
        self.local_batches = local_batches(accumulate, self.distributed)
        self.probe_every = probe_every
        self.checkpoint_policy = checkpoint_policy
        self.adapter = adapter  # of the base, where that learns too
        self.step = 0
        self.tokens = 0  # of the step: what this process read
        self.first_batch: Batch | None = None  # the first of the step
        self.best_tau = 0.0
        self.skipped = 0  # in all
        self.skipped_in_a_row = 0  # in a row

    def fit(self, loggers: Sequence[Logger], clock: Callable[[], float] = monotonic) -> float:
        """Train to the last step; returns the best tau a probe measured, which a sweep maximises."""
        main_process_first(self.distributed, self.batches.hidden_states.precompute)
        saved_at = monotonic()
        last = stopped = False
        quiet = None if self.distributed.is_main else True  # None: where nobody watches
        lines = ProgressLines(self.step, self.steps, clock)
        bar = tqdm(total=self.steps, initial=self.step, unit="step", desc="training", disable=quiet)
        with contextlib.ExitStack() as closing, bar, catch_signals() as request:
            for logger in loggers:
                closing.callback(logger.close)
            while self.step < self.steps and not stopped:
                pace = StepTimer()
                metrics = self.train_step()
                self.step += 1
                metrics |= pace.metrics(self.tokens)
                last = self.step == self.steps
                if self.distributed.is_main and (self.step % self.probe_every == 0 or last):
                    metrics |= self.validate()
                    tqdm.write(f"step {self.step:>6}   loss {metrics['loss']:.3f}   tau {metrics['tau']:.3f}")
                for logger in loggers:
                    logger.log(self.step, metrics)
                bar.set_postfix(loss=f"{metrics['loss']:.3f}", tau=f"{self.best_tau:.2f}", refresh=False)
                bar.update()
                if self.distributed.is_main:
                    lines.run_ended(metrics)
                # Processes agree, or one would wait for the others for ever.
                stopped, due = self.distributed.any_process(
                    request.received_signal is not None, self.is_checkpoint_due(saved_at)
                )
                if last or stopped:
                    self.save()
                elif due:
                    self.try_write(self.save)
                    saved_at = monotonic()
        if stopped and not last:
            self.exit_interrupted(request)
        return self.best_tau

    def train_step(self) -> dict[str, Any]:
        """`accumulate` batches, one optimiser step; the figures of the step as plain numbers."""
        losses: list[Loss] = []

        def loss(number: int) -> torch.Tensor:
            batch = self.batches.batch(number)
            self.tokens += batch.tokens_BL.numel()
            if not losses:
                self.first_batch = batch
            losses.append(self.objective(self.drafter(batch), batch))
            return losses[-1].value

        learning_rate, self.tokens = self.engine.learning_rate, 0
        first = self.step * self.accumulate
        norm = self.engine.step([partial(loss, first + number) for number in self.local_batches])
        self.count_skipped(norm, losses)
        means = {name: torch.stack([one.metrics[name].float() for one in losses]).mean() for name in losses[0].metrics}
        self.distributed.all_reduce_mean(list(means.values()))
        metrics: dict[str, Any] = {name: float(mean) for name, mean in means.items()}
        metrics |= {"gradient_norm": norm, "learning_rate": learning_rate}
        return metrics | ({"skipped": self.skipped} if self.skipped else {})

    def count_skipped(self, norm: float, losses: Sequence[Loss]) -> None:
        """The engine has not taken a step along a gradient that is not finite; what keeps happening will not pass."""
        if math.isfinite(norm):
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.checkpoint_policy.patience:
            raise InputError(
                f"the gradient of step {self.step + 1} is {norm} (loss {float(losses[0].value.detach()):.4g}), and so "
                f"were those of {self.skipped_in_a_row - 1} steps before it, none of which was taken (trainer.patience="
                f"{self.checkpoint_policy.patience}); begin again with a lower trainer.learning_rate, the weights of "
                "before are in "
                f"{self.run.path}"
            )

    def validate(self) -> dict[str, Any]:
        """What the probe saw, tau above all, and what the drafter says of the newest batch; the best head is kept."""
        self.drafter.eval()
        metrics = self.probe.metrics(self.drafter) | (
            self.drafter.metrics(self.first_batch) if self.first_batch else {}
        )
        self.drafter.train()
        tau = metrics["tau"]
        if tau > self.best_tau and self.try_write(self.save_head):
            self.best_tau = tau
        return metrics

    def is_checkpoint_due(self, saved_at: float) -> bool:
        minutes = self.checkpoint_policy.checkpoint_minutes
        late = minutes is not None and monotonic() - saved_at >= 60 * minutes
        return late or self.step % self.checkpoint_policy.checkpoint_every == 0

    def try_write(self, write: Callable[[], None]) -> bool:
        """Whether it was written. A full disk in the middle of a run is said, and tried again with the next checkpoint:
        to stop would lose what has been learned since the last one."""
        try:
            write()
            return True
        except InputError as error:
            tqdm.write(f"step {self.step}: {error} (training goes on, and tries again at the next checkpoint)")
            return False

    def exit_interrupted(self, request: ShutdownRequest) -> None:
        requested_signal = request.received_signal or SIGTERM  # by a peer
        if self.distributed.is_main:
            print(f"{requested_signal.name} after step {self.step:,}: all is saved; go on with resume={self.run.path}")
        raise SystemExit(128 + requested_signal)

    def save(self) -> None:
        """Everything needed to go on as if nothing had happened; and the head, where no probe has chosen one yet.

        Of the corpus that is the step alone: what a batch holds follows from it, the run's config and its corpus. No
        random state is kept: a step draws nothing from torch's global stream (held by tests/training).
        """
        engine = self.engine.state_dict()
        if not self.distributed.is_main:
            return
        if self.best_tau == 0 or not self.run.head.is_file():
            self.save_head()
        state = {
            "step": self.step,  # batches are a function of it and the seed: it is their place, too
            "best_tau": self.best_tau,
            "skipped": [self.skipped, self.skipped_in_a_row],
            "head": {name: value.detach() for name, value in self.drafter.trainable_state_dict().items()},
            "engine": engine,
            **({} if self.adapter is None else {"adapter": self.adapter.state()}),
        }
        self.run.save_state(self.step, state, self.checkpoint_policy.keep)

    def save_head(self) -> None:
        """And the base's adapter as it is now: of another step it would be another base than this head's."""
        adapter = None if self.adapter is None else self.adapter.save(self.run.adapter)
        if adapter is not None:
            self.run.set_adapter(adapter)
        self.run.save_head(self.drafter, adapter)

    def restore(self) -> None:
        """Stand where the last whole checkpoint stood; a run without one begins at step 0."""
        state = self.run.load_state()
        if state is None:
            return
        load_trainable_state(self.drafter, state["head"], self.run.path)
        if self.adapter is not None:
            self.adapter.restore(state["adapter"])
        self.engine.load_state_dict(state["engine"])
        self.step = state["step"]
        self.best_tau = state["best_tau"]
        self.skipped, self.skipped_in_a_row = state["skipped"]
