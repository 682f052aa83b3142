"""Drafters to compare, from the items of contestants=: trained runs, drafters without weights, and composites."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from ctcdraft.config.allowed import ALLOWED_TARGETS, read_drafter_config, read_run_config, refuse_foreign
from ctcdraft.config.build import build_drafter, load_drafter
from ctcdraft.config.cli import CONFIGS
from ctcdraft.config.contestant_files import DRAFTER_CONFIGS, drafter_file, split_reading
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import Contestant, StockGenerate
from ctcdraft.models.fingerprint import weights_hash
from ctcdraft.objectives.compatibility import mismatch, refuse_incompatible
from ctcdraft.renamed import current, current_option
from ctcdraft.training.run_directory import RunDirectory


@dataclass(frozen=True)
class ContestantConfig:
    """One item of contestants=, resolved.

    run: the run directory, or None for a drafter without one.
    tree: the tree option of RUN@TREE that replaces the run's own.
    parts: the drafters of a composite, by role.
    trust: further classes that the run's config may call.
    """

    name: str
    run: Path | None
    config: Any
    tree: str | None
    parts: dict[str, ContestantConfig] = field(default_factory=dict)
    trust: Collection[str] = ()

    def runs(self) -> Iterator[ContestantConfig]:
        """Yield those of this contestant and its parts that are runs."""
        for entry in (self, *(run for part in self.parts.values() for run in part.runs())):
            if entry.run is not None:
                yield entry


def resolve(name_or_mapping: Any, untrained: bool = False, trust: Collection[str] = ()) -> ContestantConfig:
    """Return the contestant of one item of contestants=.

    An item is a run directory (RUN or RUN@TREE), a drafter of configs/drafter or configs/outside, or a YAML file;
    {draft_model:{path:FOLDER}} is a drafter with values of its own.

    Args:
        untrained: accept drafters that have weights but no run, to be timed with random weights.
        trust: further classes that a run, or a YAML file outside configs/, may call.
    """
    values: dict[str, Any] = {}
    name = str(name_or_mapping)
    if isinstance(name_or_mapping, Mapping):
        name, values = next(iter(name_or_mapping.items()))
        values = current(OmegaConf.to_container(values) if OmegaConf.is_config(values) else values or {}, "drafter")
    path, tree = split_reading(name)
    run = RunDirectory(Path(path))
    if run.config.is_file():
        if values:
            raise InputError(f"{path} is a run and has its own values; {dict(values)} cannot be given")
        config = read_run_config(run.config, trust)
        tree = current_tree(config.drafter, tree)
        row_name = f"{config.drafter.name}{tree and f'@{tree}'}"
        return ContestantConfig(row_name, run.path, config, tree or None, trust=trust)
    config = compose_drafter_config(drafter_file(name, run.path), values, trust)
    for key in values:
        if key not in config:
            raise InputError(f"drafter {name} has no value {key}; it has {', '.join(map(str, config))}")
    roles = list(config.get("parts", {}))
    for role in values.get("parts", {}):
        if role not in roles:
            raise InputError(f"drafter {name} has no part {role}; it has {', '.join(map(str, roles))}")
    # A text for a mapping is the name of an option, which compose_drafter_config has merged already.
    plain = {
        key: value for key, value in values.items() if not (OmegaConf.is_dict(config[key]) and isinstance(value, str))
    }
    config = OmegaConf.merge(config, plain)
    target = get_object(config._target_)
    if not untrained and isinstance(target, type) and issubclass(target, DraftHead) and not target.usable_untrained:
        raise InputError(f"drafter {name} has weights: train it (train.py drafter={name}) and name its run directory")
    return ContestantConfig(config.name, None, config, None, resolve_parts(name, config, trust), trust)


def compose_drafter_config(file: Path, chosen: Mapping[str, Any], trust: Collection[str] = ()) -> Any:
    """Return a drafter's YAML with its defaults list resolved; a file outside configs/ is checked as a foreign one.

    Args:
        chosen: options that replace those of the defaults list, by group: {tree: chain}.
    """
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
                options = sorted(option.stem for option in folder.glob("*.yaml"))
                if named not in options:
                    raise InputError(f"{group}: {named} is none of {', '.join(options)}")
                named = compose_drafter_config(folder / f"{named}.yaml", {}, trust)
            same_level = group is None or group in named  # an option with `# @package drafter` contains its group
            merged = OmegaConf.merge(merged, named if same_level else {group: named})
    merged = OmegaConf.merge(merged, config)
    if not ours:  # merged with a file of configs/, a value may have become the `path` of hydra.utils.get_method
        refuse_foreign(OmegaConf.to_container(merged, resolve=False), file, ALLOWED_TARGETS["drafter"], trust)
    return merged


def resolve_parts(name: str, config: Any, trust: Collection[str] = ()) -> dict[str, ContestantConfig]:
    """Resolve the parts of a composite drafter, each like any item of contestants=."""
    parts = config.pop("parts", {})
    for role, part in parts.items():
        if part is None:
            raise InputError(
                f"drafter {name} needs its part {role}: contestants=[{{{name}:{{parts:{{{role}:...}}}}}}] with a run "
                "or a drafter"
            )
    return {str(role): resolve(part, trust=trust) for role, part in parts.items()}


def build_contestant(entry: ContestantConfig, base: Any) -> Contestant:
    """Return the contestant with its drafter built, or loaded from its run, for this base."""
    if entry.run is not None:
        return load_contestant(entry, base)
    parts = {role: build_contestant(part, base) for role, part in entry.parts.items()}
    drafter = build_drafter(entry.config, base, **{role: part.drafter for role, part in parts.items()})
    parameters = sum(part.parameters for part in parts.values())
    if isinstance(drafter, DraftHead):  # usable without training, or timed with random weights
        drafter = drafter.for_inference(base)
        parameters = sum(weight.numel() for weight in drafter.trainable_parameters())
    elif isinstance(drafter, StockGenerate):
        parameters = sum(weight.numel() for weight in drafter.parameters())  # of the assistant model
    identity = json.dumps(OmegaConf.to_container(entry.config)) + identity_suffix(drafter)
    identity += "".join(f", {role}: {part.identity}" for role, part in parts.items())
    return Contestant(drafter, identity, parameters, base.fingerprint())


def identity_suffix(drafter: Any) -> str:
    """Return hashes of what a drafter's config does not determine: weights in a folder, code outside the package."""
    weights = weights_hash(drafter) if isinstance(drafter, torch.nn.Module) else ""
    suffix = f", weights {weights}" if weights else ""
    module = sys.modules[type(drafter).__module__]
    if module.__name__.partition(".")[0] == "ctcdraft" or getattr(module, "__file__", None) is None:
        return suffix
    return f"{suffix}, code {short_hash(Path(str(module.__file__)).read_bytes())}"


