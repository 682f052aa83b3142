"""Config -> objects -> rows -> table: `python evaluate.py checkpoint=runs/demo benchmark=gsm8k`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from ctcdraft.drafters.drafter import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.evaluation import recorded_report, report
from ctcdraft.evaluation.environment import environment
from ctcdraft.evaluation.folder import Folder, Shard
from ctcdraft.evaluation.measure import Arena
from ctcdraft.evaluation.recorded import read_run
from ctcdraft.evaluation.recorded_comparison import compare
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.session import Contestant, Session
from ctcdraft.front_door import REPOSITORY, build_drafter, entry_point, from_command_line, load_drafter
from ctcdraft.training.checkpoint import RunDirectory

DRAFTERS = REPOSITORY / "configs" / "drafter"


@dataclass(frozen=True)
class Entry:
    """A name on the command line, looked up. run: None for a drafter without weights."""

    name: str
    run: Path | None
    config: Any
    paths: str | None


@hydra.main(version_base=None, config_path="configs", config_name="evaluate")
@entry_point
def main(config: DictConfig) -> None:
    if config.recorded.path is not None or config.recorded.baseline is not None:
        return measure_recorded(config)
    shard = Shard.parse(config.shard)
    entries = named(config)
    benchmark = instantiate(config.benchmark)
    settings = instantiate(config.decoding)
    if config.threads:
        torch.set_num_threads(config.threads)
    base = load_base(config, entries)
    contestants = {name: contestant(entry, base) for name, entry in entries.items()}
    drafters = {name: one.drafter for name, one in contestants.items()}
    decoding = HydraConfig.get().runtime.choices["decoding"]
    session = Session(Arena(base, drafters, settings, config.seed), contestants, benchmark, decoding, shard)
    out = output(config, entries, f"{benchmark.name}-{decoding}")
    print(f"{session.plan()}\ninto {out}")
    if config.plan_only:
        return
    made = session.run(Folder(out, shard), config.overwrite, config.warm_up_tokens, config.timing.questions)
    print(f"\n{report.terminal(**made)}\nthe report is {out / 'report.md'}")


def measure_recorded(config: DictConfig) -> None:
    """Answer files of others instead of decoding: no base, no drafter, the same measures."""
    if config.recorded.path is None:
        raise InputError("recorded.baseline= alone measures nothing; give the run itself as recorded.path=")
    run = read_run(config.recorded.path)
    baseline = read_run(config.recorded.baseline) if config.recorded.baseline is not None else None
    made = compare(run, baseline, config.seed)
    out = Path(config.out) if config.out is not None else Path("runs") / "recorded" / run.name.partition(".")[0]
    if (out / "report.json").exists() and not config.overwrite:
        raise InputError(f"{out} holds a report; choose another out=, or add overwrite=true to replace it")
    recorded_report.write(out, made, environment())
    print(f"{recorded_report.terminal(made)}\nthe report is {out / 'report.md'}")


def named(config: DictConfig) -> dict[str, Entry]:
    """All contestants by row name, autoregression first."""
    words = list(config.contestants)
    if config.checkpoint is not None:
        words = [config.checkpoint, *(words or ["prompt_lookup"])]
    if not words:
        raise InputError("nobody to compare: give checkpoint=RUN, or contestants=[RUN,prompt_lookup]")
    entries: dict[str, Entry] = {}
    for word in dict.fromkeys([AUTOREGRESSIVE, *words]):
        entry = looked_up(str(word))
        # Two runs of one drafter: the later is named after its directory too.
        name = entry.name if entry.name not in entries else f"{entry.name}:{entry.run.name if entry.run else word}"
        while name in entries:
            name += "'"
        entries[name] = entry
    return entries


def looked_up(word: str) -> Entry:
    """A run directory (`RUN`, or `RUN@PATHS`), or a drafter of configs/drafter."""
    place, at, paths = word.rpartition("@")
    if not at or Path(word).is_dir():
        place, at, paths = word, "", ""
    run = RunDirectory(Path(place))
    if run.config.is_file():
        config = OmegaConf.load(run.config)
        return Entry(f"{config.drafter.name}{at}{paths}", run.path, config, paths or None)
    file = DRAFTERS / f"{word}.yaml"
    if run.path.is_dir() or not file.is_file():
        there = ", ".join(sorted(file.stem for file in DRAFTERS.glob("*.yaml")))
        raise InputError(
            f"contestant {word} is neither a run directory (there is no {run.config}) nor one of the drafters {there}"
        )
    config = OmegaConf.load(file)
    if issubclass(get_class(config._target_), DraftHead):
        raise InputError(f"drafter {word} has weights: train it (train.py drafter={word}) and name its run directory")
    return Entry(config.name, None, config, None)


def load_base(config: DictConfig, entries: dict[str, Entry]) -> Any:
    """The base of the first run, or the one on the command line; `base.path=` alone moves the run's own."""
    runs = [entry.config.base for entry in entries.values() if entry.run is not None]
    if "_target_" in config.base:
        node = config.base
    else:
        node = OmegaConf.merge(runs[0], {key: value for key, value in config.base.items() if value}) if runs else None
    if node is None or not node.path:
        raise InputError("no base: give a run directory as checkpoint=, or base=tiny, or base=local base.path=FOLDER")
    return instantiate(node, device=config.device, dtype=config.dtype)


def contestant(entry: Entry, base: Any) -> Contestant:
    if entry.run is None:
        drafter = build_drafter(entry.config, base)
        return Contestant(drafter, json.dumps(OmegaConf.to_container(entry.config)), 0, base.fingerprint())
    paths = read_paths(entry.paths)
    drafter = load_drafter(entry.run, base, paths)
    parameters = sum(weight.numel() for weight in drafter.own_parameters())
    run = RunDirectory(entry.run)
    config: Any = OmegaConf.to_container(entry.config.drafter, resolve=True)
    if paths is not None:
        config["paths"] = OmegaConf.to_container(paths, resolve=True)
    # Weights and YAML: another beam over the same weights is another contestant.
    identity = f"config {digest(json.dumps(config, sort_keys=True).encode())}, weights {digest(run.head.read_bytes())}"
    fingerprint = json.loads((run.path / "fingerprint.json").read_text())
    return Contestant(drafter, identity, parameters, fingerprint)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def read_paths(name: str | None) -> Any | None:
    if name is None:
        return None
    file = DRAFTERS / "paths" / f"{name}.yaml"
    if not file.is_file():
        there = ", ".join(sorted(file.stem for file in file.parent.glob("*.yaml")))
        raise InputError(f"@{name} is no way to read a head; there are {there}")
    return OmegaConf.load(file)


def output(config: DictConfig, entries: dict[str, Entry], name: str) -> Path:
    """`out=`, else under the run if there is just one; in a multirun every job has a folder of its own."""
    runs = [entry.run for entry in entries.values() if entry.run is not None]
    home = runs[0] if len(set(runs)) == 1 else Path("runs")
    out = Path(config.out) if config.out is not None else home / "evaluation" / name
    job = HydraConfig.get()
    return out / str(job.job.num) if job.mode is RunMode.MULTIRUN else out


if __name__ == "__main__":
    from_command_line(main)
