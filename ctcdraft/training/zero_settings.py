"""What may stand under engine.deepspeed, told by DeepSpeed's own reader before an hour of answers. It runs nothing.

DeepSpeed reads a misspelt key at the top as no key at all, so what it asks for while it reads is listened to, and what
it never asked for is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ctcdraft.errors import InputError, first_line

OURS = {
    "train_batch_size": "trainer.rows= and trainer.accumulate=",
    "train_micro_batch_size_per_gpu": "trainer.rows=",
    "gradient_accumulation_steps": "trainer.accumulate=",
    "optimizer": "trainer.learning_rate=, betas and weight_decay",
    "scheduler": "trainer.warmup= and final_share",
}


class Listened(dict[str, Any]):
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


def refuse_wrong(deepspeed: Any, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise InputError for what DeepSpeed would refuse, or not notice, at the first step. deepspeed: the package.
    settings: engine.deepspeed; defaults: what a run says itself where they say nothing."""
    for key in [key for key in OURS if key in settings]:
        raise InputError(f"engine.deepspeed.{key} is what a run decides itself; leave it out, and give {OURS[key]}")
    read = Listened({**defaults, **settings})
    try:
        deepspeed.DeepSpeedConfig(read)
    except (AssertionError, ValueError, TypeError, AttributeError, deepspeed.DeepSpeedConfigError) as error:
        raise InputError(f"DeepSpeed refuses engine.deepspeed: {reason(error)}") from error
    for key in [key for key in settings if key not in read.accessed]:
        near = difflib.get_close_matches(key, read.accessed, 1)
        meant = f"did you mean {near[0]}?" if near else "leave it out"
        raise InputError(f"engine.deepspeed.{key} is nothing that DeepSpeed looks at; {meant}")


def reason(error: Exception) -> str:
    """One line of what DeepSpeed, or pydantic for it (a headline, the key, and what is wrong with it), has to say."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if "validation error" in lines[0] and len(lines) > 2:
        return f"{lines[1]}: {lines[2].partition(' [')[0]}"
    return first_line(error)