def load_contestant(entry: ContestantConfig, base: Any) -> Contestant:
    assert entry.run is not None
    tree = tree_config(entry)
    drafter = load_drafter(entry.run, base, tree, entry.trust)
    parameters = sum(weight.numel() for weight in drafter.trainable_parameters())
    run = RunDirectory(entry.run)
    config: Any = OmegaConf.to_container(entry.config.drafter, resolve=True)
    if tree is not None:
        config["tree"] = OmegaConf.to_container(tree, resolve=True)
    # The config too: the same weights with another beam width are another contestant.
    identity = (
        f"config {short_hash(json.dumps(config, sort_keys=True).encode())}, weights {short_hash(run.head.read_bytes())}"
    )
    identity += identity_suffix(drafter)
    fingerprint = json.loads((run.path / "fingerprint.json").read_text())
    objective = instantiate(entry.config.objective) if "objective" in entry.config else None
    frame_tree = getattr(drafter, "frame_tree", None)
    refuse_incompatible(objective, frame_tree)
    return Contestant(drafter, identity, parameters, fingerprint, mismatch(objective, frame_tree))


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def current_tree(drafter: Any, option: str) -> str:
    """Return the present option of drafter/tree for RUN@OPTION, which may be an old name of one of two groups."""
    return current_option("drafter/paths" if "body" in drafter else "drafter/growth", option)


def tree_config(entry: ContestantConfig) -> Any | None:
    """Return the config of the tree builder that RUN@TREE names; None for the run's own."""
    if entry.tree is None:
        return None
    file = DRAFTER_CONFIGS / "tree" / f"{entry.tree}.yaml"
    if not file.is_file():
        options = ", ".join(sorted(file.stem for file in file.parent.glob("*.yaml")))
        raise InputError(f"@{entry.tree} is not an option of drafter/tree; the options are {options}")
    return compose_drafter_config(file, {}, entry.trust)
