"""Config -> objects -> rows -> table: `python evaluate.py checkpoint=runs/demo benchmark=gsm8k`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from ctcdraft.config.allowed import parse_trust
from ctcdraft.config.cli import entry_point, run_hydra_main
from ctcdraft.config.contestants import ContestantConfig, build_contestant, resolve
from ctcdraft.config.early_checks import check_before_imports
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.evaluation.differences import comparison_pairs
from ctcdraft.evaluation.environment import environment
from ctcdraft.evaluation.evaluation import Evaluation
from ctcdraft.evaluation.finished import refuse_smaller_evaluation
from ctcdraft.evaluation.latency import LatencyBenchmark
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.runner import EvaluationSetup
from ctcdraft.evaluation.settings import as_list, refuse_impossible
from ctcdraft.evaluation.tree_size import load_or_choose_sizes
from ctcdraft.io import refuse_unwritable
from ctcdraft.report import latency, markdown
from ctcdraft.report.html import files
from ctcdraft.training.run_directory import RunDirectory
from studies.comparison.run import run_comparison
from studies.external_logs import compare as external_logs_compare
from studies.external_logs import page as external_logs_page
from studies.external_logs.compare import compare_logs
from studies.external_logs.read import read_log
from studies.paper import export
from studies.paper.tables import read_table

if __name__ == "__main__":
    check_before_imports("evaluate")  # above the imports below, which take seconds


@hydra.main(version_base=None, config_path="configs", config_name="evaluate")
@entry_point
def main(config: DictConfig) -> None:
    refuse_impossible(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.arena is not None:
        return run_comparison(instantiate(config.arena, _convert_="all"))
    if config.recorded.path is not None or config.recorded.baseline is not None:
        return compare_external_logs(config)
    if config.table.name is not None:
        return write_paper_table(config)
    if get_object(config.benchmark._target_) is LatencyBenchmark:
        return measure_latency(config)
    shard = Shard.parse(config.shard)
    entries = resolve_contestants(config)
    benchmark = instantiate(config.benchmark)
    decoding = HydraConfig.get().runtime.choices["decoding"]
    out = output_folder(config, entries, f"{benchmark.name}-{decoding}{'-replay' * (config.measure is not None)}")
    if not config.plan_only:
        refuse_unwritable(out, "out")
    if not config.overwrite:
        refuse_smaller_evaluation(out, benchmark.name, len(benchmark.prompts), entries)
    sizing, explorer = instantiate(config.sizing, _convert_="all"), instantiate(config.explorer)
    replay = instantiate(config.measure, _convert_="all")
    automatic = config.decoding.nodes == "auto" and replay is None
    size = {"nodes": replay.nodes[-1]} if replay is not None else {"nodes": sizing.nodes[-1]} if automatic else {}
    settings = instantiate(config.decoding, **size)
    base = load_base(config, entries)
    contestants = {name: build_contestant(entry, base) for name, entry in entries.items()}
    drafters = {name: one.drafter for name, one in contestants.items()}
    folder, pairs = OutputDir(out, shard), comparison_pairs(list(entries), config.differences)
    setup = EvaluationSetup(base, drafters, settings, config.seed)
    session = Evaluation(setup, contestants, benchmark, decoding, shard, pairs=pairs)
    if automatic and not config.plan_only:
        stored_sizes = None if config.overwrite else folder.sizes()
        of = session.settings(config.warm_up_tokens)
        session = session.with_tree_sizes(
            load_or_choose_sizes(stored_sizes, session.setup, sizing, benchmark.prompts, of)
        )
    print(f"{session.describe()}\ninto {out}")
    if config.plan_only:
        return
    if replay is not None:
        made = replay.run(session, folder, config.overwrite)
    else:
        made = session.run(folder, config.overwrite, config.warm_up_tokens, config.timing.questions, explorer)
    page = out / "report.html"
    print(
        f"\n{markdown.terminal(**made)}\n"
        f"the report is {out / 'report.md'}{f', and to look at: {page}' * page.is_file()}"
    )


def measure_latency(config: DictConfig) -> None:
    """No questions: the time of every part of a pass, of drafters with random weights and of runs."""
    benchmark = instantiate(config.benchmark, _convert_="all")
    settings = instantiate(config.decoding)
    runs = resolve_contestants(config, alone=True)
    trust = parse_trust(config.trust)
    untrained = {entry.name: entry for entry in (resolve(word, True, trust) for word in benchmark.drafters)}
    entries = {**runs, **{name: entry for name, entry in untrained.items() if name not in runs}}
    base = load_base(config, runs)
    out = output_folder(config, runs, f"{benchmark.name}-{Path(base.name).name}")  # a name from a file is no path
    refuse_report(out, config.overwrite)
    contexts = benchmark.usable_contexts(base, settings)
    print(f"base {base.name}, contexts {contexts}, drafters: {', '.join(entries)}\ninto {out}")
    if config.plan_only:
        return
    refuse_unwritable(out, "out")
    contestants = {name: build_contestant(entry, base) for name, entry in entries.items()}
    made = benchmark.run(base, contestants, settings, config.seed)
    latency.write(out, made)
    print(f"\n{latency.terminal(made)}\n\nthe report is {out / 'report.md'}")


def compare_external_logs(config: DictConfig) -> None:
    """Answer files of others instead of decoding: no base, no drafter, the same measures."""
    if config.recorded.path is None:
        raise InputError("recorded.baseline= alone measures nothing; give the run itself as recorded.path=")
    run = read_log(config.recorded.path)
    baseline = read_log(config.recorded.baseline) if config.recorded.baseline is not None else None
    made = compare_logs(run, baseline, config.seed)
    out = Path(config.out) if config.out is not None else Path("runs") / "recorded" / run.name.partition(".")[0]
    refuse_report(out, config.overwrite)
    circumstances = environment()
    external_logs_compare.write(out, made, circumstances)
    external_logs_page.write_page(out, made, circumstances)
    print(external_logs_compare.terminal(made))
    print(f"the report is {out / 'report.md'}, and to look at: {out / files.PAGE_FILE}")


def write_paper_table(config: DictConfig) -> None:
    """A table of the paper, from its authors' files and our reports: no base, no drafter."""
    table = read_table(config.table.name, config.table.recorded, as_list(config.table.reports, "table.reports"))
    out = Path(config.out) if config.out is not None else Path("runs") / "tables" / config.table.name
    if (out / "table.md").exists() and not config.overwrite:
        raise InputError(f"{out} holds a table; choose another out=, or add overwrite=true to replace it")
    filling = instantiate(config.table.plan, _convert_="all")
    export.write(out, table, filling)
    print(f"{export.markdown(table, filling)}\nthe table is {out / 'table.md'}, and beside it as LaTeX and CSV")


