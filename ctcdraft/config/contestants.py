"""From a word on the command line to a contestant: a run, a drafter as it is, one made of others, or an outside row.

Like the front door this is where config ends: no room behind imports it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from ctcdraft.config.allowed import ALLOWED_TARGETS, read_drafter_config, read_run_config, refuse_foreign
from ctcdraft.config.build import build_drafter, load_drafter
from ctcdraft.config.cli import CONFIGS
from ctcdraft.config.contestant_files import DRAFTER_CONFIGS, drafter_file, split_reading
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.evaluation.setup import Contestant
from ctcdraft.evaluation.stock_generate import StockGenerate
from ctcdraft.models.fingerprint import weights_hash
from ctcdraft.objectives.compatibility import mismatch, refuse_incompatible
from ctcdraft.training.run_directory import RunDirectory


@dataclass(frozen=True)
class ContestantConfig:
    """A name on the command line, looked up. run: None for a drafter as it is. parts: what a composite is made of.
    trust: what the run's config may call beside ctcdraft's own."""

    name: str
    run: Path | None
    config: Any
    paths: str | None
    parts: dict[str, ContestantConfig] = field(default_factory=dict)
    trust: Collection[str] = ()

    def runs(self) -> Iterator[ContestantConfig]:
        """Itself and its parts, those of them that are runs."""
        for entry in (self, *(run for part in self.parts.values() for run in part.runs())):
            if entry.run is not None:
                yield entry


def resolve(name_or_mapping: Any, untrained: bool = False, trust: Collection[str] = ()) -> ContestantConfig:
    """A run directory (`RUN`, or `RUN@PATHS`), a drafter of configs/drafter or configs/outside or of a YAML file;
    `{draft_model:{path:FOLDER}}` is a drafter with values of its own. untrained: one that has weights may be named
    as it is, to be timed with random ones. trust: names that a run, or a YAML that is not of configs/, may call beside
    ctcdraft's own."""
    name_or_mapping, values = (
        next(iter(name_or_mapping.items())) if isinstance(name_or_mapping, Mapping) else (str(name_or_mapping), {})
    )
    place, paths = split_reading(name_or_mapping)
    run = RunDirectory(Path(place))
    if run.config.is_file():
        if values:
            raise InputError(f"{place} is a run and has its own values; of {dict(values)} none can be given")
        config = read_run_config(run.config, trust)
        name = f"{config.drafter.name}{paths and f'@{paths}'}"
        return ContestantConfig(name, run.path, config, paths or None, trust=trust)
    config = compose_drafter_config(drafter_file(name_or_mapping, run.path), values or {}, trust)
    for key in [key for key in values or {} if key not in config]:
        raise InputError(f"drafter {name_or_mapping} has no value {key}; it has {', '.join(map(str, config))}")
    roles = list(config.get("parts", {}))
    for role in [role for role in (values or {}).get("parts", {}) if role not in roles]:
        raise InputError(f"drafter {name_or_mapping} has no part {role}; it has {', '.join(map(str, roles))}")
    plain = {key: value for key, value in (values or {}).items() if not is_option(config[key], value)}
    config = OmegaConf.merge(config, plain)
    found = target_object(config)
    if not untrained and isinstance(found, type) and issubclass(found, DraftHead) and not found.usable_untrained:
        raise InputError(
            f"drafter {name_or_mapping} has weights: train it (train.py drafter={name_or_mapping}) and name its run "
            "directory"
        )
    return ContestantConfig(config.name, None, config, None, resolve_parts(name_or_mapping, config, trust), trust)


def compose_drafter_config(file: Path, chosen: Mapping[str, Any], trust: Collection[str] = ()) -> Any:
    """A drafter's YAML with the options its defaults name, or `chosen` names instead: {growth: chain}. A file that is
    not of configs/ is read as one that others may have made."""
    ours = file.resolve().is_relative_to(CONFIGS.resolve())
    config: Any = OmegaConf.load(file) if ours else read_drafter_config(file, trust)
    merged: Any = OmegaConf.create({})
    for default in config.pop("defaults", []):
        for group, option in default.items() if hasattr(default, "items") else [(None, default)]:
            group = group and group.removeprefix("override ")
            folder, named = (
                (file.parent, option) if group is None else (DRAFTER_CONFIGS / group, chosen.get(group, option))
            )
            if isinstance(named, str) and named.startswith("/"):  # /from/the/top@_here_
                above, _, named = named.removesuffix("@_here_")[1:].rpartition("/")
                folder = CONFIGS / above
            if isinstance(named, str):
                there = sorted(one.stem for one in folder.glob("*.yaml"))
                if named not in there:
                    raise InputError(f"{group}: {named} is none of {', '.join(there)}")
                named = compose_drafter_config(folder / f"{named}.yaml", {}, trust)
            beside = group is None or group in named  # `empty` says so itself: # @package drafter
            merged = OmegaConf.merge(merged, named if beside else {group: named})
    merged = OmegaConf.merge(merged, config)
    if not ours:  # a value of the file may have come under a name of configs/, as `path` under hydra.utils.get_method
        refuse_foreign(OmegaConf.to_container(merged, resolve=False), file, ALLOWED_TARGETS["drafter"], trust)
    return merged


