"""Checks of a training config that need no base model, made before anything is loaded."""

from __future__ import annotations

from hydra.utils import get_class, get_object
from omegaconf import DictConfig

from ctcdraft.config.schema import check_config
from ctcdraft.config.training_corpus import resolve_corpus_paths
from ctcdraft.corpus import prepared
from ctcdraft.corpus.hidden_states import OnlineHiddenStates
from ctcdraft.distributed import from_environment, local_batches
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.training.deepspeed import DeepSpeedEngine
from ctcdraft.training.loggers import refuse_absent


def refuse_wrong_training(config: DictConfig) -> None:
    """Raise InputError for what the config alone shows to be wrong."""
    check_config(config)
    local_batches(config.trainer.gradient_accumulation_steps, from_environment())
    if not issubclass(get_class(config.drafter._target_), DraftHead):
        raise InputError(
            f"drafter={config.drafter.name} has no weights to train; give it as one of contestants= of evaluate.py"
        )
    if "objective" not in config:
        raise InputError(
            f"drafter={config.drafter.name} has no default objective (configs/objective/of_*.yaml); give objective="
        )
    refuse_unadaptable(config)
    refuse_unsupported_zero3(config)
    refuse_absent(get_class(part._target_) for part in config.logger.values() if part is not None)


def refuse_unadaptable(config: DictConfig) -> None:
    """Raise InputError where adapt=lora would change a base model that another part needs unchanged."""
    if config.adapt is None:
        return
    for key in ("zero3", "quantization", "device_map"):
        if config.base.get(key):
            raise InputError(f"adapt=lora needs the whole base model on one device; leave out base.{key}=")
    if get_object(config.hidden_states._target_) is not OnlineHiddenStates:
        raise InputError(
            "adapt=lora changes the hidden states at every step, so they cannot be stored; give hidden_states=online"
        )
    if issubclass(get_class(config.engine._target_), DeepSpeedEngine):
        raise InputError("adapt=lora needs engine=torch or muon: engine=deepspeed trains the draft head alone")


def refuse_unsupported_zero3(config: DictConfig) -> None:
    """Raise InputError where one process alone would run a base model that all processes must run together."""
    if not config.base.get("zero3"):
        return
    together = "base.zero3=true runs the base model in all processes together"
    if config.trainer.probe_prompts != 0:
        raise InputError(f"{together}, and validation runs in one; give trainer.probe_prompts=0")
    if get_object(config.hidden_states._target_) is not OnlineHiddenStates:
        raise InputError(f"{together}, and hidden states are stored by one; give hidden_states=online")
    folder = resolve_corpus_paths(config)[1]
    if not prepared.is_complete(folder):
        raise InputError(
            f"{together}, so it generates no responses, and there is no corpus in {folder}; prepare it with "
            "data/prepare.py, base.device_map= or answers=openai"
        )
