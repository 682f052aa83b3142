"""Cleaning in named, counted steps. Each looks at one conversation; none knows files, tokens or the other steps.

A step hands back the conversation, without the turns it cuts off, or None, and then it is counted under the
name that the step has in configs/corpus/cleaning. So every conversation goes by exactly one name, or is kept.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ctcdraft.corpus.types import ASSISTANT, USER, Conversation, normalize_text
from ctcdraft.errors import InputError

LETTER_RUN = re.compile(r"[^\W\d_]+")
SURROGATE = re.compile("[\ud800-\udfff]")


class FilterStep(Protocol):
    def __call__(self, conversation: Conversation) -> Conversation | None: ...


@dataclass(frozen=True)
class Cleaning:
    """Steps by name, in the order in which they are taken."""

    steps: Mapping[str, FilterStep]

    def __post_init__(self) -> None:
        for name, step in self.steps.items():
            if not callable(step):
                raise InputError(
                    f"corpus.cleaning.steps.{name}={step} is no step of cleaning; it needs a _target_, as those in "
                    "configs/corpus/cleaning have"
                )

    def clean(
        self, found: Iterable[Conversation], dropped: Counter[str], shortened: Counter[str]
    ) -> Iterator[Conversation]:
        """What passes all steps. The counters take up, by name of step, who was dropped and who lost turns."""
        steps = copy.deepcopy(dict(self.steps))  # a step may remember what it saw, and this may not be the first time
        dropped.update(dict.fromkeys(steps, 0))
        for conversation in found:
            for name, step in steps.items():
                passed = step(conversation)
                if passed is None:
                    dropped[name] += 1
                    break
                shortened[name] += len(passed.turns) < len(conversation.turns)
                conversation = passed
            else:
                yield conversation


@dataclass(frozen=True)
class Roles:
    """Many names for two speakers. Who is left out (system) goes without his turns; a third speaker ends it.

    human, gpt      ->      user, assistant
    """

    user: Sequence[str]
    assistant: Sequence[str]
    left_out: Sequence[str]

    def __call__(self, conversation: Conversation) -> Conversation | None:
        turns = []
        for speaker, content in conversation.turns:
            if speaker in self.user:
                turns.append((USER, content))
            elif speaker in self.assistant:
                turns.append((ASSISTANT, content))
            elif speaker not in self.left_out:
                return None
        return replace(conversation, turns=tuple(turns))


@dataclass(frozen=True)
class Alternation:
    """User, assistant, user, ...: an assistant who begins is cut off, two turns of one speaker in a row end it.

    (ShareGPT's files split long conversations, so that many begin in the middle, with an answer.)
    """

    def __call__(self, conversation: Conversation) -> Conversation | None:
        turns = conversation.turns
        start = next((place for place, (speaker, _) in enumerate(turns) if speaker == USER), len(turns))
        turns = turns[start:]
        alternate = all(speaker == (USER, ASSISTANT)[place % 2] for place, (speaker, _) in enumerate(turns))
        return replace(conversation, turns=turns) if turns and alternate else None


@dataclass(frozen=True)
class Empties:
    """A turn of nothing, of white space or of no text ends it; white space around the others goes."""

    def __call__(self, conversation: Conversation) -> Conversation | None:
        turns = tuple((speaker, valid_text(content)) for speaker, content in conversation.turns)
        return replace(conversation, turns=turns) if turns and all(content for _, content in turns) else None


def valid_text(content: str | None) -> str:
    """What was said, or nothing where no tokenizer could read it: JSON allows halves of a character."""
    return "" if content is None or SURROGATE.search(content) else content.strip()


@dataclass(frozen=True)
class ControlTokens:
    """Text that a tokenizer would take for the end of a turn, or for another speaker, ends it."""

    texts: Sequence[str]

    def __call__(self, conversation: Conversation) -> Conversation | None:
        has_control_token = any(text in turn for turn in conversation.user_turns for text in self.texts)
        return None if has_control_token else conversation


class Language:
    """Whether the user speaks the wanted language, by his script and by the little words he uses.

    letters: the share of letters that must be Latin ones.
    words: little words by language. Another language has to show `least` different ones, and more than the wanted
    one does, so that a short text, a list, a song (la la la) or code passes.
    """

    def __init__(self, wanted: str, letters: float, least: int, words: Mapping[str, str]) -> None:
        if wanted not in words:
            raise InputError(
                f"corpus.cleaning.steps.language.wanted={wanted} is not among {', '.join(words)}; give its little "
                f"words as +corpus.cleaning.steps.language.words.{wanted}=..., or take the step out"
            )
        self.letters = letters
        self.least = least
        self.wanted = frozenset(words[wanted].split())
        self.others = [frozenset(little.split()) for name, little in words.items() if name != wanted]

    def __call__(self, conversation: Conversation) -> Conversation | None:
        text = " ".join(conversation.user_turns).lower()
        if not text.isascii():
            letters = [letter for letter in text if letter.isalpha()]
            if sum(letter < "\u0250" for letter in letters) < self.letters * len(letters):  # behind Latin Extended-B
                return None
        spoken_words = set(LETTER_RUN.findall(text))
        other = max(len(spoken_words & little) for little in self.others)
        return None if other >= self.least and other > len(spoken_words & self.wanted) else conversation


@dataclass(frozen=True)
class Length:
    """At most so many turns of the user, and so many characters in each of them."""

    turns: int
    characters: int

    def __call__(self, conversation: Conversation) -> Conversation | None:
        asked = conversation.user_turns
        fits = len(asked) <= self.turns and max(map(len, asked)) <= self.characters
        return conversation if fits else None


class Duplicates:
    """The first of those whose users say the same, but for case and white space; answers do not count.

    It remembers eight bytes of each, so a million conversations cost under 100 MB.
    """

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, conversation: Conversation) -> Conversation | None:
        joined_turns = "\0".join(map(normalize_text, conversation.user_turns))
        key = int.from_bytes(
            hashlib.blake2b(joined_turns.encode(errors="surrogatepass"), digest_size=8).digest(), "big"
        )
        if key in self.seen:
            return None
        self.seen.add(key)
        return conversation
