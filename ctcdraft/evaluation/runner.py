"""Interleaved decoding: all contestants answer the same questions in turn, in one process.

Each turn is decoded by every contestant in an order that is shuffled anew, so that no contestant always runs on a
machine that another one has warmed up. Every answer is timed, counted and compared with autoregression's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from ctcdraft.corpus.chat_template import answer_text, chat_messages, fit_to_context, prompt_tokens
from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.loop import uses_fixed_shapes
from ctcdraft.distributed import ALONE, Distributed
from ctcdraft.drafters.base import remembers_responses
from ctcdraft.drafters.controls import find_oracle, give_oracle_text
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import EvaluationSetup, StockGenerate, generate_answer
from ctcdraft.evaluation.distribution_test import PITHistogram, draft_distributions, pit_histogram
from ctcdraft.evaluation.losslessness import LosslessnessChecker
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Answer, Divergence, Record, Turn
from ctcdraft.models.base_model import BaseLM
from ctcdraft.progress import Progress

T = TypeVar("T")


def run_questions(
    setup: EvaluationSetup,
    todo: Mapping[int, Prompt],
    folder: OutputDir,
    warm_up_tokens: int,
    progress: Progress,
    processes: Distributed = ALONE,
) -> None:
    """Answer questions, writing each record at once; without times where several processes share them."""
    if not todo:
        return
    refuse_remembering(setup, folder, processes)
    warm_up(setup, next(iter(todo.values())), warm_up_tokens)
    checker = LosslessnessChecker(setup)
    progress.begin()
    for index in deal_questions(todo, processes):
        record = run_question(setup, checker, index, todo[index], progress)
        folder.append(record if processes.world_size == 1 else record.without_times())
    if processes.world_size > 1:
        folder.collect()


def refuse_remembering(setup: EvaluationSetup, folder: OutputDir, processes: Distributed) -> None:
    """Raise InputError for drafters whose drafts depend on earlier responses if this process does not decode all."""
    names = [name for name, drafter in setup.contestants.items() if remembers_responses(drafter)]
    if names and (folder.shard.of > 1 or processes.world_size > 1 or folder.records(sys.maxsize)):
        raise InputError(
            f"{names[0]} has remember=true and drafts from the responses it has decoded, so one process must decode "
            "all questions without a stop; leave out remember=true, or give overwrite=true and no shard="
        )


def deal_questions(todo: Mapping[int, Prompt], processes: Distributed) -> Iterable[int]:
    """Return the indices of the questions that this process answers, with a progress bar in the first process."""
    disable = None if processes.is_main else True  # None: no bar unless stderr is a terminal
    return tqdm(processes.deal([*todo]), desc="questions", total=len(todo), disable=disable)


def unfinished(prompts: Mapping[int, Prompt], folder: OutputDir) -> dict[int, Prompt]:
    """Return the questions of which the folder holds no record."""
    records = folder.processes.from_main(lambda: [one.index for one in folder.records(max(prompts, default=-1) + 1)])
    return {index: prompt for index, prompt in prompts.items() if index not in set(records)}


def split_timed(
    todo: Mapping[int, Prompt], prompts: Mapping[int, Prompt], processes: Distributed, alone: int
) -> tuple[dict[int, Prompt], dict[int, Prompt]]:
    """Return the questions that all processes share, and those that the first one answers alone, with times."""
    timed = [] if processes.world_size == 1 else sample_evenly([*prompts], alone)
    shared = {index: prompt for index, prompt in todo.items() if index not in timed}
    return shared, {index: prompt for index, prompt in todo.items() if index in timed}


def warm_up(setup: EvaluationSetup, prompt: Prompt, tokens: int) -> None:
    """Decode a few tokens with every contestant: the first calls load kernels and fill caches."""
    max_new_tokens = min(max(tokens, 1), setup.settings.max_new_tokens)
    prompt_L, _ = turn_prompt(setup.base, prompt, [])
    for name, drafter in setup.contestants.items():
        settings = replace(setup.settings_of(name), max_new_tokens=max_new_tokens)
        generate_answer(setup.base, drafter, prompt_L, settings, setup.base.stop_token_ids, setup.seed)


def capture_steps(setup: EvaluationSetup, prompt_L: Tensor) -> None:
    """Capture or compile every step of fixed shapes that an answer to this prompt can need."""
    # When it is first needed would be while an answer is timed, and it takes as long as thousands of forward passes.
    base, shapes = setup.base, setup.base.static_shapes
    if shapes is None:
        return
    several = [(drafter, setup.settings_of(name)) for name, drafter in setup.contestants.items()]
    several = [(drafter, settings) for drafter, settings in several if uses_fixed_shapes(base, drafter, settings)]
    for _, settings in several:  # before any capture, which a cache that grows for a larger tree would drop
        shapes.reserve(base, settings, min(len(prompt_L) + settings.max_new_tokens, base.context_length))
    for drafter, settings in several:
        shapes.prepare(base, drafter, prompt_L, settings)


def run_question(
    setup: EvaluationSetup,
    checker: LosslessnessChecker,
    index: int,
    prompt: Prompt,
    progress: Progress | None = None,
) -> Record:
    """Return the record of one question: all its turns, answered by all contestants."""
    progress = progress or Progress(0, "answers")
    turns: list[Turn] = []
    unequal: dict[str, tuple[Divergence, ...]] = {name: () for name in setup.contestants if name != AUTOREGRESSIVE}
    histograms: dict[str, PITHistogram] = {}
    for number in range(len(prompt.turns)):
        # The history is autoregression's answers for all contestants, so that all do the same work.
        prompt_L, cut = turn_prompt(setup.base, prompt, [turn.answers[AUTOREGRESSIVE].text for turn in turns])
        seed = turn_seed(setup.seed, index, number)
        capture_steps(setup, prompt_L)
        answers: dict[str, Answer] = {}
        for name in shuffled_names(setup, seed):
            if answers:
                progress.advance()
            answers[name] = timed_answer(setup, name, prompt_L, seed)
        baseline = answers[AUTOREGRESSIVE]
        for name in unequal:
            ours = answers[name]
            divergence = checker.compare(name, ours.tokens, baseline.tokens, prompt_L, number, seed, ours.drawn)
            unequal[name] += (divergence,) if divergence else ()
        if setup.settings.temperature > 0:
            for name, histogram in all_pit_histograms(setup, prompt_L, seed, answers).items():
                histograms[name] = histograms.get(name, PITHistogram.empty()) + histogram
        turns.append(Turn(len(prompt_L), cut, answers))
        progress.advance()  # of the turn's last answer: comparing takes time, too
    return Record(index, prompt.id, prompt.category, prompt.reference, tuple(turns), unequal, histograms)


def all_pit_histograms(
    setup: EvaluationSetup, prompt_L: Tensor, seed: int, answers: Mapping[str, Answer]
) -> dict[str, PITHistogram]:
    """Return the PIT histogram of every contestant's answer under the base model's distribution."""

    def histogram(name: str) -> PITHistogram:
        base, settings, tokens = setup.base, setup.settings_of(name), answers[name].tokens
        drafts: dict[int, Tensor] = {}
        if answers[name].drawn:
            # Decoded once more, untimed: recording the distributions of the drafts would slow down the timed run.
            drafts = draft_distributions(base, setup.contestants[name], prompt_L, settings, seed, tokens)
        return pit_histogram(base, prompt_L, tokens, settings, seed, drafts)

    baseline = histogram(AUTOREGRESSIVE)
    # A forward pass is saved where the same tokens, without sampled drafts, have the same histogram.
    return {
        name: baseline if answer.tokens == answers[AUTOREGRESSIVE].tokens and not answer.drawn else histogram(name)
        for name, answer in answers.items()
    }


def turn_prompt(base: BaseLM, prompt: Prompt, responses: Sequence[str]) -> tuple[Tensor, int]:
    """Return the tokens of the next turn's prompt after these responses, and how many were cut to fit the context."""
    whole = prompt_tokens(base.tokenizer, chat_messages(prompt.turns, responses))
    tokens, cut = fit_to_context(whole, base.context_length, base.tokenizer.bos_token_id)
    return torch.tensor(tokens, device=base.device), cut


