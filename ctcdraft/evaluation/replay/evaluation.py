"""Evaluation by replay (measure=replay): acceptance of every tree size from one computation, without times.

Replay assumes that the loop is lossless. So the loop also decodes some questions at every size: these are the
losslessness check of each row, and the report counts how many took exactly the replayed decoding steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import Any

from ctcdraft.corpus.chat_template import answer_text
from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.settings import DecodeStep
from ctcdraft.errors import InputError, check_int
from ctcdraft.evaluation import metrics
from ctcdraft.evaluation.bootstrap import paired_differences
from ctcdraft.evaluation.contestants import EvaluationSetup, StockGenerate
from ctcdraft.evaluation.evaluation import Evaluation
from ctcdraft.evaluation.losslessness import LosslessnessChecker, losslessness_metrics
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Answer, Divergence, Record, Turn
from ctcdraft.evaluation.replay.drafts import record_base_answer, refuse_unreplayable, replay_drafts
from ctcdraft.evaluation.runner import deal_questions, turn_prompt, turn_seed, unfinished
from ctcdraft.progress import Progress

REPLAYED, DECODED = "replayed", "looped"


@dataclass(frozen=True)
class ReplayEvaluation:
    """Tree sizes to replay, ascending, the root counted; the first `checked` questions are also decoded by the loop."""

    nodes: Sequence[int]
    checked: int

    def __post_init__(self) -> None:
        sizes = [check_int(nodes, "measure.nodes", least=2) for nodes in self.nodes]
        if not sizes or sorted(set(sizes)) != sizes:
            raise InputError(f"measure.nodes must be ascending sizes >= 2, each once, got {sizes}")
        check_int(self.checked, "measure.checked")  # at least one, for the losslessness check

    def run(self, evaluation: Evaluation, folder: OutputDir, overwrite: bool) -> dict[str, Any] | None:
        """Replay the questions that the folder does not hold; return the content of report.json for all it holds.

        Several processes share the questions; all but the first return None.
        """
        setup, questions = evaluation.setup, len(evaluation.benchmark.prompts)
        refuse_unreplayable(setup.settings)
        for name, drafter in setup.contestants.items():
            if isinstance(drafter, StockGenerate):
                raise InputError(
                    f"contestant {name} does not decode with our loop and cannot be replayed; leave it out, or leave "
                    "out measure=replay"
                )
        settings = {**evaluation.settings(0), "replay": vars(self) | {"nodes": list(self.nodes)}}
        folder.open(settings, questions, overwrite)
        todo = unfinished(evaluation.prompts, folder)
        processes = folder.processes
        counts = [self.answers(setup, index, prompt) for index, prompt in todo.items()]
        counts = counts[processes.rank :: processes.world_size]
        write = None if processes.is_main else lambda line: None
        progress = Progress(sum(counts), "answers", first=sum(counts[:1]), write=write)
        for index in deal_questions(todo, processes):
            folder.append(self.run_question(setup, index, todo[index], progress))
        folder.collect()
        if not processes.is_main:
            return None
        return self.report(evaluation, folder.records(questions), len(todo))

    def answers(self, setup: EvaluationSetup, index: int, prompt: Prompt) -> int:
        """Return how many answers a question takes: the base model's, a replay per drafter, and those of the loop."""
        each = 1 + (len(self.nodes) if index < self.checked else 0)
        return len(prompt.turns) * (1 + each * len(drafter_names(setup.contestants)))

    def run_question(self, setup: EvaluationSetup, index: int, prompt: Prompt, progress: Progress) -> Record:
        """Decode each turn of a question once with the base model, and replay every drafter on it."""
        at_size = {n: replace(setup, settings=replace(setup.settings, nodes=n), nodes={}) for n in self.nodes}
        turns: list[Turn] = []
        divergences: dict[str, tuple[Divergence, ...]] = {}
        for number in range(len(prompt.turns)):
            prompt_L, cut = turn_prompt(setup.base, prompt, [turn.answers[AUTOREGRESSIVE].text for turn in turns])
            seed = turn_seed(setup.seed, index, number)
            truth = record_base_answer(setup.base, prompt_L, setup.settings, seed)
            [one_per_token] = replay_drafts(setup.contestants[AUTOREGRESSIVE], truth, [1], 0).values()
            text = answer_text(setup.base.tokenizer, truth.tokens, setup.base.stop_token_ids)
            answers = {AUTOREGRESSIVE: untimed_answer(one_per_token, truth.ended, truth.tokens, text)}
            progress.advance()
            for name in drafter_names(setup.contestants):
                replayed = replay_drafts(setup.contestants[name], truth, self.nodes, seed)
                progress.advance()
                for nodes, passes in replayed.items():
                    answers[answer_key(name, nodes, REPLAYED)] = untimed_answer(passes, truth.ended)
                    if index >= self.checked:
                        continue
                    looped = at_size[nodes].answer(name, prompt_L, seed)
                    if looped.drawn:
                        raise InputError(
                            f"contestant {name} samples its draft tokens, so its steps differ from run to run and "
                            "cannot be replayed; build its trees in another way (RUN@TREE), or leave out measure=replay"
                        )
                    progress.advance()
                    key = answer_key(name, nodes, DECODED)
                    answers[key] = untimed_answer(looped.passes, looped.ended, looped.tokens)
                    checker, pair = LosslessnessChecker(at_size[nodes]), (looped.tokens, truth.tokens)
                    divergence = checker.compare(name, *pair, prompt_L, number, seed, looped.drawn)
                    divergences[key] = divergences.get(key, ()) + ((divergence,) if divergence else ())
            turns.append(Turn(len(prompt_L), cut, answers))
        return Record(index, prompt.id, prompt.category, prompt.reference, tuple(turns), divergences)

    def report(self, evaluation: Evaluation, records: list[Record], answered: int) -> dict[str, Any]:
        """Return the content of report.json: rows and differences by tree size."""
        rows: list[dict[str, Any]] = []
        differences: list[dict[str, Any]] = []
        for name in evaluation.contestants:
            sizes = (1,) if name == AUTOREGRESSIVE else self.nodes
            rows += [self.row(evaluation, name, nodes, records) for nodes in sizes]
        for nodes in self.nodes:
            answers = {
                name: [record.answers(name) for record in records_at_size(records, name, nodes)]
                for name in evaluation.contestants
            }
            at_size = paired_differences(evaluation.pairs, answers, evaluation.setup.seed)
            differences += [{"nodes": nodes, **difference} for difference in at_size]
        replay = {
            "nodes": list(self.nodes),
            "checked": sum(record.index < self.checked for record in records),
            **{part: sum(row["replay"][part] for row in rows) for part in ("answers", "alike")},
        }
        circumstances = {**evaluation.circumstances(records, None, answered), "replay": replay}
        return {"rows": rows, "environment": circumstances, "differences": differences}

    def row(self, evaluation: Evaluation, name: str, nodes: int, records: list[Record]) -> dict[str, Any]:
        """Return a report row; its losslessness check covers the questions that the loop decoded as well."""
        at_size = records_at_size(records, name, nodes)
        labels = {**evaluation.labels(name), "nodes": nodes}
        row = metrics.report_row(name, at_size, None, labels, evaluation.setup.seed)
        checked = [record for record in records if record.index < self.checked]
        lossless = losslessness_metrics(answer_key(name, nodes, DECODED), checked)
        row["lossless"] = lossless | {"owes": evaluation.guarantee(name, [])}
        for part in row["categories"].values():
            part["equal"] = None  # a replayed text is the base model's own: nothing was compared
        return row | {"replay": count_identical(name, nodes, checked)}


