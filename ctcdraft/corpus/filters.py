"""Cleaning of conversations in named, counted filter steps: targets of configs/corpus/cleaning.

A step takes one conversation and returns it, perhaps with turns cut off, or None to drop it. A dropped conversation is
counted under the name of the step in the config, so each is kept or counted under exactly one name; one that asks
nothing is dropped in any case.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

from ctcdraft.corpus.types import ASSISTANT, USER, Conversation, normalize_text
from ctcdraft.errors import InputError

LETTER_RUN = re.compile(r"[^\W\d_]+")
SURROGATE = re.compile("[\ud800-\udfff]")  # unpaired: JSON allows it, tokenizers cannot encode it
NO_USER_TURN = "without a user turn"  # reason in the account, beside the names of the steps
LATIN_END = "\u0250"  # first character after the block Latin Extended-B

FilterStep = Callable[[Conversation], Conversation | None]


@dataclass(frozen=True)
class Cleaning:
    """Filter steps by name, in the order in which they are applied."""

    steps: Mapping[str, FilterStep]

    def __post_init__(self) -> None:
        for name, step in self.steps.items():
            if not callable(step):
                raise InputError(
                    f"corpus.cleaning.steps.{name}={step} is no step of cleaning; it needs a _target_, as those in "
                    "configs/corpus/cleaning have"
                )

    def clean(
        self, conversations: Iterable[Conversation], dropped: Counter[str], shortened: Counter[str]
    ) -> Iterator[Conversation]:
        """Yield what passes all steps; count by step name which conversations were dropped and which lost turns."""
        steps = copy.deepcopy(dict(self.steps))  # Duplicates has state, and one Cleaning may be used twice
        dropped.update(dict.fromkeys(steps, 0))
        for conversation in conversations:
            for name, step in steps.items():
                passed = step(conversation)
                if passed is None:
                    dropped[name] += 1
                    break
                shortened[name] += len(passed.turns) < len(conversation.turns)
                conversation = passed
            else:
                if conversation.user_turns:
                    yield conversation
                else:  # where a config leaves out the steps that drop it
                    dropped[NO_USER_TURN] += 1


@dataclass(frozen=True)
class Roles:
    """Maps speaker names to user and assistant. Turns of `left_out` (system) are removed; another speaker drops it.

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
    """Cuts off assistant turns before the first user turn; drops two turns of one speaker in a row."""

    def __call__(self, conversation: Conversation) -> Conversation | None:
        # ShareGPT's files split long conversations, so many begin with a response.
        turns = tuple(dropwhile(lambda turn: turn[0] != USER, conversation.turns))
        alternate = all(speaker == (USER, ASSISTANT)[n % 2] for n, (speaker, _) in enumerate(turns))
        return replace(conversation, turns=turns) if turns and alternate else None


@dataclass(frozen=True)
class Empties:
    """Strips white space around turns; drops a conversation with an empty turn or one that is not valid text."""

    def __call__(self, conversation: Conversation) -> Conversation | None:
        turns = tuple((speaker, (content or "").strip()) for speaker, content in conversation.turns)
        valid = all(content and not SURROGATE.search(content) for _, content in turns)
        return replace(conversation, turns=turns) if turns and valid else None


@dataclass(frozen=True)
class ControlTokens:
    """Drops user texts that contain what a tokenizer would encode as an end of turn or as another speaker."""

    texts: Sequence[str]

    def __call__(self, conversation: Conversation) -> Conversation | None:
        has_control_token = any(text in turn for turn in conversation.user_turns for text in self.texts)
        return None if has_control_token else conversation


class Language:
    """Drops user texts of another language than `wanted`, by script and by function words.

    letters: least share of Latin letters. least: distinct function words of another language that drop a text, if they
    are also more than those of the wanted one. words: space-separated function words by language.
    """

    def __init__(self, wanted: str, letters: float, least: int, words: Mapping[str, str]) -> None:
        if wanted not in words:
            raise InputError(
                f"corpus.cleaning.steps.language.wanted={wanted} is not among {', '.join(words)}; give its function "
                f"words as +corpus.cleaning.steps.language.words.{wanted}=..., or remove the step"
            )
        self.letters = letters
        self.least = least
        self.wanted = frozenset(words[wanted].split())
        self.others = [frozenset(some.split()) for name, some in words.items() if name != wanted]

    def __call__(self, conversation: Conversation) -> Conversation | None:
        text = " ".join(conversation.user_turns).lower()
        if not text.isascii():
            letters = [letter for letter in text if letter.isalpha()]
            if sum(letter < LATIN_END for letter in letters) < self.letters * len(letters):
                return None
        present = set(LETTER_RUN.findall(text))
        # Distinct words, and several of them: so a short text, a list, a song (la la la) or code passes.
        other = max(len(present & words) for words in self.others)
        return None if other >= self.least and other > len(present & self.wanted) else conversation


@dataclass(frozen=True)
class Length:
    """Drops conversations with more user turns, or more characters in one of them, than given."""

    turns: int
    characters: int

    def __call__(self, conversation: Conversation) -> Conversation | None:
        turns = conversation.user_turns
        fits = len(turns) <= self.turns and max(map(len, turns), default=0) <= self.characters
        return conversation if fits else None


class Duplicates:
    """Drops conversations whose normalised user turns were seen before; assistant turns do not count."""

    def __init__(self) -> None:
        self.seen: set[int] = set()  # hashes of eight bytes: a million conversations take less than 100 MB

    def __call__(self, conversation: Conversation) -> Conversation | None:
        # Surrogates are dropped by Empties, which a config may place behind this step.
        text = "\0".join(map(normalize_text, conversation.user_turns)).encode(errors="surrogatepass")
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        if key in self.seen:
            return None
        self.seen.add(key)
        return conversation
