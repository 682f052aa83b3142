"""A peft adapter from a folder or a hub id, merged into the base it was made for.

peft reads adapter_model.safetensors, and only where that is absent adapter_model.bin, a pickle, with weights_only=True.
What is no adapter, or a pickle that would call something, is one sentence here.
"""

from __future__ import annotations

from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError

from ctcdraft.errors import InputError, first_line, more_than_tensors


def merged(lm: Any, adapter: str) -> Any:
    """Return the model with the adapter's updates added to its weights."""
    import peft

    try:
        return peft.PeftModel.from_pretrained(lm, adapter).merge_and_unload()
    except UnpicklingError as error:
        raise more_than_tensors(adapter, "base.adapter") from error
    except (OSError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
        raise InputError(
            f"cannot merge the adapter {adapter} into its base: {first_line(error)}; check base.adapter="
        ) from error
