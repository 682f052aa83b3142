"""Steps taken by DeepSpeed: optimiser and gradients in shards over the processes. It knows parameters and a loss.

Its settings are those of engine.deepspeed, word for word; what a run decides itself (batches a step, clipping) is
filled in where they say nothing.

What may stand under engine.deepspeed, told by DeepSpeed's own reader before an hour of answers. It runs nothing.

DeepSpeed reads a misspelt key at the top as no key at all, so what it asks for while it reads is listened to, and what
it never asked for is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.distributed import Distributed
from ctcdraft.errors import InputError, first_line
from ctcdraft.models.deepspeed_loading import import_deepspeed, load_deepspeed, refuse_missing_deepspeed
from ctcdraft.training.engine import TorchEngine, split_by_weight_decay, warmup_cosine


class DeepSpeedEngine(TorchEngine):
    """ZeRO 1 and 2 (0 is plain data parallelism) over any torch optimiser, AdamW here.

    deepspeed: its own configuration. The frozen base is whole in every process: only the head's state is sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        steps: int,
        learning_rate: float,
        warmup: int,
        final_share: float,
        betas: tuple[float, float],
        weight_decay: float,
        clip_norm: float,
        clip_value: float | None,
        autocast: bool,
        peers: Distributed,
        deepspeed: dict[str, Any],
    ) -> None:
        refuse_missing_deepspeed()
        if clip_value is not None:
            raise InputError(f"trainer.clip_value={clip_value}: DeepSpeed clips by norm only; set it to null")
        self.module = module
        self.parameters = parameters
        self.autocast = autocast
        self.peers = peers
        self.settings = deepspeed
        self.clip_norm = clip_norm
        refuse_wrong_config(import_deepspeed(parameters[0].device.type), self.settings, self.default_config(1))
        matrices, others = split_by_weight_decay(parameters)
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.adam, lambda step: warmup_cosine(step, steps, warmup, final_share)
        )
        self.engine: Any = None

    def add_param_group(self, parameters: list[nn.Parameter], learning_rate: float) -> None:
        raise InputError("adapt=lora is for engine=torch and muon: engine=deepspeed holds the state of the head alone")

    def initialize(self, batches: int) -> None:
        """Hand the head over to DeepSpeed, which moves its parameters; `batches` a step, of this process."""
        deepspeed = load_deepspeed(self.parameters[0].device.type)
        settings = self.default_config(batches) | self.settings
        try:
            self.engine = deepspeed.initialize(
                model=self.module, optimizer=self.adam, config=settings, dist_init_required=False
            )[0]
        except (AssertionError, ValueError, RuntimeError) as error:
            raise InputError(f"DeepSpeed refuses engine.deepspeed: {deepspeed_error_reason(error)}") from error

    def default_config(self, batches: int) -> dict[str, Any]:
        """What the run says where engine.deepspeed says nothing."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": batches,
            "gradient_clipping": self.clip_norm,
            "zero_allow_untested_optimizer": True,
        }

    def step(self, losses: Sequence[Callable[[], Tensor]]) -> float:
        """As TorchEngine's. In shards DeepSpeed measures the gradient, leaves out one that is not finite and clears
        what it has gathered of the step; without shards (ZeRO 0) it does none of this."""
        if self.engine is None:
            self.initialize(len(losses))
        whole = self.engine.zero_optimization_stage() == 0
        norm = nan
        for number, loss in enumerate(losses, start=1):
            with self.precision():
                value = loss()
            self.engine.backward(value)
            if whole and number == len(losses):
                norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
                if not isfinite(norm):
                    self.engine.zero_grad()
                    self.engine.micro_steps += 1
                    return norm
            self.engine.step()  # which steps at the last of them
        if not whole and (measured := self.engine.get_global_grad_norm()) is not None:
            norm = float(measured)
        if isfinite(norm):
            self.schedule.step()
        return norm

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def state_dict(self) -> dict[str, Any]:
        """The schedule alone: moments lie in shards that belong to DeepSpeed and to one number of processes."""
        return {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "schedule" not in state:
            raise InputError("this run was trained with another engine than engine=deepspeed; resume takes its own")
        self.schedule.load_state_dict(state["schedule"])
        for group, rate in zip(self.adam.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = rate
        print("weights and schedule go on where they were; DeepSpeed's moments begin anew")


SET_BY_TRAINER = {
    "train_batch_size": "trainer.rows= and trainer.accumulate=",
    "train_micro_batch_size_per_gpu": "trainer.rows=",
    "gradient_accumulation_steps": "trainer.accumulate=",
    "optimizer": "trainer.learning_rate=, betas and weight_decay",
    "scheduler": "trainer.warmup= and final_share",
}


class AccessTrackingDict(dict[str, Any]):
    """A dictionary that remembers what it was asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.accessed: set[str] = set()

    def __contains__(self, key: Any) -> bool:
        self.accessed.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.accessed.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.accessed.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Itself: DeepSpeed asks `in settings.keys()` here and there, and a view of a dictionary tells nobody."""
        return self


def refuse_wrong_config(deepspeed: Any, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise InputError for what DeepSpeed would refuse, or not notice, at the first step. deepspeed: the package.
    settings: engine.deepspeed; defaults: what a run says itself where they say nothing."""
    for key in [key for key in SET_BY_TRAINER if key in settings]:
        raise InputError(
            f"engine.deepspeed.{key} is what a run decides itself; leave it out, and give {SET_BY_TRAINER[key]}"
        )
    read = AccessTrackingDict({**defaults, **settings})
    try:
        deepspeed.DeepSpeedConfig(read)
    except (AssertionError, ValueError, TypeError, AttributeError, deepspeed.DeepSpeedConfigError) as error:
        raise InputError(f"DeepSpeed refuses engine.deepspeed: {deepspeed_error_reason(error)}") from error
    for key in [key for key in settings if key not in read.accessed]:
        near = difflib.get_close_matches(key, read.accessed, 1)
        meant = f"did you mean {near[0]}?" if near else "leave it out"
        raise InputError(f"engine.deepspeed.{key} is nothing that DeepSpeed looks at; {meant}")


def deepspeed_error_reason(error: Exception) -> str:
    """One line of what DeepSpeed, or pydantic for it (a headline, the key, and what is wrong with it), has to say."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if "validation error" in lines[0] and len(lines) > 2:
        return f"{lines[1]}: {lines[2].partition(' [')[0]}"
    return first_line(error)
