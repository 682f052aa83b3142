"""An evaluation that times nothing: measure=replay, tau of every tree size from one computation. It knows no config.

What is replayed rests on a loop that changes no text. So some questions are decoded by the loop itself, too, at every
size; these give each row its certificate, and are counted where they took exactly the passes that were replayed.
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
from ctcdraft.evaluation.differences import paired_differences
from ctcdraft.evaluation.evaluation import Evaluation
from ctcdraft.evaluation.losslessness import LosslessnessChecker, losslessness_metrics
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Answer, Divergence, Record, Turn
from ctcdraft.evaluation.replay import BaseAnswer, record_base_answer, refuse_unreplayable, replay_drafts
from ctcdraft.evaluation.runner import EvaluationSetup, turn_prompt, turn_seed
from ctcdraft.evaluation.stock_generate import StockGenerate
from ctcdraft.progress import Progress
from ctcdraft.report import markdown

REPLAYED, DECODED = "replayed", "looped"


@dataclass(frozen=True)
class ReplayEvaluation:
    """nodes: tree sizes, ascending, the root counted. checked: how many questions the loop decodes as well."""

    nodes: Sequence[int]
    checked: int

    def __post_init__(self) -> None:
        sizes = [check_int(nodes, "measure.nodes", least=2) for nodes in self.nodes]
        if not sizes or sorted(set(sizes)) != sizes:
            raise InputError(f"measure.nodes={sizes} must be sizes from 2 up, ascending, each once")
        check_int(self.checked, "measure.checked")  # without any, there is no certificate

    def run(self, session: Evaluation, folder: OutputDir, overwrite: bool) -> dict[str, Any]:
        """Go on where the folder stands, then write the report of all that is in it; returns the report."""
        refuse_unreplayable(session.setup.settings)
        outside = [name for name, one in session.setup.contestants.items() if isinstance(one, StockGenerate)]
        if outside:
            raise InputError(
                f"contestant {outside[0]} drafts outside of our loop and cannot be replayed; leave it out, or leave "
                "out measure=replay"
            )
        settings = {**session.settings(0), "replay": vars(self) | {"nodes": list(self.nodes)}}
        folder.open(settings, len(session.benchmark.prompts), overwrite)
        done = {record.index for record in folder.records(len(session.benchmark.prompts))}
        todo = {index: prompt for index, prompt in session.prompts.items() if index not in done}
        each = [self.answers(session.setup, index, prompt) for index, prompt in todo.items()]
        progress = Progress(sum(each), "answers", first=sum(each[:1]))
        for index, prompt in tqdm(todo.items(), desc="questions", disable=None):
            folder.append(self.run_question(session.setup, index, prompt, progress))
        made = self.report(session, folder.records(len(session.benchmark.prompts)), len(todo))
        markdown.write(folder, **made)
        return made

    def answers(self, setup: EvaluationSetup, index: int, prompt: Prompt) -> int:
        """Return how many answers a question takes: the base's own, a replay of each rival, and those of the loop."""
        each = 1 + (len(self.nodes) if index < self.checked else 0)
        return len(prompt.turns) * (1 + each * len(drafter_names(setup.contestants)))

    def run_question(self, setup: EvaluationSetup, index: int, prompt: Prompt, progress: Progress) -> Record:
        """One question, all turns; the base says each once, and everyone guesses along what it said."""
        checkers = {
            nodes: LosslessnessChecker(setup.base, setup.contestants, replace(setup.settings, nodes=nodes))
            for nodes in self.nodes
        }
        turns: list[Turn] = []
        found: dict[str, list[Divergence]] = {}
        for number in range(len(prompt.turns)):
            prompt_L, cut = turn_prompt(setup.base, prompt, [turn.answers[AUTOREGRESSIVE].text for turn in turns])
            seed = turn_seed(setup.seed, index, number)
            base_answer = record_base_answer(setup.base, prompt_L, setup.settings, seed)
            answers = {AUTOREGRESSIVE: baseline_answer(setup, base_answer)}
            progress.advance()
            for name in drafter_names(setup.contestants):
                walked = replay_drafts(setup.contestants[name], base_answer, self.nodes, seed)
                progress.advance()
                for nodes, passes in walked.items():
                    answers[answer_key(name, nodes, REPLAYED)] = Answer(
                        (), "", passes, base_answer.ended, 0.0, 0.0, None
                    )
                    if index >= self.checked:
                        continue
                    looped = self.decode_with_loop(setup, name, nodes, prompt_L, seed)
                    progress.advance()
                    answers[answer_key(name, nodes, DECODED)] = untimed_answer(looped)
                    pair = looped.tokens, base_answer.tokens
                    one = checkers[nodes].compare(name, *pair, prompt_L, number, seed, looped.drawn)
                    found.setdefault(answer_key(name, nodes, DECODED), []).extend([one] if one else [])
            turns.append(Turn(len(prompt_L), cut, answers))
        unequal = {name: tuple(some) for name, some in found.items()}
        return Record(index, prompt.id, prompt.category, prompt.reference, tuple(turns), unequal)

    def decode_with_loop(
        self, setup: EvaluationSetup, name: str, nodes: int, prompt_L: Any, seed: int
    ) -> GenerationResult:
        base, settings = setup.base, replace(setup.settings, nodes=nodes)
        generation = generate(base, setup.contestants[name], prompt_L, settings, base.stop_token_ids, seed)
        if generation.drawn:
            raise InputError(
                f"contestant {name} draws its guesses, so no two runs of it take the same passes and none can be "
                "replayed; read it another way (RUN@TREE), or leave out measure=replay"
            )
        return generation

    def report(self, session: Evaluation, records: list[Record], answered: int) -> dict[str, Any]:
        setup, rows, difference_rows = session.setup, [], []
        for name in session.contestants:
            sizes = (1,) if name == AUTOREGRESSIVE else self.nodes
            rows += [self.row(session, name, nodes, records) for nodes in sizes]
        for nodes in self.nodes:
            these = {name: records_at_size(records, name, nodes) for name in session.contestants}
            sides = {name: metrics.paired_answers(name, seen)[0] for name, seen in these.items()}
            found = paired_differences(session.pairs, sides.__getitem__, setup.seed)
            difference_rows += [{"nodes": nodes, **one} for one in found]
        circumstances = {
            **session.circumstances(records, None, answered),
            "replay": {
                "nodes": list(self.nodes),
                "checked": sum(record.index < self.checked for record in records),
                **{part: sum(row["replay"][part] for row in rows) for part in ("answers", "alike")},
            },
        }
        return {"rows": rows, "environment": circumstances, "differences": difference_rows}

    def row(self, session: Evaluation, name: str, nodes: int, records: list[Record]) -> dict[str, Any]:
        """Its certificate is of the questions that the loop decoded as well."""
        seen = records_at_size(records, name, nodes)
        labels = {**session.labels(name), "nodes": nodes}
        row = metrics.report_row(name, seen, None, labels, session.setup.seed)
        checked = [record for record in records if record.index < self.checked]
        row["lossless"] = losslessness_metrics(answer_key(name, nodes, DECODED), checked) | {
            "owes": session.guarantee(name, [])
        }
        for part in row["categories"].values():
            part["equal"] = None
        return row | {"replay": count_identical(name, nodes, checked)}