def is_option(node: Any, value: Any) -> bool:
    """Whether a value is the name of an option, which `with_options` has put in already."""
    return OmegaConf.is_dict(node) and isinstance(value, str)


def target_object(config: Any) -> Any:
    from hydra.utils import get_object

    return get_object(config._target_)


def resolve_parts(word: str, config: Any, trust: Collection[str] = ()) -> dict[str, ContestantConfig]:
    """The parts of a composite, each looked up like any contestant."""
    named = config.pop("parts", {})
    missing = [role for role, part in named.items() if part is None]
    if missing:
        raise InputError(
            f"drafter {word} needs its part {missing[0]}: contestants=[{{{word}:{{parts:{{{missing[0]}:...}}}}}}] with "
            "a run or a drafter"
        )
    return {str(role): resolve(part, trust=trust) for role, part in named.items()}


def build_contestant(entry: ContestantConfig, base: Any) -> Contestant:
    if entry.run is not None:
        return load_contestant(entry, base)
    made = {role: build_contestant(part, base) for role, part in entry.parts.items()}
    drafter = build_drafter(entry.config, base, **{role: part.drafter for role, part in made.items()})
    parameters = sum(part.parameters for part in made.values())
    if isinstance(drafter, DraftHead):  # off the shelf
        drafter = drafter.for_inference(base)
        parameters = sum(weight.numel() for weight in drafter.trainable_parameters())
    elif isinstance(drafter, StockGenerate):
        parameters = sum(weight.numel() for weight in drafter.parameters())  # the assistant's
    identity = json.dumps(OmegaConf.to_container(entry.config)) + identity_suffix(drafter)
    identity += "".join(f", {role}: {part.identity}" for role, part in made.items())
    return Contestant(drafter, identity, parameters, base.fingerprint())


def identity_suffix(drafter: Any) -> str:
    """What a drafter is made of that its values do not say: weights that lie in a folder, code from outside."""
    weights = weights_hash(drafter) if isinstance(drafter, torch.nn.Module) else ""
    suffix = f", weights {weights}" if weights else ""
    module = sys.modules[type(drafter).__module__]
    if module.__name__.partition(".")[0] == "ctcdraft" or getattr(module, "__file__", None) is None:
        return suffix
    return f"{suffix}, code {short_hash(Path(str(module.__file__)).read_bytes())}"


def load_contestant(entry: ContestantConfig, base: Any) -> Contestant:
    from hydra.utils import instantiate

    assert entry.run is not None
    paths = reading_config(entry)
    drafter = load_drafter(entry.run, base, paths, entry.trust)
    parameters = sum(weight.numel() for weight in drafter.trainable_parameters())
    run = RunDirectory(entry.run)
    config: Any = OmegaConf.to_container(entry.config.drafter, resolve=True)
    if paths is not None:
        config["growth" if "growth" in config else "paths"] = OmegaConf.to_container(paths, resolve=True)
    # Weights and YAML: another beam over the same weights is another contestant.
    identity = (
        f"config {short_hash(json.dumps(config, sort_keys=True).encode())}, weights {short_hash(run.head.read_bytes())}"
    )
    identity += identity_suffix(drafter)
    fingerprint = json.loads((run.path / "fingerprint.json").read_text())
    objective = instantiate(entry.config.objective) if "objective" in entry.config else None
    read_by = getattr(drafter, "paths", None)
    refuse_incompatible(objective, read_by)
    crossed = mismatch(objective, read_by)
    return Contestant(drafter, identity, parameters, fingerprint, crossed)


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def reading_config(entry: ContestantConfig) -> Any | None:
    """RUN@NAME: a way to read frames, or for a drafter of several steps a way to grow."""
    if entry.paths is None:
        return None
    file = DRAFTER_CONFIGS / ("growth" if "growth" in entry.config.drafter else "paths") / f"{entry.paths}.yaml"
    if not file.is_file():
        there = ", ".join(sorted(file.stem for file in file.parent.glob("*.yaml")))
        raise InputError(f"@{entry.paths} is no way to read a head; there are {there}")
    return compose_drafter_config(file, {}, entry.trust)
