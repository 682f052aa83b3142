"""Entry point of evaluations: `python evaluate.py checkpoint=runs/demo benchmark=gsm8k`.

Builds the base and the contestants from the config, measures them and writes report.json, report.md and report.html.
"""

from __future__ import annotations

from ctcdraft.config.early_checks import check_before_imports

if __name__ == "__main__":
    check_before_imports("evaluate")  # above the imports below, which take seconds

from collections.abc import Mapping
from importlib import import_module
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
from ctcdraft.config.schema import as_list, check_config
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import comparison_pairs
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.evaluation import Evaluation
from ctcdraft.evaluation.latency import LatencyBenchmark
from ctcdraft.evaluation.output_dir import OutputDir, refuse_existing_report, refuse_smaller_evaluation
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.tree_size import load_or_choose_sizes
from ctcdraft.io import refuse_unwritable
from ctcdraft.report import latency, markdown
from ctcdraft.report.html import files
from ctcdraft.training.run_directory import RunDirectory

# Studies are commands of their own; a config that sets one of these keys (experiment=arena, experiment=table_mt_bench,
# recorded.path=FILE) is handed to `run(config)` of the study's __main__.
STUDIES = {
    "arena": "studies.comparison",
    "table.name": "studies.paper",
    "recorded.path": "studies.external_logs",
    "recorded.baseline": "studies.external_logs",
}