def drafter_names(names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if name != AUTOREGRESSIVE]


def answer_key(name: str, nodes: int, how: str) -> str:
    """Under which a line holds an answer: ctc, 16 nodes, replayed."""
    return f"{name}, {nodes} nodes, {how}"


def baseline_answer(setup: EvaluationSetup, answer: BaseAnswer) -> Answer:
    """Autoregression's: a pass a token."""
    passes = replay_drafts(setup.contestants[AUTOREGRESSIVE], answer, [1], 0)[1]
    text = answer_text(setup.base.tokenizer, answer.tokens, setup.base.stop_token_ids)
    return Answer(answer.tokens, text, passes, answer.ended, 0.0, 0.0, None)


def untimed_answer(generation: GenerationResult) -> Answer:
    return Answer(generation.tokens, "", generation.passes, generation.ended, 0.0, 0.0, None)


def records_at_size(records: Sequence[Record], name: str, nodes: int) -> list[Record]:
    """The records as if the loop had measured this contestant at this size; the text, stored once, is the base's."""
    return [
        replace(record, turns=tuple(turn_at_size(turn, name, nodes) for turn in record.turns)) for record in records
    ]


def turn_at_size(turn: Turn, name: str, nodes: int) -> Turn:
    truth = turn.answers[AUTOREGRESSIVE]
    ours = truth if name == AUTOREGRESSIVE else turn.answers[answer_key(name, nodes, REPLAYED)]
    return replace(turn, answers={AUTOREGRESSIVE: truth, name: replace(ours, tokens=truth.tokens, text=truth.text)})


def count_identical(name: str, nodes: int, checked: Sequence[Record]) -> dict[str, int]:
    """Of the answers that the loop gave as well, those whose passes are those replayed."""
    if name == AUTOREGRESSIVE:
        return {"answers": 0, "alike": 0}
    pairs = [
        [turn.answers[answer_key(name, nodes, how)].passes for how in (REPLAYED, DECODED)]
        for record in checked
        for turn in record.turns
    ]
    return {"answers": len(pairs), "alike": sum(ours == loops for ours, loops in pairs)}
