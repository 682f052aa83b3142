"""What token ids look like, one by one. It knows a tokenizer; a text is never decoded here for anybody's use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TORN = "\ufffd"  # what half a character decodes to


class Spelling:
    """One word by itself, with the space it begins with: some tokenizers drop it at the beginning of a text, so every
    word is decoded behind another."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self.skip = tokenizer.decode(self.before)

    def __call__(self, word: int) -> str:
        both = self.tokenizer.decode([*self.before, word])
        return both[len(self.skip) :] if both.startswith(self.skip) else self.tokenizer.decode([word])


def pieces(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """A text in as many pieces as it has tokens; a character that several make belongs to the last of them."""
    made, before = [], ""
    for place in range(len(tokens)):
        text = tokenizer.decode(list(tokens[: place + 1]))
        if text.endswith(TORN) and place + 1 < len(tokens):
            made.append("")
            continue
        made.append(text[len(before) :])
        before = text
    return tuple(made)
