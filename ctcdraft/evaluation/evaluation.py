"""One evaluation from first question to report: measure, instrument, count. It knows no config and no text file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.settings import DecodingSettings, Drafter
from ctcdraft.distributed import Shard
from ctcdraft.evaluation import metrics
from ctcdraft.evaluation.benchmarks import Benchmark
from ctcdraft.evaluation.bootstrap import paired_differences
from ctcdraft.evaluation.environment import (
    code_hash,
    code_version,
    copy_bandwidth,
    environment,
    hardware_name,
    weight_bytes,
)
from ctcdraft.evaluation.losslessness import other_kernels_null
from ctcdraft.evaluation.metrics import paired_answers
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.profiling import PhaseTimes, Profile, profile_answer
from ctcdraft.evaluation.records import AUTOREGRESSIVE, Answer, Record
from ctcdraft.evaluation.runner import (
    EvaluationSetup,
    ShapeWarmup,
    prepare_oracle,
    remaining_progress,
    run_questions,
    sample_evenly,
    shuffled_names,
    turn_prompt,
    turn_seed,
    warm_up,
)
from ctcdraft.evaluation.stock_generate import StockGenerate
from ctcdraft.evaluation.tracing.tracer import TraceSettings
from ctcdraft.models.fingerprint import was_quantized_since
from ctcdraft.progress import Progress


@dataclass(frozen=True)
class Contestant:
    """identity: what must be the same for two runs to be one evaluation (YAML, weights). fingerprint: of the base
    it was made for. crossing: a sentence where its frames are read otherwise than they were taught."""

    drafter: Drafter
    identity: str
    parameters: int
    fingerprint: dict[str, Any]
    crossing: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """Who is compared, on what. decoding: the name of the settings. sizes: how tree sizes were chosen, if they were,
    and `of` what. pairs: whose differences are told."""

    setup: EvaluationSetup
    contestants: Mapping[str, Contestant]
    benchmark: Benchmark
    decoding: str
    shard: Shard
    sizes: Mapping[str, Any] | None = None
    pairs: Sequence[tuple[str, str]] = ()

    @property
    def prompts(self) -> dict[int, Prompt]:
        """This shard's questions by their place in the benchmark."""
        return dict(list(enumerate(self.benchmark.prompts))[self.shard.number - 1 :: self.shard.of])

    def with_tree_sizes(self, sizes: Mapping[str, Any]) -> Evaluation:
        """The same with the tree sizes that were chosen for it."""
        nodes = {name: found["chosen"] for name, found in sizes["sizes"].items()}
        return replace(self, setup=replace(self.setup, nodes=nodes), sizes=sizes)

    def describe(self) -> str:
        settings, prompts = self.setup.settings, self.prompts
        turns = sum(len(prompt.turns) for prompt in prompts.values())
        most = turns * settings.max_new_tokens
        return (
            f"contestants: {', '.join(self.contestants)}\n"
            f"{self.benchmark.name}: {len(prompts):,} questions, {turns:,} turns; base {self.setup.base.name}, "
            f"{self.setup.base.dtype} on {hardware_name(self.setup.base.device)}\n"
            f"{self.decoding} decoding, {self.nodes()} nodes, up to {settings.max_new_tokens:,} new tokens a turn: "
            f"at most {most:,} passes each, {most * len(self.contestants):,} in all"
        )

    def nodes(self) -> str:
        own = [f"{name} {count}" for name, count in self.setup.nodes.items()]
        return ", ".join(own) or str(self.setup.settings.nodes)

    def settings(self, warm_up_tokens: int) -> dict[str, Any]:
        """What all lines of a folder must share. The limit is not among it: a higher one goes on."""
        setup, settings = self.setup, self.setup.settings
        here = environment()
        return {
            "benchmark": {"name": self.benchmark.name, "questions": self.benchmark.hash},
            "decoding": {
                **{key: value for key, value in vars(settings).items() if key != "verify"},
                "verify": qualified_name(settings.verify),
                **({"nodes": dict(setup.nodes)} if setup.nodes else {}),
            },
            "contestants": {name: one.identity for name, one in self.contestants.items()},
            "base": setup.base.fingerprint(),
            "context_length": setup.base.context_length,
            "attention": setup.base.lm.config._attn_implementation,
            "dtype": dtype_name(setup),
            "reads": setup.base.execution_mode,
            "hardware": hardware_name(setup.base.device),
            **code_version(here),
            "code": code_hash(),
            "versions": {package: here["versions"][package] for package in ("torch", "transformers")},
            "seed": setup.seed,
            "warm_up_tokens": warm_up_tokens,
        }

    def run(
        self, folder: OutputDir, overwrite: bool, warm_up_tokens: int, timing_questions: int, explorer: TraceSettings
    ) -> dict[str, Any]:
        """Answer what the folder does not hold yet; return the content of report.json for all it holds."""
        folder.open(self.settings(warm_up_tokens), len(self.benchmark.prompts), overwrite)
        if self.sizes is not None:
            folder.write_sizes(self.sizes)  # not before: a folder that refuses this evaluation keeps its own
        progress = remaining_progress(self.setup, self.prompts, folder, timing_questions, explorer.questions)
        answered = run_questions(self.setup, self.prompts, folder, warm_up_tokens, progress)
        records = folder.records(len(self.benchmark.prompts))
        own_records = [record for record in records if record.index in self.prompts]
        if not folder.profile_file.is_file():
            timing = self.profile_questions(sample_evenly(own_records, timing_questions), warm_up_tokens, progress)
            if timing is not None:
                folder.write_timing(timing)
        if (
            explorer.questions and own_records and not folder.trace_file.is_file()
        ):  # last: nothing may be timed beside it
            chosen = {one.index: self.prompts[one.index] for one in sample_evenly(own_records, explorer.questions)}
            folder.write_trace(explorer.trace_answers(self.setup, chosen, progress))
        rows, circumstances = self.rows(records, Profile.merge_shards(folder.timings()), answered)
        nodes = self.setup.settings.nodes
        difference_rows = paired_differences(self.pairs, lambda name: paired_answers(name, records)[0], self.setup.seed)
        return {
            "rows": rows,
            "environment": circumstances,
            "differences": [{"nodes": nodes, **one} for one in difference_rows],
        }

    def profile_questions(self, records: list[Record], warm_up_tokens: int, progress: Progress) -> Profile | None:
        """A few questions again, with clocks, in another order. None without questions."""
        if not records:
            return None
        setup = self.setup
        # Again: where every line was on disk already, nothing has run in this process yet.
        warm_up(setup, self.prompts[records[0].index], warm_up_tokens)
        spent: dict[str, PhaseTimes] = {}
        warmup = ShapeWarmup(setup)
        for record in records:
            prompt, baseline = self.prompts[record.index], record.answers(AUTOREGRESSIVE)
            for turn in range(len(prompt.turns)):
                prompt_L, _ = turn_prompt(setup.base, prompt, [answer.text for answer in baseline[:turn]])
                seed = turn_seed(setup.seed, record.index, turn)
                warmup.capture_shapes(prompt_L)
                for name in shuffled_names(setup, seed + 1):
                    if isinstance(setup.contestants[name], StockGenerate):
                        continue  # no clock of ours runs inside it
                    prepare_oracle(setup, name, prompt_L, seed)
                    one = profile_answer(setup.base, setup.contestants[name], prompt_L, setup.settings_of(name), seed)
                    spent[name] = spent[name] + one if name in spent else one
                    progress.advance()
        return Profile(spent, weight_bytes(setup.base), copy_bandwidth(setup.base.device))

    def rows(
        self, records: list[Record], timing: Profile | None, answered: int
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """answered: how many of the questions this process asked."""
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
        """What a row says without measuring anything."""
        setup, one = self.setup, self.contestants[name]
        return {
            "benchmark": self.benchmark.name,
            "decoding": self.decoding,
            "temperature": setup.settings.temperature,
            "nodes": setup.settings_of(name).nodes,
            "draft_parameters": one.parameters,
            "hardware": hardware_name(setup.base.device),
            "dtype": dtype_name(setup),
            "fingerprint": one.fingerprint,
            "crossing": one.crossing,
            "quantised_since": was_quantized_since(one.fingerprint, setup.base.fingerprint()),
            "other_kernels": isinstance(one.drafter, StockGenerate) and one.drafter.uses_other_kernels,
        }

    def guarantee(self, name: str, answers: Iterable[Answer]) -> str:
        return "words" if name == AUTOREGRESSIVE else guarantee(self.setup.settings, answers)

    def circumstances(self, records: list[Record], timing: Profile | None, answered: int) -> dict[str, Any]:
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
            },
            "cut": {"turns": len(cuts), "tokens": sum(cuts)},
        }


def guarantee(settings: DecodingSettings, answers: Iterable[Answer]) -> str:
    """What a contestant owes autoregression: its `words`, its `law`, or `nothing`, which is to say: it is lossy."""
    if all(settings.owes_token_identity(answer.drawn) for answer in answers):
        return "words"
    return "law" if settings.lossless else "nothing"


def qualified_name(part: Any) -> str:
    """A verifier in words that are the same in every process: its name, and the names or values it is made of."""
    if isinstance(part, partial):
        return qualified_name(part.func)
    if is_dataclass(part):
        values = ", ".join(f"{field.name}={qualified_name(getattr(part, field.name))}" for field in fields(part))
        return f"{type(part).__module__}.{type(part).__qualname__}({values})"
    return f"{part.__module__}.{part.__qualname__}" if callable(part) else repr(part)


def dtype_name(setup: EvaluationSetup) -> str:
    return str(setup.base.dtype).removeprefix("torch.")
