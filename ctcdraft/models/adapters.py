"""Loading of peft adapters (LoRA) from a folder or a hub id.

peft reads adapter_model.safetensors, and only where that is absent adapter_model.bin, a pickle, with weights_only=True.
A damaged adapter, or a pickle that would execute code, becomes an InputError.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from ctcdraft.errors import InputError, first_line, unsafe_pickle_error
from ctcdraft.models.fingerprint import tensors_hash

if TYPE_CHECKING:
    from ctcdraft.models.base_model import BaseLM


def attach_adapter(lm: Any, adapter: str) -> Any:
    """Return the peft model of `lm` with its adapter, not yet merged into the weights."""
    import peft

    try:
        refuse_import(peft.PeftConfig.from_pretrained(adapter), adapter)
        return peft.PeftModel.from_pretrained(lm, adapter)
    except UnpicklingError as error:
        raise unsafe_pickle_error(adapter, "base.adapter") from error
    except (OSError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
        raise InputError(
            f"cannot load the adapter {adapter} for its base: {first_line(error)}; check base.adapter="
        ) from error


def refuse_import(config: Any, adapter: str) -> None:
    """Raise InputError for an adapter_config.json that makes peft import a module named in it (megatron_core)."""
    if getattr(config, "megatron_config", None):
        raise InputError(f"the adapter {adapter} has a megatron_config, for which peft imports code; give another one")


def merge_trained_adapter(base: BaseLM, folder: Path) -> None:
    """Merge the adapter that a run trained together with its draft head into the base it started from."""
    import peft
    from safetensors.torch import load_file

    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise InputError(f"there is no {weights}; give the adapter/ of a run of adapt=lora as base.adapted=")
    try:
        base.adapted = tensors_hash(load_file(weights))
        refuse_import(peft.PeftConfig.from_pretrained(str(folder)), str(folder))
        peft.PeftModel.from_pretrained(base.lm, str(folder)).merge_and_unload()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"cannot merge {folder} into {base.name}: {first_line(error)}; check base.adapted=") from error
    base.lm.eval().requires_grad_(False)
    base.name += ", changed by LoRA"
