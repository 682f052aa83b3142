"""Prompts in fixed shapes: padded to one of a few sizes, with the number of their tokens on the device.

So the pass over a prompt and the first draft behind it, which reads the hidden states of the whole prompt, are captured
like every other step.

    prompt of 3 tokens, size 6    a b c - - -        rows of padding belong to no token
    text                          a b c x - - -      x: the first token of the response, the root of the first draft
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SIZES = 64, 128, 256  # longer prompts are read in their exact shapes: padding costs them more than launches do


class PromptMemory:
    """The tokens and hidden states of a padded prompt, in memory that stays in place."""

    def __init__(self, device: torch.device) -> None:
        numbers: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.text_T = torch.zeros(SIZES[-1] + 1, **numbers)
        self.count_1 = torch.zeros(1, **numbers)  # tokens of the prompt
        self.last_1 = torch.zeros(1, **numbers)  # count_1 - 1
        self.states_SD: Any = None  # allocated with the first prompt, of the width and dtype of its states

    def write(self, prompt_L: Tensor) -> None:
        """Take over a prompt."""
        self.text_T.zero_()
        self.text_T[: len(prompt_L)].copy_(prompt_L)
        self.count_1.fill_(len(prompt_L))
        self.last_1.fill_(len(prompt_L) - 1)

    def read(self, base: Any, size: int, cache: Any) -> Tensor:
        """Read the prompt with the base, keep its hidden states, and return logits_1V behind its last token."""
        states_PD = base.read_padded(self.text_T[:size], self.count_1, cache)
        if self.states_SD is None:
            self.states_SD = states_PD.new_zeros(SIZES[-1], states_PD.shape[1])
        self.states_SD[:size].copy_(states_PD)
        return base.logits(states_PD.index_select(0, self.last_1))

    def append(self, token_1: Tensor) -> None:
        """Write the first token of the response behind the prompt."""
        self.text_T.index_copy_(0, self.count_1, token_1)

    def first_draft(self, size: int) -> dict[str, Any]:
        """Return the fields of a StaticContext that differ in the first draft of a text."""
        return {
            "new_tokens_K": self.text_T[1 : size + 1],
            "new_states_KD": self.states_SD[:size],
            "count_1": self.count_1,
            "last_1": self.last_1,
            "tokens_L": self.text_T[: size + 1],
        }


def padded_size(tokens: int) -> int | None:
    """Return the size that a prompt is padded to; None for one that is too long."""
    return next((size for size in SIZES if tokens <= size), None)
