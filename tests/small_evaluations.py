"""Evaluations of a second or two: a random base model, byte-level prompts, contestants with a known bug."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tiny_models import random_base

from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.distributed import ALONE, Shard
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.evaluation.benchmarks import Benchmark
from ctcdraft.evaluation.contestants import Contestant, EvaluationSetup
from ctcdraft.evaluation.evaluation import Evaluation
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.replay.evaluation import ReplayEvaluation
from ctcdraft.evaluation.tracer import TraceSettings
from ctcdraft.models.base_model import BaseLM
from ctcdraft.report import markdown
from ctcdraft.report.html import files

SETTINGS = DecodingSettings(
    max_new_tokens=12, nodes=8, temperature=0.0, top_k=0, top_p=1.0, verify=match, lossless=True
)
NO_TRACE = TraceSettings(questions=0, tokens=8, tokens_per_frame=3)
PROMPTS = (
    Prompt("a", "sums", ("1 + 1 = 2, 1 + 1 =",), "2"),
    Prompt("b", "talk", ("hello hello", "and again hello"), None),
    Prompt("c", "sums", ("2 + 2 =",), "4"),
    Prompt("d", "talk", ("x" * 300,), None),  # does not fit into 256 tokens
)


@contextmanager
def interrupt_at(index: int) -> Iterator[None]:
    """Interrupt the evaluation in this context before it writes the record of this question."""
    append = OutputDir.append

    def interrupted(folder, record):
        if record.index == index:
            raise KeyboardInterrupt
        append(folder, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputDir, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


class Corrupt:
    """A drafter with a bug: after every third token the base model reads another token than the committed one."""

    def __init__(self, only: torch.dtype | None = None) -> None:
        self.only = only

    def draft(self, context: Context, memory: None, rng: torch.Generator) -> tuple[TokenTree, None]:
        root = context.root
        if len(context.tokens_L) % 3 == 0 and self.only in (None, context.new_states_KD.dtype):
            root = (root + 1) % 200
        return TokenTree.only_root(root), None


def make_setup(base: BaseLM | None = None, seed: int = 0, corrupt: Corrupt | None = None, **changes) -> EvaluationSetup:
    base = base or random_base()
    contestants = {"autoregressive": Autoregressive(base), "prompt_lookup": PromptLookup(base, 3, 5)}
    if corrupt is not None:
        contestants["corrupt"] = corrupt
    return EvaluationSetup(base, contestants, replace(SETTINGS, **changes), seed)


def evaluate_to(
    path, evaluation: Evaluation, overwrite=False, *, warm_up_tokens=4, profiled=1, trace=NO_TRACE, processes=ALONE,
    alone=0,
):  # fmt: skip
    """Run an evaluation and write its report as evaluate.py does; return the content of report.json."""
    folder = OutputDir(path, evaluation.shard, processes)
    content = evaluation.run(folder, overwrite, warm_up_tokens, profiled, trace, alone)
    if content is None:
        return None
    markdown.write(folder, **content)
    files.write_page(path, content["rows"], content["environment"])
    return content


def replay_to(path, evaluation: Evaluation, replay: ReplayEvaluation, overwrite=False, processes=ALONE):
    """Run an evaluation by replay and write its report as evaluate.py does; return the content of report.json."""
    folder = OutputDir(path, evaluation.shard, processes)
    content = replay.run(evaluation, folder, overwrite)
    if content is None:
        return None
    markdown.write(folder, **content)
    return content


def make_evaluation(setup: EvaluationSetup, prompts=PROMPTS, shard: Shard | None = None) -> Evaluation:
    contestants = {name: Contestant(drafter, name, 0, {}) for name, drafter in setup.contestants.items()}
    return Evaluation(setup, contestants, Benchmark("made_up", tuple(prompts), "hash"), "greedy", shard or Shard(1, 1))
