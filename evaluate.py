"""Entry point of evaluations: `python evaluate.py checkpoint=runs/demo benchmark=gsm8k`.

Builds the base and the contestants from the config, measures them and writes report.json, report.md and report.html.
"""

from __future__ import annotations

from ctcdraft.config.early_checks import check_before_imports, find_study

if __name__ == "__main__":
    check_before_imports("evaluate")  # before the imports below, which take seconds

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig

from ctcdraft.config.allowed import parse_trust
from ctcdraft.config.cli import entry_point, run_hydra_main
from ctcdraft.config.contestants import ContestantConfig, build_contestant, load_base, resolve, resolve_contestants
from ctcdraft.config.schema import check_config
from ctcdraft.distributed import Shard, from_environment, init_distributed
from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import comparison_pairs
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.evaluation import Evaluation
from ctcdraft.evaluation.latency import LatencyBenchmark
from ctcdraft.evaluation.output_dir import OutputDir, refuse_existing_report, refuse_smaller_evaluation
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.calibration import choose_adaptive
from ctcdraft.evaluation.replay.tree_size import choose_fixed, load_or_choose_sizes
from ctcdraft.io import refuse_unwritable
from ctcdraft.report import latency, markdown
from ctcdraft.report.html import files

MAX_FOLDER_NAME = 200  # bytes that a file system takes are 255
# By decoding.nodes: what chooses the sizes, and the key of `sizing` with those it tries.
SIZE_CHOOSERS: dict[Any, tuple[Any, str]] = {
    "auto": (choose_fixed, "nodes"),
    "adaptive": (choose_adaptive, "adaptive_nodes"),
}


@hydra.main(version_base=None, config_path="configs", config_name="evaluate")
@entry_point
def main(config: DictConfig) -> None:
    check_config(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    study, is_latency = find_study(config), get_object(config.benchmark._target_) is LatencyBenchmark
    if (processes := from_environment().world_size) > 1 and (study or is_latency):
        what = "benchmark=latency" if is_latency else study
        raise InputError(f"{what} takes one process, not the {processes} of torchrun; start it with python evaluate.py")
    if study:
        import_module(f"{study}.__main__").run(config)
    elif is_latency:
        measure_latency(config)
    else:
        evaluate(config)


def evaluate(config: DictConfig) -> None:
    """Decode a benchmark with every contestant, or replay their drafts, and write the report."""
    entries, benchmark = resolve_contestants(config), instantiate(config.benchmark)
    # Every part of the config before the base model is loaded, so that a wrong value is refused at once.
    replay, sizing = (instantiate(config[part], _convert_="all") for part in ("measure", "sizing"))
    trace, shard = instantiate(config.trace), Shard.parse(config.shard)
    decoding = HydraConfig.get().runtime.choices["decoding"]
    out = output_folder(config, entries, f"{benchmark.name}-{decoding}{'-replay' * (replay is not None)}")
    if config.plan_only:
        processes = from_environment()
        if not processes.is_main:
            return
    else:
        processes = init_distributed(config.device, config.timeout_minutes, tensors=False)
        refuse_unwritable(out, "out")
    if not config.overwrite:
        refuse_smaller_evaluation(out, benchmark.name, len(benchmark.prompts), entries)
    # A replay and sizes that are chosen try several; the settings of the evaluation hold the largest.
    chooser, sizes_tried = SIZE_CHOOSERS.get(config.decoding.nodes, (None, None))
    largest = max(getattr(sizing, sizes_tried)) if sizes_tried else config.decoding.nodes
    if replay is not None:
        chooser, largest = None, replay.nodes[-1]
    settings = instantiate(config.decoding, nodes=largest)
    folder, pairs = OutputDir(out, shard, processes), comparison_pairs(list(entries), config.differences)

    base = load_base(config, entries)
    contestants = {name: build_contestant(entry, base) for name, entry in entries.items()}
    drafters = {name: contestant.drafter for name, contestant in contestants.items()}
    setup = EvaluationSetup(base, drafters, settings, config.seed)
    evaluation = Evaluation(setup, contestants, benchmark, decoding, shard, pairs=pairs)
    if chooser is not None and not config.plan_only:
        # A resumed evaluation and other shards use the sizes that the first one stored.
        def choose_sizes() -> dict[str, Any]:
            stored = None if config.overwrite else folder.sizes()
            recorded = evaluation.settings(config.warm_up_tokens)
            return load_or_choose_sizes(stored, setup, sizing, benchmark, recorded, chooser)

        evaluation = evaluation.with_tree_sizes(processes.from_main(choose_sizes))

    if processes.is_main:
        print(f"{evaluation.describe()}\ninto {out}")
    if config.plan_only:
        return
    if replay is not None:  # from one computation, without times
        content = replay.run(evaluation, folder, config.overwrite)
    else:
        timing = config.timing
        content = evaluation.run(folder, config.overwrite, config.warm_up_tokens, timing.questions, trace, timing.alone)
    if content is None:  # the first process writes the report
        return
    markdown.write(folder, **content)
    page = ""
    if replay is None:
        files.write_page(out, content["rows"], content["environment"])
        page = f", and as a page: {out / files.PAGE_FILE}"
    print(f"\n{markdown.terminal(**content)}\nthe report is {out / 'report.md'}{page}")


def measure_latency(config: DictConfig) -> None:
    """Time every part of a decoding step, of drafters with random weights and of trained ones, without questions."""
    benchmark: Any = instantiate(config.benchmark, _convert_="all")
    settings, runs = instantiate(config.decoding), resolve_contestants(config, alone=True)
    untrained = [resolve(drafter, True, parse_trust(config.trust)) for drafter in benchmark.drafters]
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


def output_folder(config: DictConfig, entries: Mapping[str, ContestantConfig], name: str) -> Path:
    """Return `out=`, else a folder in the run if there is just one, else one below runs/ named by base and contestants.

    Each job of a multirun gets its own subfolder.
    """
    runs = {run.run for entry in entries.values() for run in entry.runs() if run.run is not None and not run.published}
    if config.out is not None:
        out = Path(config.out)
    elif len(runs) == 1:
        out = runs.pop() / "evaluation" / name
    else:  # an evaluation is resumed with the same base and contestants only
        model = [config.base.name] if "name" in config.base and config.base.name not in name.split("-") else []
        others = {one: entry for one, entry in entries.items() if one != AUTOREGRESSIVE}
        names = [f"{one}-{entry.run.name}" if entry.run else one for one, entry in others.items()]
        name = re.sub(r"[^\w.@,-]+", "_", "-".join([name, *model, *names]), flags=re.ASCII)
        out = Path("runs", "evaluation", name[:MAX_FOLDER_NAME])
    job = HydraConfig.get()
    return out / str(job.job.num) if job.mode is RunMode.MULTIRUN else out


if __name__ == "__main__":
    run_hydra_main(main)
