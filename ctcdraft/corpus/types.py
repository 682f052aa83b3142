"""What passes between the rooms of a corpus: conversations as they were found, prompts as they are asked.

It knows no file, no step of cleaning and no token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

USER, ASSISTANT = "user", "assistant"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation: who spoke and what was said, None where that was no text.

    id: its own where the source has one, else None: it will be named by what its user says.
    """

    turns: tuple[tuple[str, str | None], ...]
    id: str | None = None
    category: str | None = None
    reference: str | None = None

    @property
    def user_turns(self) -> tuple[str, ...]:
        """What the user said, turn by turn."""
        return tuple(content for speaker, content in self.turns if speaker == USER and content)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says, turn by turn; the answers in between are the base's own."""

    id: str
    category: str
    turns: tuple[str, ...]
    reference: str | None


@dataclass(frozen=True)
class Corpus:
    """The prompts to be asked, and the account of every conversation that was read on the way to them.

    account: read, kept, and every reason for which the others are not among the prompts; they add up.
    """

    prompts: list[Prompt]
    account: dict[str, Any]

    @classmethod
    def from_prompts(cls, prompts: Iterable[Prompt]) -> Corpus:
        """Prompts that come from nowhere, all of them kept."""
        kept = list(prompts)
        return cls(kept, {"read": len(kept), "kept": len(kept)})

    def summary(self) -> str:
        """The account in one line; reasons that nobody fell under are left out."""
        reasons = self.account.get("dropped", {}) | {
            f"in benchmark {name}": count for name, count in self.account.get("leaked", {}).items()
        }
        dropped = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
        dropped += [f"{self.account['not_asked']:,} not asked"] if self.account.get("not_asked") else []
        without = f" (without {', '.join(dropped)})" if dropped else ""
        return f"{self.account['kept']:,} prompts of {self.account['read']:,} conversations{without}"

    @property
    def hash(self) -> str:
        """Stands for the prompts, whatever their order."""
        digests = sorted(
            hashlib.sha256(json.dumps([prompt.id, prompt.category, prompt.turns]).encode()).digest()
            for prompt in self.prompts
        )
        return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def normalize_text(text: str) -> str:
    """Texts that differ in case or in white space only are one:   Hi  THERE  ->  hi there"""
    return " ".join(text.casefold().split())


def prompt_id(turns: Iterable[str]) -> str:
    """An id from what is asked: one half stands for the first turn, the other for all of them.

    Ids in the wild repeat, and one prompt answered by ten models is ten conversations but only one prompt.
    """
    normalized = [normalize_text(turn) for turn in turns]
    first, whole = (
        hashlib.sha256("\0".join(part).encode(errors="surrogatepass")).hexdigest()
        for part in (normalized[:1], normalized)
    )
    return f"{first[:16]}/{whole[:16]}"


def first_turn_key(name: str) -> str:
    """The part of an id that all prompts with the same first turn share: what is split must be split by it.

    ab12/ff03  ->  ab12        p7  ->  p7
    """
    return name.partition("/")[0]
