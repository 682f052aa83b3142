"""DeepSpeed engine: optimiser state and gradients sharded over the processes (ZeRO).

Values under engine.deepspeed are passed to DeepSpeed unchanged; batches per step and clipping, which a run decides, are
added where they are absent. DeepSpeed parses them when the engine is built, before hours of response generation.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctcdraft.distributed import Distributed
from ctcdraft.errors import InputError, first_line
from ctcdraft.models.deepspeed import import_deepspeed, load_deepspeed
from ctcdraft.objectives.base import Loss
from ctcdraft.objectives.step_counts import shared_step
from ctcdraft.training.engine import OptimizerSettings, TorchEngine

SET_BY_TRAINER = {
    "train_batch_size": "trainer.batch_size= and trainer.gradient_accumulation_steps=",
    "train_micro_batch_size_per_gpu": "trainer.batch_size=",
    "gradient_accumulation_steps": "trainer.gradient_accumulation_steps=",
    "optimizer": "trainer.learning_rate=, betas and weight_decay",
    "scheduler": "trainer.warmup_steps= and trainer.min_lr_ratio=",
}
MOMENTS = ("exp_avg", "exp_avg_sq")
KEY_IN_SOURCE = re.compile(r"""["'](\w+)["']|^    (\w+): """, re.MULTILINE)


class DeepSpeedEngine(TorchEngine):
    """AdamW under ZeRO stages 1 and 2 (0 is plain data parallelism).

    The frozen base model is whole in every process; only the draft head's state is sharded.

    Args:
        deepspeed: its own configuration, which DeepSpeed gets unchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        settings: OptimizerSettings,
        distributed: Distributed,
        deepspeed: dict[str, Any],
    ) -> None:
        if settings.clip_value is not None:
            sentence = "trainer.clip_value must be null for engine=deepspeed, which clips by norm only"
            raise InputError(f"{sentence}, got {settings.clip_value}")
        super().__init__(module, parameters, settings, distributed)
        self.config = deepspeed
        self.deepspeed = import_deepspeed(parameters[0].device.type)
        refuse_wrong_config(self.deepspeed, deepspeed, self.default_config(1))
        self.engine: Any = None  # DeepSpeed's own, created in the first step, which knows the batches per step
        self.restored: dict[str, Any] = {"steps": 0.0, "moments": []}  # AdamW's state of a checkpoint, until then

    def build_optimizers(self, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        # One optimiser with two groups: DeepSpeed takes no second optimiser.
        by_decay = ((matrices, self.settings.weight_decay), (others, 0.0))
        groups = [{"params": params, "weight_decay": decay} for params, decay in by_decay if params]
        return [torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=self.settings.betas)]

    def add_param_group(self, parameters: list[nn.Parameter], learning_rate: float) -> None:
        raise InputError("adapt=lora needs engine=torch or muon: engine=deepspeed trains the draft head alone")

    def initialize(self, batches: int) -> None:
        """Hand the head over to DeepSpeed. batches: of this process, per step."""
        deepspeed = load_deepspeed(self.parameters[0].device.type)
        try:
            self.engine = deepspeed.initialize(
                model=self.module,
                optimizer=self.optimisers[0],
                config=self.default_config(batches) | self.config,
                dist_init_required=False,
            )[0]
        except (AssertionError, ValueError, RuntimeError) as error:
            raise InputError(f"DeepSpeed refuses engine.deepspeed: {deepspeed_error_reason(error)}") from error
        self.set_moments(**self.restored)

    def default_config(self, batches: int) -> dict[str, Any]:
        """Return the values of the run, used where engine.deepspeed has none."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": batches,
            "gradient_clipping": self.settings.max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # else offload_optimizer is refused with torch's AdamW
        }

    def step(self, losses: Sequence[Callable[[], Loss]]) -> float:
        """Take one optimiser step, as TorchEngine does."""
        if self.engine is None:
            self.initialize(len(losses))
        with shared_step(self.distributed):
            norm = self.backward_and_step(losses)
        if isfinite(norm):
            self.schedules[0].step()
        return norm

    def backward_and_step(self, losses: Sequence[Callable[[], Loss]]) -> float:
        counts: list[float] = []
        for loss in losses:
            if counts:
                self.engine.step()  # counts the batch before; the weights are updated after the last one
            with self.precision():
                one = loss()
            counts.append(1.0 if one.count is None or len(losses) == 1 else float(one.count))
            self.engine.backward(one.value * counts[-1])
        mean_count = sum(counts) / len(counts) or 1.0
        # With shards (ZeRO 1, 2) DeepSpeed itself measures the norm, skips a gradient that is not finite and clears the
        # accumulated gradients. Without shards (ZeRO 0) it does none of this, so it is done here.
        if self.engine.zero_optimization_stage() > 0:
            self.engine.optimizer.loss_scale *= mean_count  # what it divides the gradient by when it takes the step
            self.engine.step()
            self.engine.optimizer.loss_scale /= mean_count
            norm = self.engine.get_global_grad_norm()
            return nan if norm is None else float(norm)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_div_(gradients, mean_count)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if isfinite(norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
            self.engine.micro_steps += 1  # as engine.step() would have counted
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return schedule and AdamW's state, moments gathered from all processes, so that their number may change."""
        state: dict[str, Any] = {"schedule": self.schedules[0].state_dict()}
        if self.engine is None:
            return state | self.restored
        steps = [float(one["step"]) for one in self.optimisers[0].state.values()]
        moments = [{name: self.moment(p, name) for name in MOMENTS} for p in self.parameters]
        return state | {"steps": max(steps), "moments": moments}

    def moment(self, parameter: nn.Parameter, name: str) -> Tensor | None:
        """Return a whole moment of AdamW in process 0; a collective call where it is in shards."""
        if self.engine.zero_optimization_stage() == 0:
            return self.optimisers[0].state[parameter][name]
        whole = self.deepspeed.utils.safe_get_full_optimizer_state(parameter, name)
        return whole.cpu() if self.distributed.is_main else None

    def set_moments(self, steps: float, moments: Sequence[Mapping[str, Tensor]]) -> None:
        """Give AdamW the state of a checkpoint, each process its shard. moments: by parameter; none for a new run."""
        state = self.optimisers[0].state
        for owned in [value for group in self.optimisers[0].param_groups for value in group["params"]]:
            state[owned] = {"step": torch.tensor(steps), **{name: torch.zeros_like(owned) for name in MOMENTS}}
        sharded = self.engine.zero_optimization_stage() > 0
        if sharded:
            # DeepSpeed does this itself after the first step of the first parameter group (0.19), too early for the
            # others' moments and too late for a checkpoint's, and has no public call for it.
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        for parameter, saved in zip(self.parameters, moments, strict=bool(moments)):
            for name, value in saved.items():
                if sharded:
                    self.deepspeed.utils.safe_set_full_optimizer_state(parameter, value, name)
                else:
                    state[parameter][name].copy_(value)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "schedule" not in state:
            raise InputError("this run was not trained with engine=deepspeed; resume= takes the run's own engine")
        self.restore_schedule(self.schedules[0], state["schedule"])
        self.restored |= {name: state[name] for name in self.restored if name in state}
        if "moments" not in state:
            print("this checkpoint is of an older version, without DeepSpeed's moments; they start from zero")


def refuse_wrong_config(deepspeed: Any, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise InputError for a key that the trainer sets, for what DeepSpeed refuses, and for keys that it would ignore.

    Args:
        deepspeed: the package.
        config: values of engine.deepspeed.
        defaults: values of the run for keys that `config` lacks.
    """
    for key in [key for key in SET_BY_TRAINER if key in config]:
        raise InputError(f"engine.deepspeed.{key} is set by the trainer; leave it out, and give {SET_BY_TRAINER[key]}")
    try:
        # A copy, because DeepSpeed writes defaults into the sections that it reads.
        parsed = deepspeed.DeepSpeedConfig(copy.deepcopy({**defaults, **config}))
    except (AssertionError, ValueError, TypeError, AttributeError, deepspeed.DeepSpeedConfigError) as error:
        raise InputError(f"DeepSpeed refuses engine.deepspeed: {deepspeed_error_reason(error)}") from error
    for key, enabled in (("bf16", parsed.bfloat16_config.enabled), ("fp16", parsed.float16_config.enabled)):
        # It would cast the lm_head and the embedding, which are the base's, and checkpoints would have rounded weights.
        if enabled:
            raise InputError(
                f"engine.deepspeed.{key}.enabled must be false; trainer.autocast=true computes in bfloat16"
            )
    if parsed.zero_optimization_stage == 3:
        raise InputError(
            "engine.deepspeed.zero_optimization.stage must be 0, 1 or 2, got 3, which would shard the lm_head of the "
            "base; base.zero3=true shards the base itself"
        )
    refuse_unknown_keys(deepspeed, config)


def refuse_unknown_keys(deepspeed: Any, config: Mapping[str, Any]) -> None:
    """Raise InputError for a key, at the top or in a section, that occurs nowhere in DeepSpeed's source.

    DeepSpeed refuses a wrong key only in sections that are pydantic models, and ignores it elsewhere.
    """
    # Every key that it reads is a quoted name or a field of a model in its source; it has no list of them. The search
    # takes 0.4 seconds. Names deeper than a section may be the user's own (metrics of a curriculum), so they pass.
    sources = (file.read_text(errors="ignore") for file in Path(deepspeed.__file__).parent.rglob("*.py"))
    names = {quoted or field for text in sources for quoted, field in KEY_IN_SOURCE.findall(text)}
    sections = {f"{key}.": value for key, value in config.items() if isinstance(value, Mapping)}
    for place, section in {"": config, **sections}.items():
        for key in [key for key in section if key not in names]:
            close = difflib.get_close_matches(str(key), names, 1)
            hint = f"did you mean {close[0]}?" if close else "leave it out"
            raise InputError(f"engine.deepspeed.{place}{key} is no key that DeepSpeed reads; {hint}")


def deepspeed_error_reason(error: Exception) -> str:
    """Return one line of an error; of pydantic's (headline, key, reason), the key and the reason."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if "validation error" in lines[0] and len(lines) > 2:
        return f"{lines[1]}: {lines[2].partition(' [')[0]}"
    return first_line(error)
