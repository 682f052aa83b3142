"""Conversations as read from a file, prompts as sent to the base model, and corpora of prompts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

USER, ASSISTANT = "user", "assistant"
HASHED_ID = re.compile("[0-9a-f]{16}/[0-9a-f]{16}")  # of prompt_id


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation as read from a source."""

    turns: tuple[tuple[str, str | None], ...]  # (role, text), with None for a turn that is not text
    id: str | None = None  # None: the prompt gets an id hashed from the user turns
    category: str | None = None
    reference: str | None = None

    @property
    def user_turns(self) -> tuple[str, ...]:
        return tuple(content for role, content in self.turns if role == USER and content)


@dataclass(frozen=True, slots=True)
class Prompt:
    """User turns; the base model generates the responses between them."""

    id: str
    category: str
    turns: tuple[str, ...]
    reference: str | None


@dataclass(frozen=True)
class Corpus:
    """Prompts, and the account of all conversations that were read."""

    prompts: list[Prompt]
    account: dict[str, Any]  # counts of read and kept conversations and of every reason for dropping one; they add up

    @classmethod
    def from_prompts(cls, prompts: Iterable[Prompt]) -> Corpus:
        """Return a corpus that keeps all of the given prompts."""
        kept = list(prompts)
        return cls(kept, {"read": len(kept), "kept": len(kept)})

    def summary(self) -> str:
        """Return the account in one line, without reasons that dropped nothing."""
        reasons = drop_reasons(self.account.get("dropped", {}), self.account.get("leaked", {}))
        dropped = [f"{count:,} {reason}" for reason, count in reasons.items()]
        dropped += [f"{self.account['not_asked']:,} not asked"] if self.account.get("not_asked") else []
        without = f" (without {', '.join(dropped)})" if dropped else ""
        return f"{self.account['kept']:,} prompts of {self.account['read']:,} conversations{without}"

    @property
    def hash(self) -> str:
        """Content hash of the prompts, independent of their order."""
        keys = [json.dumps([prompt.id, prompt.category, prompt.turns]).encode() for prompt in self.prompts]
        return hashlib.sha256(b"".join(sorted(hashlib.sha256(key).digest() for key in keys))).hexdigest()[:16]


def drop_reasons(dropped: Mapping[str, int], leaked: Mapping[str, int]) -> dict[str, int]:
    """Return the counts above 0 of both, by cleaning step and by benchmark."""
    reasons = {**dropped, **{f"in benchmark {name}": count for name, count in leaked.items()}}
    return {reason: count for reason, count in reasons.items() if count}


def normalize_text(text: str) -> str:
    """Return the text with case and white space normalised:   Hi  THERE  ->  hi there"""
    return " ".join(text.casefold().split())


def prompt_id(turns: Iterable[str]) -> str:
    """Return an id hashed from user turns: FIRST/ALL, one half from the first turn and one from all turns."""
    # Ids in public data sets repeat, and one prompt with ten models' responses is ten conversations but one prompt.
    normalized = [normalize_text(turn) for turn in turns]
    texts = ["\0".join(part).encode(errors="surrogatepass") for part in (normalized[:1], normalized)]
    return "/".join(hashlib.sha256(text).hexdigest()[:16] for text in texts)


def first_turn_key(name: str) -> str:
    """Return the part of a hashed id shared by prompts with the same first turn, else the id; held-out splits use it.

    0123456789abcdef/fedcba9876543210  ->  0123456789abcdef        math/7  ->  math/7
    """
    return name.partition("/")[0] if HASHED_ID.fullmatch(name) else name
