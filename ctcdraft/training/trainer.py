"""Training loop of a draft head: batch, loss, optimiser step, validation by decoding, checkpoint.

A batch is a function of its number, so a resumed run takes the same steps as one that never stopped.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from time import monotonic
from typing import Any, Self

from torch import Tensor
from tqdm import tqdm

from ctcdraft.batch import Batch
from ctcdraft.corpus.batches import Batches, PrefetchingBatches
from ctcdraft.distributed import LostProcessError, lost_process
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.objectives.base import Loss, Objective, step_metrics
from ctcdraft.objectives.step_counts import counts_known, mean_counts, setting, shared_step
from ctcdraft.progress import Progress, write_line
from ctcdraft.training.engine import TorchEngine
from ctcdraft.training.loggers import Logger, StepTimer
from ctcdraft.training.lora import LoRAAdapter
from ctcdraft.training.run_directory import RunDirectory, load_trainable_state
from ctcdraft.training.signals import catch_signals
from ctcdraft.training.validation import DecodingValidation


@dataclass(frozen=True)
class TrainerSettings:
    """Length of a run, and when it validates, saves and stops: keys of `trainer`, documented in configs/train.yaml."""

    steps: int
    gradient_accumulation_steps: int
    probe_every: int
    checkpoint_every: int
    checkpoint_minutes: float | None
    save_total_limit: int
    max_nonfinite_steps: int

    @classmethod
    def from_config(cls, trainer: Any) -> Self:
        return cls(**{field.name: trainer[field.name] for field in fields(cls)})


@dataclass(eq=False)
class Trainer:
    """Takes the steps of a run, from its newest checkpoint to the last.

    The saved head is that of the best validation, or the last one where there are no validation prompts.
    """

    run: RunDirectory
    drafter: DraftHead
    objective: Objective
    batches: Batches | PrefetchingBatches
    engine: TorchEngine
    validation: DecodingValidation
    settings: TrainerSettings
    adapter: LoRAAdapter | None = None

    def __post_init__(self) -> None:
        self.distributed = self.engine.distributed
        self.step = self.skipped = self.skipped_in_a_row = 0
        self.tokens = 0  # read by this process in the newest step, padding included
        self.first_batch: Batch | None = None  # of the newest step; a validation measures the head on it
        self.best_tau = 0.0

    def fit(self, loggers: Sequence[Logger], clock: Callable[[], float] = monotonic) -> float:
        """Train to the last step; return the best mean acceptance length (tau) of all validations."""
        try:
            # All of it: ZeRO's collective operations are not those of `Distributed`.
            with lost_process(), catch_signals() as received:
                return self.take_steps(loggers, clock, received)
        except LostProcessError as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the other processes; the sentence comes first
            newest = f"the newest checkpoint is of step {self.run.last_step:,}, continue with resume={self.run.path}"
            raise InputError(f"{error}; {newest}") from error

    def take_steps(self, loggers: Sequence[Logger], clock: Callable[[], float], received: list[Any]) -> float:
        self.batches.hidden_states.precompute(self.distributed)
        saved_at, steps, last, stopped = monotonic(), self.settings.steps, False, False
        disable = None if self.distributed.is_main else True  # None: tqdm shows no bar unless stderr is a terminal
        metrics: dict[str, Any] = {}

        def write(line: str) -> None:
            write_line(f"{line}; loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s")

        # No estimate in the first minute: the plan has just printed one.
        lines = Progress(steps - self.step, "steps", first=steps + 1, before=self.step, clock=clock, write=write)
        bar = tqdm(total=steps, initial=self.step, unit="step", desc="training", disable=disable)
        with contextlib.ExitStack() as closing, bar:
            for logger in loggers:
                closing.callback(logger.close)
            while self.step < steps and not stopped:
                timer = StepTimer()
                metrics = self.train_step()
                self.step += 1
                metrics |= timer.metrics(self.tokens)
                last = self.step == steps
                if self.step % self.settings.probe_every == 0 or last:
                    try:
                        metrics |= self.validate()
                    except Exception:
                        # Not the last step, which a resumed run has to validate; and one process alone cannot save.
                        if not last and self.distributed.world_size == 1:
                            with contextlib.suppress(InputError):  # a full disk: the validation's error is raised
                                self.save()
                        raise
                    if self.distributed.is_main:
                        tqdm.write(f"step {self.step:>6}   loss {metrics['loss']:.3f}   tau {metrics['tau']:.3f}")
                for logger in loggers:
                    logger.log(self.step, metrics)
                bar.set_postfix(loss=f"{metrics['loss']:.3f}", tau=f"{self.best_tau:.2f}", refresh=False)
                bar.update()
                if self.distributed.is_main:
                    lines.advance()
                # The decision is shared: if one process stopped alone, the others would wait in the next collective.
                stopped, due = self.distributed.any_process(bool(received), self.is_checkpoint_due(saved_at))
                if last or stopped:
                    self.save()
                elif due:
                    self.try_write(self.save)
                    saved_at = monotonic()
        if stopped and not last:
            number = received[0] if received else signal.SIGTERM  # another process received it
            if self.distributed.is_main:
                state = f"{number.name} after step {self.step:,}: the state is saved"
                print(f"{state}; continue with resume={self.run.path}")
            raise SystemExit(128 + number)  # the status of a process that a signal ended
        return self.best_tau

    def train_step(self) -> dict[str, Any]:
        """Take one optimiser step along the mean loss of its batches; return its metrics."""
        losses: list[Loss] = []
        learning_rate, self.tokens, of_step = self.engine.learning_rate, 0, self.settings.gradient_accumulation_steps
        numbers = range(self.step * of_step, (self.step + 1) * of_step)
        several = of_step > 1 and getattr(self.objective, "several_counts", False)
        kept, counts = self.count_first(numbers) if several else ({}, None)

        def loss(number: int) -> Loss:
            batch = kept.pop(number) if number in kept else self.batches.batch(number)
            self.tokens += batch.tokens_BL.numel()
            if not losses:
                self.first_batch = batch
            with setting(counts_known, None if counts is None else iter(counts)):
                losses.append(self.objective(self.drafter(batch), batch))
            return losses[-1]

        norm = self.engine.step([partial(loss, number) for number in numbers])
        self.count_skipped(norm, losses)
        metrics = step_metrics(losses, self.distributed) | {"gradient_norm": norm, "learning_rate": learning_rate}
        return metrics | ({"skipped": self.skipped} if self.skipped else {})

    def count_first(self, numbers: Sequence[int]) -> tuple[dict[int, Batch], list[Tensor]]:
        """Return the batches of a step, by number, and the counts by which its losses are divided.

        A loss of one count is weighed by that instead, without this further forward pass of the head.
        """
        batches = {number: self.batches.batch(number) for number in numbers}
        with shared_step(self.distributed), self.engine.precision():
            forward = [lambda batch=batch: self.objective(self.drafter(batch), batch) for batch in batches.values()]
            return batches, mean_counts(forward)

    def count_skipped(self, norm: float, losses: Sequence[Loss]) -> None:
        skipped = not math.isfinite(norm)
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= self.settings.max_nonfinite_steps:
            kept = f"the weights before these steps are in {self.run.path}"
            try:
                self.save()  # skipped steps have not changed the weights
            except InputError as failed:
                kept = f"the weights before these steps are lost: {failed}"
            raise InputError(
                f"the gradient norm of step {self.step + 1} is {norm} (loss {float(losses[0].value.detach()):.4g}), "
                f"after {self.skipped_in_a_row - 1} other skipped steps in a row (trainer.max_nonfinite_steps="
                f"{self.settings.max_nonfinite_steps}); start again with a lower trainer.learning_rate, {kept}"
            )

    def validate(self) -> dict[str, Any]:
        """Return metrics of decoding and of the newest batch; save the head where its tau is the best so far."""
        self.drafter.eval()
        metrics: dict[str, Any] = dict(self.validation.metrics(self.drafter))
        if self.first_batch is not None:
            of_processes = self.distributed.all_gather_object(self.drafter.metrics(self.first_batch))
            metrics |= {name: sum(one[name] for one in of_processes) / len(of_processes) for name in of_processes[0]}
        self.drafter.train()
        if metrics["tau"] > self.best_tau and (not self.distributed.is_main or self.try_write(self.save_head)):
            self.best_tau = metrics["tau"]
        return metrics

    def is_checkpoint_due(self, saved_at: float) -> bool:
        minutes = self.settings.checkpoint_minutes
        late = minutes is not None and monotonic() - saved_at >= 60 * minutes
        return late or self.step % self.settings.checkpoint_every == 0

    def try_write(self, write: Callable[[], None]) -> bool:
        """Return whether a file was written."""
        try:
            write()
        except InputError as error:  # a full disk: raised, it would lose all steps since the checkpoint
            tqdm.write(f"step {self.step}: {error} (training continues, and the next checkpoint tries again)")
            return False
        return True

    def save(self) -> None:
        """Write the state to resume from, and the head where no validation has saved one yet."""
        engine = self.engine.state_dict()
        if not self.distributed.is_main:
            return
        if self.best_tau == 0 or not self.run.head.is_file():
            self.save_head()
        # Neither a position in the corpus nor a random state is saved: batches follow from the step and the seed, and a
        # step draws nothing from torch's global generator (tested in tests/training/test_random_stream.py).
        state = {
            "step": self.step,
            "best_tau": self.best_tau,
            "skipped": [self.skipped, self.skipped_in_a_row],
            "head": {name: value.detach() for name, value in self.drafter.trainable_state_dict().items()},
            "engine": engine,
            "adapter": None if self.adapter is None else self.adapter.state(),
        }
        self.run.save_state(self.step, state, self.settings.save_total_limit)

    def save_head(self) -> None:
        """Write the head, and the base model's adapter of the same step, which the head depends on."""
        adapter = None if self.adapter is None else self.adapter.save(self.run.adapter)
        if adapter is not None:
            self.run.set_adapter(adapter)
        self.run.save_head(self.drafter, adapter)

    def restore(self) -> None:
        """Load the newest intact checkpoint; a run without one begins at step 0."""
        if (state := self.distributed.from_main(self.run.load_state)) is None:
            return
        load_trainable_state(self.drafter, state["head"], self.run.path)
        if self.adapter is not None:
            self.adapter.restore(state["adapter"])
        self.engine.load_state_dict(state["engine"])
        self.step, self.best_tau = state["step"], state["best_tau"]
        self.skipped, self.skipped_in_a_row = state["skipped"]