def refuse_report(out: Path, overwrite: bool) -> None:
    if (out / "report.json").exists() and not overwrite:
        raise InputError(f"{out} holds a report; choose another out=, or add overwrite=true to replace it")


def resolve_contestants(config: DictConfig, alone: bool = False) -> dict[str, ContestantConfig]:
    """All contestants by row name, autoregression first. alone: it may be the only one."""
    names = as_list(config.contestants, "contestants")
    if config.checkpoint is not None:
        names = [config.checkpoint, *(names or ["prompt_lookup"])]
    if not names and not alone:
        raise InputError("nobody to compare: give checkpoint=RUN, or contestants=[RUN,prompt_lookup]")
    entries: dict[str, ContestantConfig] = {}
    trust = parse_trust(config.get("trust"))
    for word in [AUTOREGRESSIVE, *names]:
        entry = resolve(word, trust=trust)
        if entry in entries.values():
            continue
        # Two of one drafter: the later is named after its directory, or its values, too.
        name = (
            entry.name
            if entry.name not in entries
            else f"{entry.name}:{entry.run.name if entry.run else describe_values(word)}"
        )
        while name in entries:
            name += "'"
        entries[name] = entry
    return entries


def describe_values(word: Any) -> str:
    """{draft_model: {frames: 4}}   ->   frames=4"""
    if not isinstance(word, Mapping):
        return str(word)
    return ",".join(f"{key}={value}" for values in word.values() for key, value in (values or {}).items())


def load_base(config: DictConfig, entries: dict[str, ContestantConfig]) -> Any:
    """The base of the first run, or the one on the command line; `base.path=` alone moves the run's own."""
    runs = [run_base_config(run) for entry in entries.values() for run in entry.runs()]
    if "_target_" in config.base:
        node = config.base
    else:
        node = (
            OmegaConf.merge(runs[0], {key: value for key, value in config.base.items() if value is not None})
            if runs
            else None
        )
    if node is None or not (node.path or "of" in node):
        raise InputError("no base: give a run directory as checkpoint=, or base=tiny, or base=local base.path=FOLDER")
    if node.path is None:  # a shape has none
        node = OmegaConf.masked_copy(node, [key for key in node if key not in ("path", "device_map", "quantised")])
    return instantiate(node, device=config.device, dtype=config.dtype).for_inference()


def run_base_config(run: ContestantConfig) -> Any:
    """The base node of a run; with what it has changed of its base, if it has."""
    changed: dict[str, Any] = {"zero3": False} if run.config.base.get("zero3") else {}  # that was for training
    if run.run is not None and run.config.get("adapt") is not None:
        changed["adapted"] = str(RunDirectory(run.run).adapter)
    return OmegaConf.merge(run.config.base, changed)


def output_folder(config: DictConfig, entries: dict[str, ContestantConfig], name: str) -> Path:
    """`out=`, else under the run if there is just one; in a multirun every job has a folder of its own."""
    runs = [run.run for entry in entries.values() for run in entry.runs() if run.run is not None]
    home = runs[0] if len(set(runs)) == 1 else Path("runs")
    out = Path(config.out) if config.out is not None else home / "evaluation" / name
    job = HydraConfig.get()
    return out / str(job.job.num) if job.mode is RunMode.MULTIRUN else out


if __name__ == "__main__":
    run_hydra_main(main)
