"""The tokens of a corpus before it is made: what is asked, and at most what will be answered.

Prompts are counted with the base's tokenizer, a sample of them where they are many. Answers are taken to be as long as
they may be, and to stand in the histories of later turns as such.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctcdraft.corpus.chat_template import chat_messages, prompt_tokens
from ctcdraft.corpus.generation.requests import ResponseGenerator
from ctcdraft.corpus.types import Prompt

SAMPLE_SIZE = 200  # prompts whose tokens are counted; the others are taken to be like them
CHARACTERS_PER_TOKEN = 4  # a token of English, where there is no tokenizer to ask


@dataclass(frozen=True)
class CorpusTokenCounts:
    """Tokens of a whole corpus. asked: what users say, earlier turns again in later prompts. recalled: the base's own
    answers again in those prompts, at most. said: in answers, at most. longest: one dialogue, at most; of it
    longest_prompt is read at once. counted: how tokens were."""

    prompts: int
    turns: int
    asked: int
    recalled: int
    said: int
    longest: int
    longest_prompt: int
    counted: str

    @classmethod
    def from_prompts(
        cls, prompts: Sequence[Prompt], answers: ResponseGenerator, tokenizer: Any, context_length: int
    ) -> CorpusTokenCounts:
        most, limit = answers.max_new_tokens, context_length * 3 // 4
        sample = prompts[:: -(-len(prompts) // SAMPLE_SIZE)]
        counts = [count_prompt_tokens(count_turn_tokens(prompt, tokenizer), most, limit) for prompt in sample]
        user_tokens, recalled = (sum(column) * len(prompts) // len(sample) for column in zip(*counts, strict=True))
        turns = sum(len(prompt.turns) for prompt in prompts)
        largest = heapq.nlargest(
            8, prompts, lambda one: sum(map(len, one.turns)) / CHARACTERS_PER_TOKEN + most * len(one.turns)
        )
        whole = max(sum(count_turn_tokens(prompt, tokenizer)) + most * len(prompt.turns) for prompt in largest)
        longest = min(context_length, whole)
        how = (
            f"from {len(sample):,} prompts"
            if tokenizer
            else f"as characters / {CHARACTERS_PER_TOKEN}: no tokenizer is here"
        )
        return cls(
            prompts=len(prompts),
            turns=turns * answers.samples,
            asked=user_tokens * answers.samples,
            recalled=recalled * answers.samples,
            said=turns * answers.samples * most,
            longest=longest,
            longest_prompt=min(limit, max(1, longest - most)),
            counted=how,
        )

    @property
    def prompt_tokens(self) -> int:
        return self.asked + self.recalled

    @property
    def tokens(self) -> int:
        """Of the corpus: every answer is a row, after the whole prompt it was given to."""
        return self.prompt_tokens + self.said


def count_turn_tokens(prompt: Prompt, tokenizer: Any) -> list[int]:
    """How many tokens each turn of the user is, in the template."""
    if tokenizer is None:
        return [-(-len(turn) // CHARACTERS_PER_TOKEN) for turn in prompt.turns]
    return [len(prompt_tokens(tokenizer, chat_messages([turn], []))) for turn in prompt.turns]


def count_prompt_tokens(turns: Sequence[int], most: int, limit: int) -> tuple[int, int]:
    """Tokens of the user, and at most of the base, in the prompts of all turns; no prompt is longer than the limit.

    turns of 3 and 4, answers of 5, limit 10   ->   3 + 7 of the user, 0 + 3 of the base
    """
    user_tokens = response_tokens = 0
    for turn in range(len(turns)):
        users = min(limit, sum(turns[: turn + 1]))
        user_tokens += users
        response_tokens += min(limit - users, turn * most)
    return user_tokens, response_tokens