def drafter_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if name != AUTOREGRESSIVE]


def answer_key(name: str, nodes: int, how: str) -> str:
    """Return the key of an answer in a record: `ctc, 16 nodes, replayed`."""
    return f"{name}, {nodes} nodes, {how}"


def untimed_answer(passes: tuple[DecodeStep, ...], ended: bool, tokens: tuple[int, ...] = (), text: str = "") -> Answer:
    return Answer(tokens, text, passes, ended, 0.0, 0.0, None)


def records_at_size(records: Sequence[Record], name: str, nodes: int) -> list[Record]:
    """Return the records as if the loop had measured this contestant at this size; the text is the base model's."""

    def turn_at_size(turn: Turn) -> Turn:
        baseline = turn.answers[AUTOREGRESSIVE]
        passes = turn.answers[answer_key(name, nodes, REPLAYED)].passes if name != AUTOREGRESSIVE else baseline.passes
        return replace(turn, answers={AUTOREGRESSIVE: baseline, name: replace(baseline, passes=passes)})

    return [replace(record, turns=tuple(map(turn_at_size, record.turns))) for record in records]


def count_identical(name: str, nodes: int, checked: Sequence[Record]) -> dict[str, int]:
    """Return the number of answers that the loop decoded as well, and of those that took the replayed steps."""
    turns = [turn.answers for record in checked for turn in record.turns] if name != AUTOREGRESSIVE else []
    replayed, decoded = (
        [answers[answer_key(name, nodes, how)].passes for answers in turns] for how in (REPLAYED, DECODED)
    )
    return {"answers": len(turns), "alike": sum(map(eq, replayed, decoded))}
