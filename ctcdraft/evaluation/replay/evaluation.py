"""Evaluation by replay (measure=replay): acceptance of every tree size from one computation, without times.

Replay assumes that the loop is lossless. So the loop also decodes some questions at every size: these are the
losslessness check of each row, and the report counts how many took exactly the replayed decoding steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from ctcdraft.corpus.chat_template import answer_text
from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import GenerationResult
from ctcdraft.errors import InputError, check_int
from ctcdraft.evaluation import metrics
from ctcdraft.evaluation.bootstrap import paired_differences
from ctcdraft.evaluation.evaluation import Evaluation
from ctcdraft.evaluation.losslessness import LosslessnessChecker, losslessness_metrics
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Answer, Divergence, Record, Turn
from ctcdraft.evaluation.replay.drafts import BaseAnswer, record_base_answer, refuse_unreplayable, replay_drafts
from ctcdraft.evaluation.runner import turn_prompt, turn_seed
from ctcdraft.evaluation.setup import EvaluationSetup
from ctcdraft.evaluation.stock_generate import StockGenerate
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

    def run(self, evaluation: Evaluation, folder: OutputDir, overwrite: bool) -> dict[str, Any]:
        """Replay the questions that the folder does not hold; return the content of report.json for all it holds."""
        refuse_unreplayable(evaluation.setup.settings)
        stock = [name for name, each in evaluation.setup.contestants.items() if isinstance(each, StockGenerate)]
        if stock:
            raise InputError(
                f"contestant {stock[0]} does not decode with our loop and cannot be replayed; leave it out, or leave "
                "out measure=replay"
            )
        settings = {**evaluation.settings(0), "replay": vars(self) | {"nodes": list(self.nodes)}}
        folder.open(settings, len(evaluation.benchmark.prompts), overwrite)
        done = {record.index for record in folder.records(len(evaluation.benchmark.prompts))}
        todo = {index: prompt for index, prompt in evaluation.prompts.items() if index not in done}
        counts = [self.answers(evaluation.setup, index, prompt) for index, prompt in todo.items()]
        progress = Progress(sum(counts), "answers", first=sum(counts[:1]))
        for index, prompt in tqdm(todo.items(), desc="questions", disable=None):
            folder.append(self.run_question(evaluation.setup, index, prompt, progress))
        return self.report(evaluation, folder.records(len(evaluation.benchmark.prompts)), len(todo))

    def answers(self, setup: EvaluationSetup, index: int, prompt: Prompt) -> int:
        """Return how many answers a question takes: the base model's, a replay per drafter, and those of the loop."""
        each = 1 + (len(self.nodes) if index < self.checked else 0)
        return len(prompt.turns) * (1 + each * len(drafter_names(setup.contestants)))

    def run_question(self, setup: EvaluationSetup, index: int, prompt: Prompt, progress: Progress) -> Record:
        """Decode each turn of a question once with the base model, and replay every drafter on it."""
        checkers = {
            nodes: LosslessnessChecker(replace(setup, settings=replace(setup.settings, nodes=nodes), nodes={}))
            for nodes in self.nodes
        }
        turns: list[Turn] = []
        divergences: dict[str, list[Divergence]] = {}
        for number in range(len(prompt.turns)):
            prompt_L, cut = turn_prompt(setup.base, prompt, [turn.answers[AUTOREGRESSIVE].text for turn in turns])
            seed = turn_seed(setup.seed, index, number)
            base_answer = record_base_answer(setup.base, prompt_L, setup.settings, seed)
            answers = {AUTOREGRESSIVE: baseline_answer(setup, base_answer)}
            progress.advance()
            for name in drafter_names(setup.contestants):
                replayed = replay_drafts(setup.contestants[name], base_answer, self.nodes, seed)
                progress.advance()
                for nodes, passes in replayed.items():
                    answers[answer_key(name, nodes, REPLAYED)] = Answer(
                        (), "", passes, base_answer.ended, 0.0, 0.0, None
                    )
                    if index >= self.checked:
                        continue
                    looped = self.decode_with_loop(setup, name, nodes, prompt_L, seed)
                    progress.advance()
                    answers[answer_key(name, nodes, DECODED)] = untimed_answer(looped)
                    pair = looped.tokens, base_answer.tokens
                    divergence = checkers[nodes].compare(name, *pair, prompt_L, number, seed, looped.drawn)
                    unequal = divergences.setdefault(answer_key(name, nodes, DECODED), [])
                    unequal += [divergence] if divergence else []
            turns.append(Turn(len(prompt_L), cut, answers))
        by_answer = {key: tuple(unequal) for key, unequal in divergences.items()}
        return Record(index, prompt.id, prompt.category, prompt.reference, tuple(turns), by_answer)

    def decode_with_loop(
        self, setup: EvaluationSetup, name: str, nodes: int, prompt_L: Any, seed: int
    ) -> GenerationResult:
        base, settings = setup.base, replace(setup.settings, nodes=nodes)
        generation = generate(base, setup.contestants[name], prompt_L, settings, base.stop_token_ids, seed)
        if generation.drawn:
            raise InputError(
                f"contestant {name} samples its draft tokens, so its steps differ from run to run and cannot be "
                "replayed; build its trees in another way (RUN@TREE), or leave out measure=replay"
            )
        return generation

    def report(self, evaluation: Evaluation, records: list[Record], answered: int) -> dict[str, Any]:
        setup, rows, difference_rows = evaluation.setup, [], []
        for name in evaluation.contestants:
            sizes = (1,) if name == AUTOREGRESSIVE else self.nodes
            rows += [self.row(evaluation, name, nodes, records) for nodes in sizes]
        for nodes in self.nodes:
            answers = {
                name: metrics.paired_answers(name, records_at_size(records, name, nodes))[0]
                for name in evaluation.contestants
            }
            differences = paired_differences(evaluation.pairs, answers.__getitem__, setup.seed)
            difference_rows += [{"nodes": nodes, **difference} for difference in differences]
        circumstances = {
            **evaluation.circumstances(records, None, answered),
            "replay": {
                "nodes": list(self.nodes),
                "checked": sum(record.index < self.checked for record in records),
                **{part: sum(row["replay"][part] for row in rows) for part in ("answers", "alike")},
            },
        }
        return {"rows": rows, "environment": circumstances, "differences": difference_rows}

    def row(self, evaluation: Evaluation, name: str, nodes: int, records: list[Record]) -> dict[str, Any]:
        """Return a report row; its losslessness check covers the questions that the loop decoded as well."""
        at_size = records_at_size(records, name, nodes)
        labels = {**evaluation.labels(name), "nodes": nodes}
        row = metrics.report_row(name, at_size, None, labels, evaluation.setup.seed)
        checked = [record for record in records if record.index < self.checked]
        row["lossless"] = losslessness_metrics(answer_key(name, nodes, DECODED), checked) | {
            "owes": evaluation.guarantee(name, [])
        }
        for part in row["categories"].values():
            part["equal"] = None
        return row | {"replay": count_identical(name, nodes, checked)}


