"""Work that an evaluation has left, counted in answers: questions, those asked again with clocks, those for the page.

The unit is one answer of one contestant to one turn, so a question of two turns counts twice, and one that an earlier
start has finished not at all. Warm-up is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from ctcdraft.corpus.types import Prompt
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.runner import EvaluationSetup
from ctcdraft.evaluation.stock_generate import StockGenerate
from ctcdraft.progress import Progress

T = TypeVar("T")


def remaining_progress(
    setup: EvaluationSetup, prompts: Mapping[int, Prompt], folder: OutputDir, profiled: int, traced: int
) -> Progress:
    """Return the count of the answers to come; its first line is due when all contestants have answered a question.

    Args:
        prompts: this shard's questions, the finished ones included.
        profiled: questions asked again with clocks inside the loop.
        traced: questions of which the first turn is decoded once more for the page.
    """
    done = {record.index for record in folder.records(max(prompts, default=-1) + 1)}
    todo = [prompt for index, prompt in prompts.items() if index not in done]
    again = [] if folder.profile_file.is_file() else sample_evenly([*prompts.values()], profiled)
    shown = [] if folder.trace_file.is_file() else sample_evenly([*prompts.values()], traced)
    contestants = len(setup.contestants)
    own_loop = contestants - sum(isinstance(one, StockGenerate) for one in setup.contestants.values())
    first = contestants * count_turns(todo[:1]) or own_loop * count_turns(again[:1]) or own_loop
    return Progress(
        contestants * count_turns(todo) + own_loop * (count_turns(again) + len(shown)), "answers", first=first
    )


def count_turns(prompts: Iterable[Prompt]) -> int:
    return sum(len(prompt.turns) for prompt in prompts)


def sample_evenly(questions: Sequence[T], count: int) -> list[T]:
    """Return `count` of them, drawn with a fixed seed by their places: the first ones are often all of one category."""
    return random.Random(0).sample(questions, min(count, len(questions)))
