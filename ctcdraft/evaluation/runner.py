"""Interleaved decoding: all contestants answer the same questions in turn, in one process.

Each turn is decoded by every contestant in an order that is shuffled anew, so that no contestant always runs on a
machine that another one has warmed up. Every answer is timed, counted and compared with autoregression's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from ctcdraft.corpus.chat_template import answer_text, chat_messages, fit_to_context, prompt_tokens
from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.loop import cache_rows_needed
from ctcdraft.decoding.static_shapes import padded_sizes_up_to
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.controls import Oracle, give_oracle_text
from ctcdraft.evaluation.distribution_test import PITHistogram, draft_distributions, pit_histogram
from ctcdraft.evaluation.losslessness import LosslessnessChecker
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Answer, Divergence, Record, Turn
from ctcdraft.evaluation.setup import EvaluationSetup
from ctcdraft.evaluation.stock_generate import StockGenerate, generate_answer
from ctcdraft.models.base_model import BaseLM
from ctcdraft.progress import Progress


def run_questions(
    setup: EvaluationSetup, prompts: Mapping[int, Prompt], folder: OutputDir, warm_up_tokens: int, progress: Progress
) -> int:
    """Answer the questions the folder does not hold, writing each record at once; return how many they were."""
    done = {record.index for record in folder.records(max(prompts, default=-1) + 1)}
    todo = {index: prompt for index, prompt in prompts.items() if index not in done}
    if not todo:
        return 0
    warm_up(setup, next(iter(todo.values())), warm_up_tokens)
    checker = LosslessnessChecker(setup)
    warmup = ShapeWarmup(setup)
    progress.begin()
    for index, prompt in tqdm(todo.items(), desc="questions", disable=None):
        folder.append(run_question(setup, checker, index, prompt, warmup, progress))
    return len(todo)


def warm_up(setup: EvaluationSetup, prompt: Prompt, tokens: int) -> None:
    """Decode a few tokens with every contestant: the first calls load kernels and fill caches."""
    max_new_tokens = min(max(tokens, 1), setup.settings.max_new_tokens)
    prompt_L, _ = turn_prompt(setup.base, prompt, [])
    for name, drafter in setup.contestants.items():
        settings = replace(setup.settings_of(name), max_new_tokens=max_new_tokens)
        generate_answer(setup.base, drafter, prompt_L, settings, setup.base.stop_token_ids, setup.seed)


class ShapeWarmup:
    """The tree shapes that the base model has read, where shapes are static.

    A static shape is captured or compiled when it is first read, which takes as long as up to thousands of forward
    passes. So every shape that a timed answer can need is read before the clock starts.
    """

    def __init__(self, setup: EvaluationSetup) -> None:
        self.setup = setup
        self.shapes: set[tuple[int, int]] = set()

    def capture_shapes(self, prompt_L: Tensor) -> None:
        """Read a tree of every padded size that an answer to this prompt can need and that was not read before."""
        base = self.setup.base
        for name in self.setup.contestants if base.static_shapes is not None else ():
            settings = self.setup.settings_of(name)
            cache = base.new_cache(cache_rows_needed(prompt_L, settings))
            base.read(prompt_L[:1], cache)
            for size in padded_sizes_up_to(settings.nodes):
                if (size, cache.capacity) not in self.shapes:
                    self.shapes.add((size, cache.capacity))
                    base.read_tree(TokenTree.from_lists(prompt_L[0], [0] * (size - 1), [-1] * (size - 1)), cache)
                    cache.crop(1)
            del cache  # captured graphs share one buffer of cache rows; free it for the next text


def run_question(
    setup: EvaluationSetup,
    checker: LosslessnessChecker,
    index: int,
    prompt: Prompt,
    warmup: ShapeWarmup,
    progress: Progress | None = None,
) -> Record:
    """Return the record of one question: all its turns, answered by all contestants.

    The history of every turn is autoregression's earlier answers, for all contestants, so that all do the same work.
    """
    progress = progress or Progress(0, "answers")
    turns: list[Turn] = []
    divergences_by_name: dict[str, list[Divergence]] = {
        name: [] for name in setup.contestants if name != AUTOREGRESSIVE
    }
    histograms: dict[str, PITHistogram] = {}
    for number in range(len(prompt.turns)):
        prompt_L, cut = turn_prompt(setup.base, prompt, [turn.answers[AUTOREGRESSIVE].text for turn in turns])
        seed = turn_seed(setup.seed, index, number)
        warmup.capture_shapes(prompt_L)
        answers: dict[str, Answer] = {}
        for name in shuffled_names(setup, seed):
            if answers:
                progress.advance()
            answers[name] = timed_answer(setup, name, prompt_L, seed)
        for name, unequal in divergences_by_name.items():
            pair = answers[name].tokens, answers[AUTOREGRESSIVE].tokens
            divergence = checker.compare(name, *pair, prompt_L, number, seed, answers[name].drawn)
            unequal += [divergence] if divergence else []
        if setup.settings.temperature > 0:
            for name, histogram in all_pit_histograms(setup, prompt_L, seed, answers):
                histograms[name] = histograms.get(name, PITHistogram.empty()) + histogram
        turns.append(Turn(len(prompt_L), cut, answers))
        progress.advance()  # of the turn's last answer: comparing takes time, too
    divergences = {name: tuple(unequal) for name, unequal in divergences_by_name.items()}
    return Record(index, prompt.id, prompt.category, prompt.reference, tuple(turns), divergences, histograms)


def all_pit_histograms(
    setup: EvaluationSetup, prompt_L: Tensor, seed: int, answers: Mapping[str, Answer]
) -> Iterator[tuple[str, PITHistogram]]:
    """Yield the PIT histogram of every contestant's answer.

    A contestant whose tokens equal the baseline's, and whose drafts were not sampled, reuses the baseline's histogram.
    """
    baseline = answer_pit_histogram(setup, AUTOREGRESSIVE, prompt_L, seed, answers[AUTOREGRESSIVE])
    for name, answer in answers.items():
        same_tokens = answer.tokens == answers[AUTOREGRESSIVE].tokens and not answer.drawn
        yield name, baseline if same_tokens else answer_pit_histogram(setup, name, prompt_L, seed, answer)


def answer_pit_histogram(
    setup: EvaluationSetup, name: str, prompt_L: Tensor, seed: int, answer: Answer
) -> PITHistogram:
    """Return the PIT histogram of one answer under the base model's distribution.

    An answer with sampled drafts is decoded once more, untimed, to record the distributions they were sampled from:
    recording them in the timed run would slow it down.
    """
    base, settings = setup.base, setup.settings_of(name)
    drafts: dict[int, Tensor] = {}
    if answer.drawn:
        drafts = draft_distributions(base, setup.contestants[name], prompt_L, settings, seed, answer.tokens)
    return pit_histogram(base, prompt_L, answer.tokens, settings, seed, drafts)


def turn_prompt(base: BaseLM, prompt: Prompt, responses: Sequence[str]) -> tuple[Tensor, int]:
    """Return the tokens of the next turn's prompt after these responses, and how many were cut to fit the context."""
    whole = prompt_tokens(base.tokenizer, chat_messages(prompt.turns, responses))
    tokens, cut = fit_to_context(whole, base.context_length, base.tokenizer.bos_token_id)
    return torch.tensor(tokens, device=base.device), cut


