"""The base's own answers, which are what a drafter learns to guess. It knows nothing of files.

Answers of another model, or labels by teacher-forced argmax, are not what the base would say next: the
drafter must be asked at training what it is asked at decoding.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ctcdraft.base import BaseLM
from ctcdraft.corpus.chat import fit, messages, prompt_tokens
from ctcdraft.corpus.conversations import Prompt
from ctcdraft.errors import InputError


class Answers(Protocol):
    """Whoever asks the base: prompts in, for each the ids up to and including its first stop token."""

    batch_size: int
    max_new_tokens: int

    def __call__(self, base: BaseLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]: ...


@dataclass(frozen=True)
class Question:
    """One turn of one prompt, ready to be asked; `cut` tokens of its history did not fit."""

    id: str
    turn: int
    category: str
    tokens: array[int]  # four bytes an id: a list of ints would cost eight times that over 100k prompts
    cut: int


def questions(base: BaseLM, prompts: Sequence[Prompt], said: dict[str, list[str]], turn: int) -> list[Question]:
    """Turn `turn` of every prompt that has one, after the base's own answers so far; longest first.

    Longest first, so that padding is short and what does not fit in memory fails in the first batch. The
    id breaks ties: batches do not depend on the order in which the prompts came.
    """
    asked = []
    for prompt in prompts:
        if turn < len(prompt.turns):
            history = messages(prompt.turns, said[prompt.id][:turn])
            tokens, cut = fit(prompt_tokens(base.tokenizer, history), base.context_length)
            asked.append(Question(prompt.id, turn, prompt.category, array("i", tokens), cut))
    return sorted(asked, key=lambda question: (-len(question.tokens), question.id))


@dataclass(frozen=True)
class TransformersAnswers:
    """Answers by transformers' `generate`, a left-padded batch at a time; temperature 0 is greedy."""

    batch_size: int
    max_new_tokens: int
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.max_new_tokens < 1 or self.temperature < 0:
            raise InputError(
                f"no answers with batch_size {self.batch_size}, temperature {self.temperature} and "
                f"max_new_tokens {self.max_new_tokens}; a temperature is 0 or more, the others 1 or more"
            )

    def __call__(self, base: BaseLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Answer one batch; the same batch and seed give the same answers, whatever was drawn before.

        A prompt near the end of the context has little room, and `generate` knows one limit for all. So
        it runs to the nearest limit, and the rows that may say more go on from there: a row then says
        what it would say alone, at the price of another prefill for a batch that meets the limit.
        """
        said: list[list[int]] = [[] for _ in prompts]
        open_rows = list(range(len(prompts)))
        with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []):
            torch.manual_seed(batch_seed(self.seed, prompts))
            while open_rows:
                room = {row: self._room(base, prompts[row], said[row]) for row in open_rows}
                asked = [[*prompts[row], *said[row]] for row in open_rows]
                for row, more in zip(open_rows, self._generate(base, asked, min(room.values())), strict=True):
                    said[row] += more
                nearest = min(room.values())
                open_rows = [row for row in open_rows if room[row] > nearest and said[row][-1] not in base.stop_tokens]
        return said

    def _room(self, base: BaseLM, prompt: Sequence[int], said: list[int]) -> int:
        return min(self.max_new_tokens, base.context_length - len(prompt)) - len(said)

    @torch.inference_mode()
    def _generate(self, base: BaseLM, asked: list[list[int]], new_tokens: int) -> list[list[int]]:
        # Left padding by hand: many chat tokenizers have no pad token, and behind the mask any id will do.
        pad = base.tokenizer.pad_token_id
        pad = min(base.stop_tokens, default=0) if pad is None else pad
        width = max(len(tokens) for tokens in asked)
        free = [width - len(tokens) for tokens in asked]
        tokens_BL = torch.tensor([[pad] * n + tokens for n, tokens in zip(free, asked, strict=True)])
        mask_BL = torch.tensor([[0] * n + [1] * (width - n) for n in free])

        # `generate` fills what it is not told from the model's own generation config, such as top_p or a
        # repetition penalty. A second handle on the same weights has an empty one.
        lm, settings = copy.copy(base.lm), type(base.lm.generation_config)
        lm.generation_config = settings()
        law = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        config = settings(
            max_new_tokens=new_tokens,
            eos_token_id=sorted(base.stop_tokens) or None,
            pad_token_id=pad,
            **(law if self.temperature > 0 else {"do_sample": False}),
        )
        output_BL = lm.generate(
            tokens_BL.to(base.device), attention_mask=mask_BL.to(base.device), generation_config=config
        )
        return [until_stop(row, base.stop_tokens) for row in output_BL[:, width:].tolist()]


def until_stop(ids: list[int], stop_tokens: frozenset[int]) -> list[int]:
    """5 6 2 0 0, where 2 stops      ->      5 6 2"""
    end = next((n + 1 for n, token in enumerate(ids) if token in stop_tokens), len(ids))
    return ids[:end]


def batch_seed(seed: int, prompts: Sequence[Sequence[int]]) -> int:
    """By what is asked, not by when: a resumed run draws as one that was never stopped."""
    digest = hashlib.sha256(str([seed, *map(list, prompts)]).encode()).digest()
    return int.from_bytes(digest[:7], "big")