def shuffled_names(setup: EvaluationSetup, seed: int) -> list[str]:
    """Return the contestants in the order of this turn."""
    names = sorted(setup.contestants)
    random.Random(seed).shuffle(names)
    return names


def turn_seed(seed: int, index: int, turn: int) -> int:
    """Return the seed of a turn, which is the same for all contestants and in every shard."""
    return random.Random(f"{seed} {index} {turn}").getrandbits(48)


def prepare_oracle(setup: EvaluationSetup, name: str, prompt_L: Tensor, seed: int) -> None:
    """Give the oracle drafter autoregression's answer; untimed."""
    if find_oracle(setup.contestants[name]) is not None:
        answer = setup.answer(AUTOREGRESSIVE, prompt_L, seed).tokens
        give_oracle_text(setup.contestants[name], torch.cat([prompt_L, prompt_L.new_tensor(answer)]))


def timed_answer(setup: EvaluationSetup, name: str, prompt_L: Tensor, seed: int) -> Answer:
    """Decode one answer with one contestant; on CUDA also measure its peak memory, in bytes."""
    device = setup.base.device
    prepare_oracle(setup, name, prompt_L, seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)  # kernels queued by the contestant before
    result = setup.answer(name, prompt_L, seed)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    text = answer_text(setup.base.tokenizer, result.tokens, setup.base.stop_token_ids)
    seconds = result.seconds_prefill, result.seconds_decode
    return Answer(result.tokens, text, result.passes, result.ended, *seconds, peak, result.drawn)


def remaining_progress(
    setup: EvaluationSetup,
    prompts: Mapping[int, Prompt],
    todo: Sequence[Prompt],
    folder: OutputDir,
    profiled: int,
    traced: int,
) -> Progress:
    """Return the progress over the answers to come, each of one contestant to one turn; warm-up is not counted.

    Args:
        todo: the questions to be answered, about as many as the first of several processes will answer.
        profiled: number of questions decoded again with a stopwatch.
        traced: number of questions whose first turn is decoded again for report.html.
    """

    def turns(several: Iterable[Prompt]) -> int:
        return sum(len(prompt.turns) for prompt in several)

    to_profile = [] if folder.profile_file.is_file() else sample_evenly([*prompts.values()], profiled)
    to_trace = [] if folder.trace_file.is_file() else sample_evenly([*prompts.values()], traced)
    contestants = len(setup.contestants)
    own_loop = contestants - sum(isinstance(one, StockGenerate) for one in setup.contestants.values())
    # The first line is due when all contestants have answered a question.
    first = contestants * turns(todo[:1]) or own_loop * turns(to_profile[:1]) or own_loop
    total = contestants * turns(todo) + own_loop * (turns(to_profile) + len(to_trace))
    return Progress(total, "answers", first=first, write=None if folder.processes.is_main else lambda line: None)


def sample_evenly(questions: Sequence[T], count: int) -> list[T]:
    """Return a random sample with a fixed seed; the first questions are often all of one category."""
    return random.Random(0).sample(questions, min(count, len(questions)))
