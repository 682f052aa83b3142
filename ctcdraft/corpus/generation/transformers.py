"""The base's own answers, which are what a drafter learns to guess: asked here, in batches. It knows nothing of files.

Answers of another model, or labels by teacher-forced argmax, are not what the base would say next: the
drafter must be asked at training what it is asked at decoding.

The loop is written out instead of calling `generate`, for three reasons: a batch shrinks as its rows finish (one
answer that runs to the limit would otherwise keep all others waiting), keys and values lie in buffers that are
filled and not copied at every token, and every answer has random numbers of its own. `generate` is its test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ctcdraft.corpus.generation.requests import GenerateFn, Request, Response, ResponseGenerator
from ctcdraft.corpus.generation.speed import GenerationSpeed, measure_speed
from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.models.base_model import BaseLM

SHRINK_THRESHOLD = 0.75  # a batch is made smaller when no more than this share of its rows is still being said

# Chooses a word for each row: logits_BV, which answer each row is, how many words have been said  ->  words_B
TokenSelector = Callable[[Tensor, list[int], int], Tensor]


@dataclass(frozen=True)
class TransformersAnswers(ResponseGenerator):
    """Answers by the base in this process, a left-padded batch at a time; works on any base."""

    here = True

    def start(self, base: BaseLM) -> GenerateFn:
        return partial(self.answer, base)

    def pace(self, base: BaseLM, prompts: Sequence[list[int]]) -> GenerationSpeed:
        token = next(token for token in range(base.vocabulary) if token not in base.stop_token_ids)

        def always(logits_BV: Tensor, rows: list[int], step: int) -> Tensor:
            """A word that ends no answer: the batch stays whole."""
            return torch.full((len(rows),), token, device=base.device)

        def say(batch: list[list[int]], tokens: int) -> object:
            return generate_batch(base, batch, [tokens] * len(batch), always)

        return measure_speed(say, prompts, base.context_length)

    def answer(self, base: BaseLM, requests: Sequence[Request]) -> list[Response]:
        """Answer one batch: each row says what it would say alone, but for the rounding of a batched sum."""
        budgets = [self.max_response_tokens(base, question) for question in requests]
        responses = generate_batch(
            base,
            [list(question.tokens) for question in requests],
            budgets,
            self._token_selector(base, requests, max(budgets)),
        )
        return [Response(tokens) for tokens in responses]

    def _token_selector(self, base: BaseLM, requests: Sequence[Request], budget: int) -> TokenSelector:
        if self.temperature == 0:
            return lambda logits_BV, rows, step: logits_BV.argmax(dim=-1)
        positions = torch.arange(budget)
        keys = [question.random_key(self.seed) for question in requests]
        uniform_BL = torch.cat([GumbelNoise(key).uniform(positions, 1) for key in keys], dim=1).T.to(base.device)
        return lambda logits_BV, rows, step: sample_tokens(logits_BV, self.temperature, uniform_BL[rows, step])


def sample_tokens(logits_BV: Tensor, temperature: float, uniform_B: Tensor) -> Tensor:
    """Words_B from the law at this temperature: the word at which the summed probabilities pass the coin.

    probabilities .5 .3 .2, coin .6      ->      word 1

    In float64: in float32 the sum over 128k words is off by more than a rare word weighs.
    """
    sums_BV = (logits_BV.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    return torch.searchsorted(sums_BV, uniform_B[:, None] * sums_BV[:, -1:], right=True)[:, 0]


@torch.inference_mode()
def generate_batch(
    base: BaseLM, prompts: list[list[int]], budgets: Sequence[int], choose: TokenSelector
) -> list[list[int]]:
    """What follows each prompt, up to its first stop token or the end of its room."""
    width = max(len(prompt) for prompt in prompts)
    tokens_BL, mask_BL = (tensor.to(base.device) for tensor in left_pad(prompts, width))
    positions_BL = (mask_BL.cumsum(dim=-1) - 1).clamp(min=0)
    cache = base.batch_cache(width + max(budgets))
    output = base.lm.base_model(
        input_ids=tokens_BL, attention_mask=mask_BL, position_ids=positions_BL, past_key_values=cache, use_cache=True
    )
    logits_BV = base.head(output.last_hidden_state[:, -1])
    position_B = positions_BL[:, -1]
    # Additive, because eager attention would add a bool mask as 0 and 1. Answers are never padded.
    hidden_BM = torch.zeros(len(prompts), cache.capacity, dtype=base.dtype, device=base.device)
    hidden_BM[:, :width].masked_fill_(mask_BL == 0, torch.finfo(base.dtype).min)

    responses: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # which prompt each row of the batch belongs to
    open_rows = set(rows)
    for step in range(max(budgets)):
        tokens_B = choose(logits_BV, rows, step)
        for row, token in zip(rows, tokens_B.tolist(), strict=True):
            if row in open_rows:
                responses[row].append(token)
                if token in base.stop_token_ids or len(responses[row]) == budgets[row]:
                    open_rows.discard(row)
        if not open_rows:
            break
        if len(open_rows) <= SHRINK_THRESHOLD * len(rows):
            open_B = torch.tensor([n for n, row in enumerate(rows) if row in open_rows], device=base.device)
            rows = [row for row in rows if row in open_rows]
            tokens_B, position_B, hidden_BM = tokens_B[open_B], position_B[open_B], hidden_BM[open_B]
            cache.batch_select(open_B)
        # A row that is finished and not yet gone must not run beyond the last position a base knows.
        position_B = (position_B + 1).clamp(max=base.context_length - 1)
        output = base.lm.base_model(
            input_ids=tokens_B[:, None],
            attention_mask=base.layer_masks(hidden_BM[:, None, None, : cache.length + 1]),
            position_ids=position_B[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits_BV = base.head(output.last_hidden_state[:, -1])
    return responses


def left_pad(prompts: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
    """Tokens_BL and mask_BL of prompts that end together. Many tokenizers have no pad token, and behind the mask
    any id will do: the first of the row.

    [[5, 6, 7], [8]]      ->      5 6 7     1 1 1
                                  8 8 8     0 0 1
    """
    free = [width - len(tokens) for tokens in prompts]
    tokens_BL = torch.tensor([tokens[:1] * n + tokens for n, tokens in zip(free, prompts, strict=True)])
    mask_BL = torch.tensor([[0] * n + [1] * (width - n) for n in free])
    return tokens_BL, mask_BL
