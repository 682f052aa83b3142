"""Responses of the base model in this process, generated in batches, and a short trial of their speed for the plan.

The draft head is trained on the base model's own responses, because responses of another model, or teacher-forced
argmax labels, are not what the base model generates when the head drafts for it.

The loop is written out instead of calling `generate`, which tests compare it with, for three reasons: the batch shrinks
as rows finish (one long response would otherwise keep all others in the batch), keys and values stay in preallocated
buffers instead of being copied at every token, and every response has random numbers of its own.

The trial generates a few tokens after prompts as long as the corpus's own, in batches that grow towards the real batch
size. One decoding step of a batch costs about as much as that of one row where memory bandwidth is the limit, and
proportionally to the rows where arithmetic is; so a trial with fewer rows gives bounds, not a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from time import perf_counter

import torch
from torch import Tensor

from ctcdraft.corpus.generation.requests import GenerateFn, GenerationSpeed, Request, Response, ResponseGenerator
from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.models.base_model import BaseLM

SHRINK_THRESHOLD = 0.75  # finished rows are removed when at most this share of the rows is unfinished
TRIAL_STEPS = 4  # tokens generated after each prompt, beyond the first
TRIAL_GROWTH = 4  # factor between the batch sizes of successive trials
MAX_TRIAL_SECONDS = 10.0  # for the next trial, if it takes TRIAL_GROWTH times as long as the last one

# (logits_BV, index of the prompt of each row, number of tokens generated so far) -> tokens_B
TokenSelector = Callable[[Tensor, list[int], int], Tensor]


@dataclass(frozen=True)
class TransformersAnswers(ResponseGenerator):
    """Responses by the base model in this process, in left-padded batches."""

    in_process = True

    def start(self, base: BaseLM) -> GenerateFn:
        return partial(self.generate, base)

    def benchmark_speed(self, base: BaseLM, prompts: Sequence[list[int]]) -> GenerationSpeed:
        # Any token that does not end a response, so that all rows are generated to the end of the trial.
        token = next(token for token in range(base.vocabulary) if token not in base.stop_token_ids)

        def never_stop(logits_BV: Tensor, rows: list[int], step: int) -> Tensor:
            return torch.full((len(rows),), token, device=base.device)

        def generate(batch: list[list[int]], tokens: int) -> object:
            return generate_batch(base, batch, [tokens] * len(batch), never_stop)

        return measure_speed(generate, prompts, base.context_length)

    def generate(self, base: BaseLM, requests: Sequence[Request]) -> list[Response]:
        """Return the responses to one batch, each equal to that of a batch of one up to rounding."""
        budgets = [self.max_response_tokens(base, request) for request in requests]
        prompts = [list(request.tokens) for request in requests]
        selector = self._token_selector(base, requests, max(budgets))
        return [Response(tokens) for tokens in generate_batch(base, prompts, budgets, selector)]

    def _token_selector(self, base: BaseLM, requests: Sequence[Request], budget: int) -> TokenSelector:
        if self.temperature == 0:
            return lambda logits_BV, rows, step: logits_BV.argmax(dim=-1)
        positions = torch.arange(budget)
        keys = [request.random_key(self.seed) for request in requests]
        uniform_BL = torch.cat([GumbelNoise(key).uniform(positions, 1) for key in keys], dim=1).T.to(base.device)
        return lambda logits_BV, rows, step: sample_tokens(logits_BV, self.temperature, uniform_BL[rows, step])


def sample_tokens(logits_BV: Tensor, temperature: float, uniform_B: Tensor) -> Tensor:
    """Return tokens_B sampled at this temperature by inverting the cumulative distribution.

    probabilities .5 .3 .2, uniform draw .6      ->      token 1

    In float64: in float32 the error of the sum over 128k tokens exceeds the probability of a rare token.
    """
    sums_BV = (logits_BV.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    return torch.searchsorted(sums_BV, uniform_B[:, None] * sums_BV[:, -1:], right=True)[:, 0]


@torch.inference_mode()
def generate_batch(
    base: BaseLM, prompts: list[list[int]], budgets: Sequence[int], choose: TokenSelector
) -> list[list[int]]:
    """Return the tokens generated after each prompt, up to its first stop token or its budget of tokens.

    `choose` selects the next token of every row.
    """
    width = max(len(prompt) for prompt in prompts)
    tokens_BL, mask_BL = (tensor.to(base.device) for tensor in left_pad(prompts, width))
    positions_BL = (mask_BL.cumsum(dim=-1) - 1).clamp(min=0)  # padding on the left would have -1
    cache = base.new_cache(width + max(budgets))
    output = base.lm.base_model(
        input_ids=tokens_BL, attention_mask=mask_BL, position_ids=positions_BL, past_key_values=cache, use_cache=True
    )
    logits_BV = base.head(output.last_hidden_state[:, -1])
    position_B = positions_BL[:, -1]
    # An additive mask: eager attention would add a bool mask as 0 and 1. Only prompts are padded.
    bias_BM = torch.zeros(len(prompts), cache.capacity, dtype=base.dtype, device=base.device)
    bias_BM[:, :width].masked_fill_(mask_BL == 0, torch.finfo(base.dtype).min)

    responses: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # index of the prompt of each row of the batch
    active = set(rows)
    for step in range(max(budgets)):
        tokens_B = choose(logits_BV, rows, step)
        for row, token in zip(rows, tokens_B.tolist(), strict=True):
            if row in active:
                responses[row].append(token)
                if token in base.stop_token_ids or len(responses[row]) == budgets[row]:
                    active.discard(row)
        if not active:
            break
        if len(active) <= SHRINK_THRESHOLD * len(rows):  # not after every response: it copies the keys and values
            active_B = torch.tensor([n for n, row in enumerate(rows) if row in active], device=base.device)
            rows = [row for row in rows if row in active]
            tokens_B, position_B, bias_BM = tokens_B[active_B], position_B[active_B], bias_BM[active_B]
            cache.batch_select(active_B)
        # A finished row that is still in the batch must not exceed the last position id of the base model.
        position_B = (position_B + 1).clamp(max=base.context_length - 1)
        output = base.lm.base_model(
            input_ids=tokens_B[:, None],
            attention_mask=base.layer_masks(bias_BM[:, None, None, : cache.length + 1]),
            position_ids=position_B[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits_BV = base.head(output.last_hidden_state[:, -1])
    return responses


def left_pad(prompts: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
    """Return tokens_BL and mask_BL of left-padded prompts.

    [[5, 6, 7], [8]]      ->      5 6 7     1 1 1
                                  8 8 8     0 0 1
    """
    # Many tokenizers have no pad token; under the mask any id will do, here the first of the row.
    free = [width - len(tokens) for tokens in prompts]
    tokens_BL = torch.tensor([tokens[:1] * n + tokens for n, tokens in zip(free, prompts, strict=True)])
    mask_BL = torch.tensor([[0] * n + [1] * (width - n) for n in free])
    return tokens_BL, mask_BL


def turns_of_all_batches(turns: Sequence[int], rows: int) -> int:
    """Return the sum over all batches of the turns of their longest sample; a small batch counts like a full one.

    turns of 1, 3 and 1, two rows per batch   ->   3 of the first batch, 1 of the second
    """
    # As `batch_samples` does, which makes batches in descending order of turns.
    return sum(sorted(turns, reverse=True)[::rows])


def repeat_to_length(prompts: Sequence[Sequence[int]], rows: int, length: int) -> list[list[int]]:
    """Return `rows` prompts, each repeated to `length` tokens; their content does not affect the time.

    [1, 2, 3] and [4], three rows of four tokens   ->   1 2 3 1, 4 4 4 4, 1 2 3 1
    """
    return [[*islice(cycle(prompt), max(1, length))] for prompt in islice(cycle(prompts), rows)]


def measure_speed(
    generate: Callable[[list[list[int]], int], object], prompts: Sequence[Sequence[int]], context: int
) -> GenerationSpeed:
    """Return the speed of generate(prompts, n), which generates n tokens after each prompt as one batch.

    `prompts` has one for each row of a real batch; the result is that of the largest affordable batch size.
    """
    rows = [list(prompt[-max(1, context - 1 - TRIAL_STEPS) :]) for prompt in prompts]
    size = 1
    while True:
        batch = rows[:size]
        generate(batch, 2)  # a warm-up, in which kernels are chosen and weights are read from disk
        first, whole = timed_call(generate, batch, 1), timed_call(generate, batch, 1 + TRIAL_STEPS)
        if size == len(rows) or TRIAL_GROWTH * (2 * first + whole) > MAX_TRIAL_SECONDS:
            length = max(map(len, batch))
            # On a tiny base model timing noise may exceed a step; then the average step is taken.
            step = (whole - first) / TRIAL_STEPS if whole > first else whole / (1 + TRIAL_STEPS)
            return GenerationSpeed(size, len(rows), length, first / (size * length), step)
        size = min(TRIAL_GROWTH * size, len(rows))


def timed_call(generate: Callable[[list[list[int]], int], object], batch: list[list[int]], tokens: int) -> float:
    start = perf_counter()
    generate(batch, tokens)
    return perf_counter() - start