def drafter_names(names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if name != AUTOREGRESSIVE]


def answer_key(name: str, nodes: int, how: str) -> str:
    """Return the key of an answer in a record: `ctc, 16 nodes, replayed`."""
    return f"{name}, {nodes} nodes, {how}"


def baseline_answer(setup: EvaluationSetup, answer: BaseAnswer) -> Answer:
    """Return autoregression's answer: one decoding step per token."""
    passes = replay_drafts(setup.contestants[AUTOREGRESSIVE], answer, [1], 0)[1]
    text = answer_text(setup.base.tokenizer, answer.tokens, setup.base.stop_token_ids)
    return Answer(answer.tokens, text, passes, answer.ended, 0.0, 0.0, None)


def untimed_answer(generation: GenerationResult) -> Answer:
    return Answer(generation.tokens, "", generation.passes, generation.ended, 0.0, 0.0, None)


def records_at_size(records: Sequence[Record], name: str, nodes: int) -> list[Record]:
    """Return the records as if the loop had measured this contestant at this size; the text is the base model's."""
    return [
        replace(record, turns=tuple(turn_at_size(turn, name, nodes) for turn in record.turns)) for record in records
    ]


def turn_at_size(turn: Turn, name: str, nodes: int) -> Turn:
    baseline = turn.answers[AUTOREGRESSIVE]
    ours = baseline if name == AUTOREGRESSIVE else turn.answers[answer_key(name, nodes, REPLAYED)]
    return replace(
        turn, answers={AUTOREGRESSIVE: baseline, name: replace(ours, tokens=baseline.tokens, text=baseline.text)}
    )


def count_identical(name: str, nodes: int, checked: Sequence[Record]) -> dict[str, int]:
    """Return the number of answers that the loop decoded as well, and of those that took the replayed steps."""
    if name == AUTOREGRESSIVE:
        return {"answers": 0, "alike": 0}
    pairs = [
        [turn.answers[answer_key(name, nodes, how)].passes for how in (REPLAYED, DECODED)]
        for record in checked
        for turn in record.turns
    ]
    return {"answers": len(pairs), "alike": sum(replayed == decoded for replayed, decoded in pairs)}