@hydra.main(version_base=None, config_path="configs", config_name="evaluate")
@entry_point
def main(config: DictConfig) -> None:
    check_config(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    for key, study in STUDIES.items():
        if OmegaConf.select(config, key) is not None:
            return import_module(f"{study}.__main__").run(config)
    if get_object(config.benchmark._target_) is LatencyBenchmark:
        return measure_latency(config)
    evaluate(config)


def evaluate(config: DictConfig) -> None:
    """Decode a benchmark with every contestant, or replay their drafts, and write the report."""
    shard, entries = Shard.parse(config.shard), resolve_contestants(config)
    benchmark = instantiate(config.benchmark)
    replay = instantiate(config.measure, _convert_="all")
    decoding = HydraConfig.get().runtime.choices["decoding"]
    out = output_folder(config, entries, f"{benchmark.name}-{decoding}{'-replay' * (replay is not None)}")
    if not config.plan_only:
        refuse_unwritable(out, "out")
    if not config.overwrite:
        refuse_smaller_evaluation(out, benchmark.name, len(benchmark.prompts), entries)

    sizing = instantiate(config.sizing, _convert_="all")
    auto_sized = config.decoding.nodes == "auto" and replay is None
    # `auto` and replay try several tree sizes; the settings of the evaluation hold the largest.
    largest = replay.nodes[-1] if replay is not None else sizing.nodes[-1] if auto_sized else config.decoding.nodes
    settings = instantiate(config.decoding, nodes=largest)
    folder, pairs = OutputDir(out, shard), comparison_pairs(list(entries), config.differences)
    base = load_base(config, entries)
    contestants = {name: build_contestant(entry, base) for name, entry in entries.items()}
    drafters = {name: contestant.drafter for name, contestant in contestants.items()}
    setup = EvaluationSetup(base, drafters, settings, config.seed)
    evaluation = Evaluation(setup, contestants, benchmark, decoding, shard, pairs=pairs)
    if auto_sized and not config.plan_only:
        stored = None if config.overwrite else folder.sizes()
        recorded = evaluation.settings(config.warm_up_tokens)
        sizes = load_or_choose_sizes(stored, setup, sizing, benchmark.prompts, recorded)
        evaluation = evaluation.with_tree_sizes(sizes)

    print(f"{evaluation.describe()}\ninto {out}")
    if config.plan_only:
        return
    if replay is not None:
        content = replay.run(evaluation, folder, config.overwrite)
    else:
        trace = instantiate(config.explorer)
        content = evaluation.run(folder, config.overwrite, config.warm_up_tokens, config.timing.questions, trace)
    markdown.write(folder, **content)
    page = ""
    if replay is None:
        files.write_page(out, content["rows"], content["environment"])
        page = f", and as a page: {out / files.PAGE_FILE}"
    print(f"\n{markdown.terminal(**content)}\nthe report is {out / 'report.md'}{page}")


def measure_latency(config: DictConfig) -> None:
    """Time every part of a decoding step, of drafters with random weights and of trained ones, without questions."""
    benchmark = instantiate(config.benchmark, _convert_="all")
    settings = instantiate(config.decoding)
    runs = resolve_contestants(config, alone=True)
    trust = parse_trust(config.trust)
    untrained = [resolve(drafter, True, trust) for drafter in benchmark.drafters]
    entries = {**runs, **{entry.name: entry for entry in untrained if entry.name not in runs}}
    base = load_base(config, runs)
    out = output_folder(config, runs, f"{benchmark.name}-{Path(base.name).name}")  # base.name may contain slashes
    refuse_existing_report(out, config.overwrite)
    contexts = benchmark.usable_contexts(base, settings)
    print(f"base {base.name}, contexts {contexts}, drafters: {', '.join(entries)}\ninto {out}")
    if config.plan_only:
        return
    refuse_unwritable(out, "out")
    contestants = {name: build_contestant(entry, base) for name, entry in entries.items()}
    content = benchmark.run(base, contestants, settings, config.seed)
    latency.write(out, content)
    print(f"\n{latency.terminal(content)}\n\nthe report is {out / 'report.md'}")


def resolve_contestants(config: DictConfig, alone: bool = False) -> dict[str, ContestantConfig]:
    """Return all contestants by the name of their row, autoregression first.

    Args:
        alone: whether autoregression may be the only one.
    """
    names = as_list(config.contestants, "contestants")
    if config.checkpoint is not None:
        names = [config.checkpoint, *(names or ["prompt_lookup"])]
    if not names and not alone:
        raise InputError(
            "contestants=[] leaves nothing to compare; give checkpoint=RUN, or contestants=[RUN,prompt_lookup]"
        )
    entries: dict[str, ContestantConfig] = {}
    trust = parse_trust(config.get("trust"))
    for contestant in [AUTOREGRESSIVE, *names]:
        entry = resolve(contestant, trust=trust)
        if entry in entries.values():
            continue
        name = entry.name
        if name in entries:  # a second run or variant of one drafter: add the run's directory, or the values
            name += f":{entry.run.name if entry.run else describe_values(contestant)}"
        while name in entries:
            name += "'"
        entries[name] = entry
    return entries


def describe_values(contestant: Any) -> str:
    """{draft_model: {frames: 4}}   ->   frames=4"""
    if not isinstance(contestant, Mapping):
        return str(contestant)
    return ",".join(f"{key}={value}" for values in contestant.values() for key, value in (values or {}).items())


def load_base(config: DictConfig, entries: dict[str, ContestantConfig]) -> Any:
    """Return the base model of the command line, or that of the first run; `base.path=` alone moves the run's own."""
    runs = [run_base_config(run) for entry in entries.values() for run in entry.runs()]
    if "_target_" in config.base:
        node = config.base
    elif runs:
        node = OmegaConf.merge(runs[0], {key: value for key, value in config.base.items() if value is not None})
    else:
        node = None
    if node is None or not (node.path or "of" in node):
        raise InputError("no base: give a run directory as checkpoint=, or base=tiny, or base=local base.path=FOLDER")
    if node.path is None:  # base=shape has random weights and takes none of these
        node = OmegaConf.masked_copy(node, [key for key in node if key not in ("path", "device_map", "quantised")])
    return instantiate(node, device=config.device, dtype=config.dtype).for_inference()


def run_base_config(run: ContestantConfig) -> Any:
    """Return the base config of a run, with the LoRA adapter it trained, if any, and without ZeRO-3 sharding."""
    changed: dict[str, Any] = {"zero3": False} if run.config.base.get("zero3") else {}
    if run.run is not None and run.config.get("adapt") is not None:
        changed["adapted"] = str(RunDirectory(run.run).adapter)
    return OmegaConf.merge(run.config.base, changed)


def output_folder(config: DictConfig, entries: dict[str, ContestantConfig], name: str) -> Path:
    """Return `out=`, else a folder in the run if there is just one; each job of a multirun gets its own subfolder."""
    runs = [run.run for entry in entries.values() for run in entry.runs() if run.run is not None]
    home = runs[0] if len(set(runs)) == 1 else Path("runs")
    out = Path(config.out) if config.out is not None else home / "evaluation" / name
    job = HydraConfig.get()
    return out / str(job.job.num) if job.mode is RunMode.MULTIRUN else out


if __name__ == "__main__":
    run_hydra_main(main)
