"""Loading of peft adapters (LoRA) from a folder or a hub id.

peft reads adapter_model.safetensors, and only where that is absent adapter_model.bin, a pickle, with weights_only=True.
A damaged adapter, or a pickle that would execute code, becomes an InputError.
"""

from __future__ import annotations

from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError

from ctcdraft.errors import InputError, first_line, unsafe_pickle_error


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
