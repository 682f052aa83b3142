"""One evaluation: every contestant answers a benchmark, a few questions are profiled and traced, rows are computed.

The result is the content of report.json; ctcdraft/report writes it. All measurements go through the output directory,
so that an interrupted evaluation resumes and shards merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.loop import step_execution
from ctcdraft.distributed import Shard
from ctcdraft.drafters.adaptive import AdaptiveDrafter
from ctcdraft.drafters.tree_policy import AdaptivePolicy
from ctcdraft.evaluation import metrics, runner
from ctcdraft.evaluation.benchmarks import Benchmark
from ctcdraft.evaluation.bootstrap import paired_differences
from ctcdraft.evaluation.contestants import Contestant, EvaluationSetup, StockGenerate, qualified_name
from ctcdraft.evaluation.environment import code_hash, copy_bandwidth, environment, hardware_name, weight_bytes
from ctcdraft.evaluation.losslessness import other_kernels_null
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.profiling import PhaseTimes, Profile, profile_answer
from ctcdraft.evaluation.records import (
    AUTOREGRESSIVE,
    NO_GUARANTEE,
    SAME_DISTRIBUTION,
    SAME_TOKENS,
    Answer,
    Record,
)
from ctcdraft.evaluation.tracer import TraceSettings
from ctcdraft.models.fingerprint import was_quantized_since
from ctcdraft.models.stats import DraftBytes
from ctcdraft.progress import Progress


@dataclass(frozen=True)
class Evaluation:
    """Contestants, benchmark and settings of one evaluation."""

    setup: EvaluationSetup
    contestants: Mapping[str, Contestant]
    benchmark: Benchmark
    decoding: str  # name of the decoding config, for the report
    shard: Shard
    sizes: Mapping[str, Any] | None = None  # what decoding.nodes=auto chose, see `load_or_choose_sizes`
    pairs: Sequence[tuple[str, str]] = ()  # contestants whose paired differences are reported

    @property
    def prompts(self) -> dict[int, Prompt]:
        """Return the questions of this shard by their index in the benchmark."""
        return dict(list(enumerate(self.benchmark.prompts))[self.shard.number - 1 :: self.shard.of])

    @property
    def predicted(self) -> dict[str, float]:
        """Return the expected speed-up of the policies of adaptive tree sizes, by contestant."""
        chosen = self.sizes["sizes"] if self.sizes else {}
        return {name: choice["predicted"] for name, choice in chosen.items() if "policy" in choice}

    def with_tree_sizes(self, sizes: Mapping[str, Any]) -> Evaluation:
        """Return this evaluation with the tree sizes, or the policies of adaptive ones, that were chosen for it."""
        nodes = {name: choice["chosen"] for name, choice in sizes["sizes"].items()}
        drafters = dict(self.setup.contestants)
        for name, choice in sizes["sizes"].items():
            if "policy" in choice:
                drafters[name] = AdaptiveDrafter(drafters[name], AdaptivePolicy.from_json(choice["policy"]))
        return replace(self, setup=replace(self.setup, nodes=nodes, contestants=drafters), sizes=sizes)

    def describe(self) -> str:
        """Return the plan that is printed before the first question."""
        settings, prompts, base = self.setup.settings, self.prompts, self.setup.base
        turns = sum(len(prompt.turns) for prompt in prompts.values())
        max_tokens = turns * settings.max_new_tokens
        counts = ", ".join(f"{name} {count}" for name, count in self.setup.nodes.items()) or settings.nodes
        nodes = f"{counts} nodes"
        if self.predicted:
            speedups = ", ".join(f"{name} {rate:.2f}" for name, rate in self.predicted.items())
            nodes = f"adaptive tree sizes (expected speed-up: {speedups})"
        return (
            f"contestants: {', '.join(self.contestants)}\n"
            f"{self.benchmark.name}: {len(prompts):,} questions, {turns:,} turns; base {base.name}, {base.dtype} on "
            f"{hardware_name(base.device)}\n"
            f"{self.decoding} decoding, {nodes}, up to {settings.max_new_tokens:,} new tokens per turn: "
            f"at most {max_tokens:,} forward passes each, {max_tokens * len(self.contestants):,} in all"
        )

    def settings(self, warm_up_tokens: int) -> dict[str, Any]:
        """Return what all records of an output directory must share; a higher benchmark.limit may resume."""
        setup, settings, current = self.setup, self.setup.settings, environment()
        return {
            "benchmark": {"name": self.benchmark.name, "questions": self.benchmark.hash},
            "decoding": {
                **{key: value for key, value in vars(settings).items() if key != "verify"},
                "verify": qualified_name(settings.verify),
                **({"nodes": dict(setup.nodes)} if setup.nodes else {}),
                **({"predicted": self.predicted} if self.predicted else {}),  # differs where policies do
            },
            "contestants": {name: contestant.identity for name, contestant in self.contestants.items()},
            "base": setup.base.fingerprint(),
            "context_length": setup.base.context_length,
            "attention": setup.base.lm.config._attn_implementation,
            "dtype": str(setup.base.dtype).removeprefix("torch."),
            "reads": setup.base.execution_mode,
            "hardware": hardware_name(setup.base.device),
            "version": current["versions"]["ctcdraft"],
            **(current["git"] or {"commit": None, "dirty": None}),
            "code": code_hash(),
            "versions": {package: current["versions"][package] for package in ("torch", "transformers")},
            "seed": setup.seed,
            "warm_up_tokens": warm_up_tokens,
        }

    def run(
        self, folder: OutputDir, overwrite: bool, warm_up_tokens: int, timing_questions: int, trace: TraceSettings,
        alone: int = 0,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Answer the questions that the folder does not hold yet; return the content of report.json for all it holds.

        Several processes share the questions, untimed, as they disturb each other. Then all but the first return None.

        Args:
            warm_up_tokens: tokens that every contestant decodes before anything is timed.
            timing_questions: questions decoded once more with a stopwatch inside the loop, for c, v and o.
            alone: questions that the first of several processes answers, with times.
        """
        processes = folder.processes
        folder.open(self.settings(warm_up_tokens), len(self.benchmark.prompts), overwrite)
        if self.sizes is not None and processes.is_main:
            folder.write_sizes(self.sizes)  # after open(): a folder that refuses this evaluation keeps its sizes
        setup, prompts = self.setup, self.prompts
        todo = runner.unfinished(prompts, folder)
        shared, timed = runner.split_timed(todo, prompts, processes, alone)
        own = [*shared.values()][processes.rank :: processes.world_size] + [*timed.values()]
        progress = runner.remaining_progress(setup, prompts, own, folder, timing_questions, trace.questions)
        runner.run_questions(setup, shared, folder, warm_up_tokens, progress, processes)
        if not processes.is_main:
            return None
        runner.run_questions(setup, timed, folder, warm_up_tokens, progress)
        records = folder.records(len(self.benchmark.prompts))
        own_records = [record for record in records if record.index in prompts]
        profiled = runner.sample_evenly(own_records, timing_questions)
        if profiled and not folder.profile_file.is_file():
            folder.write_timing(self.profile_questions(profiled, warm_up_tokens, progress))
        traced = runner.sample_evenly(own_records, trace.questions)
        if traced and not folder.trace_file.is_file():
            questions = {record.index: prompts[record.index] for record in traced}
            folder.write_trace(trace.trace_answers(setup, questions, progress))
        rows, circumstances = self.rows(records, Profile.merge_shards(folder.timings()), len(todo))
        answers = {name: [record.answers(name) for record in records] for name in self.contestants}
        differences = [
            {"nodes": setup.tree_limits(pair["more"], pair["less"]), "adaptive": bool(self.predicted), **pair}
            for pair in paired_differences(self.pairs, answers, setup.seed)
        ]
        return {"rows": rows, "environment": circumstances, "differences": differences}

    def profile_questions(self, records: list[Record], warm_up_tokens: int, progress: Progress) -> Profile:
        """Decode these questions again with a stopwatch, in another order."""
        setup = self.setup
        times: dict[str, PhaseTimes] = {}
        # If all records were on disk already, nothing has warmed up this process.
        runner.warm_up(setup, self.prompts[records[0].index], warm_up_tokens)
        for record in records:
            prompt, baseline = self.prompts[record.index], record.answers(AUTOREGRESSIVE)
            for turn in range(len(prompt.turns)):
                prompt_L, _ = runner.turn_prompt(setup.base, prompt, [answer.text for answer in baseline[:turn]])
                seed = runner.turn_seed(setup.seed, record.index, turn)
                runner.capture_steps(setup, prompt_L)
                for name in runner.shuffled_names(setup, seed + 1):
                    if isinstance(setup.contestants[name], StockGenerate):
                        continue  # it does not run our loop
                    runner.prepare_oracle(setup, name, prompt_L, seed)
                    drafter, settings = setup.contestants[name], setup.settings_of(name)
                    answer_times = profile_answer(setup.base, drafter, prompt_L, settings, seed)
                    times[name] = times[name] + answer_times if name in times else answer_times
                    progress.advance()
        return Profile(times, weight_bytes(setup.base), copy_bandwidth(setup.base.device))

    def rows(
        self, records: list[Record], timing: Profile | None, answered: int
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return a row per contestant, and the environment. answered: the number of questions, by this process."""
        rows = []
        for name in self.contestants:
            row = metrics.report_row(name, records, timing, self.labels(name), self.setup.seed)
            answers = [answer for record in records for answer in record.answers(name)]
            row["lossless"]["owes"] = self.guarantee(name, answers)
            rows.append(row)
        for row in rows:
            row["lossless"]["null"] = other_kernels_null(rows, row)
        return rows, self.circumstances(records, timing, answered)

    def labels(self, name: str) -> dict[str, Any]:
        """Return the fields of a row that need no measurement."""
        setup, contestant = self.setup, self.contestants[name]
        least = DraftBytes.of(contestant.drafter, setup.base, weight_bytes(setup.base))
        return {
            "benchmark": self.benchmark.name,
            "decoding": self.decoding,
            "temperature": setup.settings.temperature,
            "nodes": setup.settings_of(name).nodes,
            "adaptive": name in self.predicted,
            "draft_parameters": contestant.parameters,
            "c_least": least and least.least_c,
            "steps": self.step_execution(name),
            "hardware": hardware_name(setup.base.device),
            "dtype": str(setup.base.dtype).removeprefix("torch."),
            "fingerprint": contestant.fingerprint,
            "crossing": contestant.crossing,
            "quantised_since": was_quantized_since(contestant.fingerprint, setup.base.fingerprint()),
            "other_kernels": isinstance(contestant.drafter, StockGenerate) and contestant.drafter.uses_other_kernels,
        }

    def step_execution(self, name: str) -> str | None:
        """Return how a contestant's decoding steps run; None where they are not those of our loop."""
        drafter = self.setup.contestants[name]
        if isinstance(drafter, StockGenerate):
            return None
        return step_execution(self.setup.base, drafter, self.setup.settings_of(name))

    def guarantee(self, name: str, answers: Iterable[Answer]) -> str:
        """Return what decoding promises relative to autoregression, as the `owes` field of report.json."""
        settings = self.setup.settings
        if name == AUTOREGRESSIVE or all(settings.owes_token_identity(answer.drawn) for answer in answers):
            return SAME_TOKENS
        return SAME_DISTRIBUTION if settings.lossless else NO_GUARANTEE

    def circumstances(self, records: list[Record], timing: Profile | None, answered: int) -> dict[str, Any]:
        timed = sum(record.timed for record in records)
        cuts = [turn.cut for record in records for turn in record.turns if turn.cut]
        return {
            **environment(),
            "hardware": hardware_name(self.setup.base.device),
            "base": self.setup.base.name,
            "reads": self.setup.base.execution_mode,
            "sizes": self.sizes and self.sizes["sizes"],
            "seeds": [self.setup.seed],
            "verifier_lossless": self.setup.settings.lossless,
            "bandwidth_bytes_per_second": timing.bandwidth if timing else None,
            "weight_bytes": timing.weight_bytes if timing else None,
            "questions": {
                "asked": len(self.benchmark.prompts),
                "finished": len(records),
                "reused": len(records) - answered,
                **({"timed": timed} if 0 < timed < len(records) else {}),
            },
            "cut": {"turns": len(cuts), "tokens": sum(cuts)},
        }
