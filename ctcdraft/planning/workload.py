"""Token counts of a corpus before it is generated: prompts as tokenized, responses as long as they may be.

Of many prompts a sample is tokenized. A response of maximal length also counts in the prompts of the conversation's
later turns.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctcdraft.corpus.chat_template import chat_messages, prompt_tokens
from ctcdraft.corpus.generation.requests import ResponseGenerator
from ctcdraft.corpus.types import Prompt

SAMPLE_SIZE = 200  # prompts that are tokenized; the others are assumed to be like them
CHARACTERS_PER_TOKEN = 4  # of English text, where there is no tokenizer


@dataclass(frozen=True)
class CorpusTokenCounts:
    """Tokens of a whole corpus.

    Args:
        prompts: number of conversations.
        turns: number of responses.
        asked: user tokens in the prompts of all turns; a turn counts again in every later prompt.
        recalled: response tokens in the prompts of later turns, an upper bound.
        said: response tokens, an upper bound.
        longest: tokens of the longest conversation, an upper bound.
        longest_prompt: tokens of it that are prefilled at once.
        counted: how tokens were counted.
    """

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
        """Return the counts of the prompts under the settings of a response generator."""
        most, limit = answers.max_new_tokens, context_length * 3 // 4
        sample = prompts[:: -(-len(prompts) // SAMPLE_SIZE)]
        counts = [count_prompt_tokens(count_turn_tokens(prompt, tokenizer), most, limit) for prompt in sample]
        asked, recalled = (sum(column) * len(prompts) // len(sample) for column in zip(*counts, strict=True))
        turns = sum(len(prompt.turns) for prompt in prompts)
        # Tokenizing all prompts would take long; the longest by characters are enough.
        largest = heapq.nlargest(
            8, prompts, lambda one: sum(map(len, one.turns)) / CHARACTERS_PER_TOKEN + most * len(one.turns)
        )
        whole = max(sum(count_turn_tokens(prompt, tokenizer)) + most * len(prompt.turns) for prompt in largest)
        longest = min(context_length, whole)
        by_characters = f"as characters / {CHARACTERS_PER_TOKEN}: there is no tokenizer"
        return cls(
            prompts=len(prompts),
            turns=turns * answers.samples,
            asked=asked * answers.samples,
            recalled=recalled * answers.samples,
            said=turns * answers.samples * most,
            longest=longest,
            longest_prompt=min(limit, max(1, longest - most)),
            counted=f"from {len(sample):,} prompts" if tokenizer else by_characters,
        )

    @property
    def prompt_tokens(self) -> int:
        return self.asked + self.recalled

    @property
    def tokens(self) -> int:
        """Tokens of all rows; a row is one response after its whole prompt."""
        return self.prompt_tokens + self.said


def count_turn_tokens(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Return the tokens of each user turn in the chat template."""
    if tokenizer is None:
        return [-(-len(turn) // CHARACTERS_PER_TOKEN) for turn in prompt.turns]
    return [len(prompt_tokens(tokenizer, chat_messages([turn], []))) for turn in prompt.turns]


def count_prompt_tokens(turns: Sequence[int], most: int, limit: int) -> tuple[int, int]:
    """Return user tokens, and at most how many response tokens, in the prompts of all turns.

    turns of 3 and 4 tokens, responses of 5, prompts of at most 10   ->   3 + 7 of the user, 0 + 3 of responses

    Args:
        turns: tokens of each user turn.
        most: tokens of a response.
        limit: tokens of a prompt, which is cut to it.
    """
    user_tokens = response_tokens = 0
    for turn in range(len(turns)):
        users = min(limit, sum(turns[: turn + 1]))
        user_tokens += users
        response_tokens += min(limit - users, turn * most)
    return user_tokens, response_tokens
