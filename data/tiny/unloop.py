"""A second training stage against repetition: sequence-level unlikelihood (Welleck et al. 2020).

The base answers prompts greedily. A token that completes a repeated n-gram of its answer is made less probable, and the
end token more probable where a repeated sentence begins. Half of every step is language modelling of the packed rows,
which keeps what was trained before.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import training
from torch import Tensor, nn

ANSWERS, NEW_TOKENS, PROMPT_TOKENS = 32, 160, 256
GRAM = 5  # tokens: shorter repetitions are ordinary language, and arithmetic
RATE, WARM_UP = 1e-4, 8
CIRCLE_WEIGHT = 0.5
END_WEIGHT = 0.01  # with a hundred times that every answer ends after eight tokens within five steps
PLAIN_ROWS = 10


def repeats(answer: list[int]) -> list[int]:
    """Return the indices of tokens that complete a GRAM which occurred before in the same answer.

    With GRAM = 2:   a b c a b d   ->   [4]
    """
    seen: set[tuple[int, ...]] = set()
    found = []
    for last in range(GRAM - 1, len(answer)):
        gram = tuple(answer[last - GRAM + 1 : last + 1])
        if gram in seen:
            found.append(last)
        seen.add(gram)
    return found


def first_restart(answer: list[int], found: list[int], closers: set[int]) -> int | None:
    """Return where the first repeated GRAM begins, if a sentence had ended just before."""
    start = found[0] - GRAM + 1
    return start if start > 0 and answer[start - 1] in closers else None


@torch.no_grad()
def greedy(model: nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """Return greedy answers of up to NEW_TOKENS, with the end token."""
    width = max(map(len, prompts))
    tokens_BL = torch.tensor([[training.PAD] * (width - len(ids)) + ids for ids in prompts])
    mask_BL = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    output_BL = model.generate(input_ids=tokens_BL, attention_mask=mask_BL, max_new_tokens=NEW_TOKENS, do_sample=False)
    made = output_BL[:, width:].tolist()
    return [ids[: ids.index(training.END) + 1] if training.END in ids else ids for ids in made]


def circle_loss(model: nn.Module, prompts: list[list[int]], answers: list[list[int]], closers: set[int]) -> Tensor:
    """Return the mean of -log(1 - p) over repeating tokens, plus END_WEIGHT times the mean of -log p over end tokens
    where a repeated sentence begins."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    width = max(map(len, rows))
    tokens_BL = torch.tensor([row + [training.PAD] * (width - len(row)) for row in rows])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden_BLD = model.model(input_ids=tokens_BL, use_cache=False).last_hidden_state
    places, words, ends = [], [], []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        found = repeats(answer)
        places += [(row, len(prompt) + index - 1) for index in found]
        words += [answer[index] for index in found]
        if (restart := first_restart(answer, found, closers)) is not None:
            ends.append((row, len(prompt) + restart - 1))
    asked = torch.tensor(places + ends)
    logits_XV = model.lm_head(hidden_BLD[asked[:, 0], asked[:, 1]].float())
    log_p_X = logits_XV[: len(places)].log_softmax(-1).gather(-1, torch.tensor(words)[:, None])[:, 0]
    loss = -torch.log1p(-log_p_X.exp().clamp(max=1 - 1e-4)).mean()
    if ends:
        loss = loss + END_WEIGHT * F.cross_entropy(logits_XV[len(places) :], torch.full((len(ends),), training.END))
    return loss


def prompt_stream(
    sources: dict[str, list[list[str]]], factors: dict[str, float], encode: Callable, render: Callable
) -> Iterator[list[int]]:
    """Yield contexts that end with one of the first three user turns; shares: of the sources."""
    rng = random.Random(0)
    while True:
        turns = rng.choice(sources[rng.choices(list(factors), list(factors.values()))[0]])
        last = rng.choice(range(0, min(len(turns), 5), 2))
        ids = encode([render(turns[: last + 1], answer_next=True)])[0]
        if len(ids) <= PROMPT_TOKENS:
            yield ids


def unloop(
    model: nn.Module, contexts: Iterator[list[int]], rows: np.ndarray, closers: set[int], steps: int, log: Path
) -> None:
    """Train the model in place; a line of `log` per step: share of answers with a repeated GRAM, ended, losses."""
    stepper = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    order = np.random.default_rng(0).permutation(len(rows))
    for step in range(steps):
        start = time.perf_counter()
        for group in stepper.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP, (steps - step) / (0.3 * steps))
        prompts = [next(contexts) for _ in range(ANSWERS)]
        answers = greedy(model, prompts)
        circling = [index for index, answer in enumerate(answers) if repeats(answer)]
        picked = rows[order[np.arange(step * PLAIN_ROWS, (step + 1) * PLAIN_ROWS) % len(rows)]]
        plain = training.next_word_loss(model, torch.from_numpy(picked.astype(np.int64)))
        plain.backward()
        circles = torch.zeros(())
        if circling:
            circles = circle_loss(model, [prompts[i] for i in circling], [answers[i] for i in circling], closers)
            (CIRCLE_WEIGHT * circles).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad(set_to_none=True)
        line = {
            "step": step,
            "circling": len(circling) / ANSWERS,
            "ended": sum(answer[-1] == training.END for answer in answers) / ANSWERS,
            "words": sum(map(len, answers)) / ANSWERS,
            "plain": float(plain.detach()),
            "circles": float(circles.detach()),
            "seconds": time.perf_counter() - start,
        }
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