def shuffled_names(setup: EvaluationSetup, seed: int) -> Iterable[str]:
    """Return the contestants in the order of this turn."""
    names = sorted(setup.contestants)
    random.Random(seed).shuffle(names)
    return names


def turn_seed(seed: int, index: int, turn: int) -> int:
    """Return the seed of a turn, which is the same for all contestants and in every shard."""
    return random.Random(f"{seed} {index} {turn}").getrandbits(48)


def prepare_oracle(setup: EvaluationSetup, name: str, prompt_L: Tensor, seed: int) -> None:
    """Give the oracle drafter autoregression's answer; untimed."""
    if isinstance(setup.contestants[name], Oracle):
        answer = setup.answer(AUTOREGRESSIVE, prompt_L, seed).tokens
        give_oracle_text(setup.contestants[name], torch.cat([prompt_L, prompt_L.new_tensor(answer)]))


def timed_answer(setup: EvaluationSetup, name: str, prompt_L: Tensor, seed: int) -> Answer:
    """Decode one answer with one contestant; on CUDA also measure its peak memory, in bytes."""
    device = setup.base.device
    prepare_oracle(setup, name, prompt_L, seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)  # kernels queued by the contestant before
    generation = setup.answer(name, prompt_L, seed)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    text = answer_text(setup.base.tokenizer, generation.tokens, setup.base.stop_token_ids)
    return Answer(
        generation.tokens,
        text,
        generation.passes,
        generation.ended,
        generation.seconds_prefill,
        generation.seconds_decode,
        peak,
        generation.drawn,
    )


T = TypeVar("T")


def remaining_progress(
    setup: EvaluationSetup, prompts: Mapping[int, Prompt], folder: OutputDir, profiled: int, traced: int
) -> Progress:
    """Return the progress over the answers to come: questions, profiled answers and traced answers.

    The unit is one answer of one contestant to one turn. The first line is due when all contestants have answered a
    question; warm-up is not counted.

    Args:
        prompts: the questions of this shard, the finished ones included.
        profiled: number of questions decoded again with a stopwatch.
        traced: number of questions whose first turn is decoded again for report.html.
    """
    done = {record.index for record in folder.records(max(prompts, default=-1) + 1)}
    todo = [prompt for index, prompt in prompts.items() if index not in done]
    to_profile = [] if folder.profile_file.is_file() else sample_evenly([*prompts.values()], profiled)
    to_trace = [] if folder.trace_file.is_file() else sample_evenly([*prompts.values()], traced)
    contestants = len(setup.contestants)
    own_loop = contestants - sum(isinstance(one, StockGenerate) for one in setup.contestants.values())
    first = contestants * count_turns(todo[:1]) or own_loop * count_turns(to_profile[:1]) or own_loop
    return Progress(
        contestants * count_turns(todo) + own_loop * (count_turns(to_profile) + len(to_trace)), "answers", first=first
    )


def count_turns(prompts: Iterable[Prompt]) -> int:
    return sum(len(prompt.turns) for prompt in prompts)


def sample_evenly(questions: Sequence[T], count: int) -> list[T]:
    """Return a random sample with a fixed seed; the first questions are often all of one category."""
    return random.Random(0).sample(questions, min(count, len(questions)))
