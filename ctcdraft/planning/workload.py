"""Token counts of a corpus before it is generated: prompts as tokenized, responses as long as they may be.

Of many prompts a sample is tokenized. A response of maximal length also counts in the prompts of the conversation's
later turns. Rows are what training reads: conversations, or single turns where the chat template rewrites earlier ones
(corpus/lines.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ctcdraft.corpus.chat_template import chat_messages, keeps_history, prompt_tokens
from ctcdraft.corpus.generation.requests import ResponseGenerator
from ctcdraft.corpus.types import Prompt
from ctcdraft.hardware import HardwareSpec
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.stats import ModelStats

SAMPLE_SIZE = 200  # prompts that are tokenized; the others are assumed to be like them
CHARACTERS_PER_TOKEN = 4  # of English text, where there is no tokenizer


@dataclass(frozen=True)
class CorpusTokenCounts:
    """Tokens of a whole corpus before it is generated."""

    prompts: int  # conversations
    turns: int  # responses
    user_tokens: int  # in the prompts of all turns; a turn counts again in every later prompt
    recalled: int  # response tokens in the prompts of later turns, an upper bound
    response_tokens: int  # an upper bound
    rows: int
    row_tokens: int  # tokens of all rows, an upper bound
    longest: int  # tokens of the longest conversation, an upper bound
    longest_prompt: int  # tokens of it that are prefilled at once
    counted: str  # how tokens were counted

    @classmethod
    def from_prompts(cls, prompts: Sequence[Prompt], answers: ResponseGenerator, base: BaseLM) -> CorpusTokenCounts:
        """Return the counts of the prompts under the settings of a response generator."""
        # A prompt is cut to 3/4 of the context.
        tokenizer, most, limit = base.tokenizer, answers.max_new_tokens, base.context_length * 3 // 4
        sample = sampled(prompts)
        lengths = [count_turn_tokens(prompt, tokenizer) for prompt in sample]
        # A turn whose prompt does not begin with the row before it is a row of its own.
        kept = limit if joins_turns(base) else 0
        counts = [count_prompt_tokens(turns, most, limit) + count_rows(turns, most, limit, kept) for turns in lengths]
        totals = [sum(column) * len(prompts) // len(sample) for column in zip(*counts, strict=True)]
        user_tokens, recalled, rows, row_tokens = (total * answers.samples for total in totals)
        turns = sum(len(prompt.turns) for prompt in prompts)
        # Tokenizing all prompts would take long; the longest by characters are enough.
        largest = heapq.nlargest(
            8, prompts, lambda one: sum(map(len, one.turns)) / CHARACTERS_PER_TOKEN + most * len(one.turns)
        )
        whole = max(sum(count_turn_tokens(prompt, tokenizer)) + most * len(prompt.turns) for prompt in largest)
        longest = min(base.context_length, whole)
        by_characters = f"as characters / {CHARACTERS_PER_TOKEN}: there is no tokenizer"
        return cls(
            prompts=len(prompts),
            turns=turns * answers.samples,
            user_tokens=user_tokens,
            recalled=recalled,
            response_tokens=turns * answers.samples * most,
            rows=rows,
            row_tokens=row_tokens,
            longest=longest,
            longest_prompt=min(limit, max(1, longest - most)),
            counted=f"from {len(sample):,} prompts" if tokenizer else by_characters,
        )

    @property
    def prompt_tokens(self) -> int:
        return self.user_tokens + self.recalled

    @property
    def tokens_by_turn(self) -> int:
        """Tokens of a row for every response behind its whole prompt, as the base model reads them to answer."""
        return self.prompt_tokens + self.response_tokens

    @property
    def mean_context(self) -> float:
        """Tokens that a response token attends to, on average."""
        return (self.prompt_tokens + self.response_tokens / 2) / self.turns

    def flops(self, size: ModelStats) -> tuple[float, float]:
        """Return the operations of prefilling all prompts and of decoding all responses."""
        # Attention is causal: a token of a prompt attends to half of it on average.
        prefill = size.prefill_flops(self.prompt_tokens, self.prompt_tokens / self.turns / 2)
        return prefill, size.decode_flops(self.response_tokens, self.mean_context)

    def hours(self, size: ModelStats, rows: int, rate: HardwareSpec) -> float | None:
        """Return at most how many hours all responses take in batches of `rows`; None without rates."""
        prefill, decoding = self.flops(size)
        # Each decoding step reads all weights once for all rows, and the keys and values of each row.
        bytes_read = (size.weight_bytes + rows * size.kv_bytes * self.mean_context) * self.response_tokens / rows
        prefill_seconds, decoding_seconds = rate.seconds(prefill), rate.seconds(decoding, bytes_read)
        if prefill_seconds is None or decoding_seconds is None:
            return None
        return (prefill_seconds + decoding_seconds) / 3600


def sampled(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    return prompts[:: -(-len(prompts) // SAMPLE_SIZE)]


def joins_turns(base: BaseLM) -> bool:
    """Return whether all turns of a conversation are in one row; assumed where there is no tokenizer."""
    return base.tokenizer is None or keeps_history(base.tokenizer, base.stop_token_ids)


def least_row_tokens(prompts: Sequence[Prompt], base: BaseLM, longest: int) -> int:
    """Return the tokens of the rows, of which training reads at most `longest` each, if all responses were empty."""
    sample, joined = sampled(prompts), joins_turns(base)
    lengths = [[*accumulate(count_turn_tokens(prompt, base.tokenizer))] for prompt in sample]
    rows = [min(longest, length) for upto in lengths for length in (upto[-1:] if joined else upto)]
    return sum(rows) * len(prompts) // len(sample)


def first_turn_tokens(tokenizer: Any, turns: Sequence[str]) -> list[int]:
    return prompt_tokens(tokenizer, chat_messages(turns, []))


def count_turn_tokens(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Return the tokens of each user turn in the chat template."""
    if tokenizer is None:
        return [-(-len(turn) // CHARACTERS_PER_TOKEN) for turn in prompt.turns]
    return [len(first_turn_tokens(tokenizer, [turn])) for turn in prompt.turns]


def count_prompt_tokens(turns: Sequence[int], most: int, limit: int) -> tuple[int, int]:
    """Return user tokens, and at most how many response tokens, in the prompts of all turns.

    turns of 3 and 4 tokens, most=5 per response, prompts cut to limit=10   ->   3 + 7 of the user, 0 + 3 of responses
    """
    users = [min(limit, sum(turns[: turn + 1])) for turn in range(len(turns))]
    return sum(users), sum(min(limit - user, turn * most) for turn, user in enumerate(users))


def count_rows(turns: Sequence[int], most: int, limit: int, kept: int) -> tuple[int, int]:
    """Return the rows of a conversation and at most their tokens; rows continue in prompts of up to `kept` tokens.

    turns of 3 and 4 tokens, most=5 per response, limit=20, kept=20   ->   1 row of 3 + 5 + 4 + 5
    turns of 3 and 4 tokens, most=5 per response, limit=20, kept=0    ->   2 rows of 3 + 5 and 3 + 5 + 4 + 5
    """
    prompts = [sum(turns[: turn + 1]) + turn * most for turn in range(len(turns))]
    last = [now for now, following in pairwise([*prompts, kept + 1]) if following > kept]  # prompts of last turns
    return len(last), sum(min(limit, prompt) + most for prompt in last)
