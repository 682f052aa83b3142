"""A base that is only a shape: a stock architecture with random weights. It knows no language, and no text names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ctcdraft.base import BaseLM
from ctcdraft.base_values import refuse_absent_device, refuse_unknown_dtype
from ctcdraft.decoding.fixed import FixedReads
from ctcdraft.errors import InputError, first_line
from ctcdraft.machine import memory_bytes, spelled


class NoWords:
    """The tokenizer of a shape: no words, no template, no stop."""

    chat_template: str | None = None
    eos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {}


def shaped_base(
    of: Mapping[str, Any],
    name: str,
    dtype: str,
    device: str,
    attention: str = "sdpa",
    fixed: bool = False,
    compiled: bool = False,
) -> BaseLM:
    """A base of random weights from the values of a transformers config; `of.model_type` is its architecture.

    What it takes is what the real one takes, a read's time and memory; what it says means nothing, so it is good
    for latency alone. The embedding counts as the real one's does: looked up, unless it is the head too.
    """
    import transformers

    refuse_absent_device(device)
    refuse_unknown_dtype(dtype)
    reads = FixedReads.of(fixed, compiled)
    values = {**of}
    kind = values.pop("model_type", None)
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
        with torch.device("meta"):
            parameters = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).num_parameters()
        refuse_too_large(name, parameters * getattr(torch, dtype).itemsize, dtype, device)
        torch.manual_seed(0)
        with torch.device(device):
            lm = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention, trust_remote_code=False
            )
    except InputError:
        raise
    except (ValueError, TypeError, KeyError, torch.OutOfMemoryError) as error:
        raise InputError(f"base.of={dict(of)} is no shape of a base here: {first_line(error)}") from error
    lm.generation_config = type(lm.generation_config)()  # no stop word: every answer is as long as it may be
    for key in ("eos_token_id", "bos_token_id"):
        setattr(lm.config, key, None)
    base = BaseLM(lm, NoWords(), name)
    base.fixed = reads
    return base


def refuse_too_large(name: str, needed: int, dtype: str, device: str) -> None:
    """Before anything is allocated: a process that takes more than there is would be killed without a word."""
    available = memory_bytes(device)
    if available is not None and needed > available:
        raise InputError(
            f"the weights of shape {name} take {spelled(needed)} as {dtype}, and {device} has {spelled(available)}; take a "
            "smaller shape, a smaller dtype=, or another device="
        )
