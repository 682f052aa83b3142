"""Drafters to compare, from the items of contestants=: trained heads, drafters without weights, and composites."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from ctcdraft.config.allowed import ALLOWED_TARGETS, parse_trust, read_drafter_config, read_run_config, refuse_foreign
from ctcdraft.config.cli import CONFIGS
from ctcdraft.config.drafters import build_drafter, load_drafter
from ctcdraft.config.early_checks import DRAFTER_CONFIGS, drafter_file, split_reading
from ctcdraft.config.published_head import is_published_head, open_published_head, read_head_config, run_config_of
from ctcdraft.config.schema import as_list, check_config
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import Contestant, StockGenerate
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.models.aux_layers import refuse_shared_layers, view_of_layers
from ctcdraft.models.fingerprint import short_hash, text_hash, weights_hash
from ctcdraft.objectives.compatibility import mismatch, refuse_incompatible
from ctcdraft.renamed import current, current_option
from ctcdraft.training.run_directory import RunDirectory


@dataclass(frozen=True)
class ContestantConfig:
    """One item of contestants=, resolved."""

    name: str
    run: Path | None
    config: Any  # the run's whole config, or the `drafter` node of a drafter without a run
    tree: str | None  # the option of RUN@TREE that replaces the run's own tree builder
    parts: dict[str, ContestantConfig] = field(default_factory=dict)  # the drafters of a composite, by role
    trust: Collection[str] = ()
    published: bool = False  # `run` is the folder of a published head, not a run directory

    def runs(self) -> Iterator[ContestantConfig]:
        """Yield those of this contestant and its parts that are runs."""
        for entry in (self, *(run for part in self.parts.values() for run in part.runs())):
            if entry.run is not None:
                yield entry


def resolve_contestants(config: DictConfig, alone: bool = False) -> dict[str, ContestantConfig]:
    """Return all contestants of evaluate.py by the name of their row, autoregression first; alone: it may be all."""
    items = as_list(config.contestants, "contestants")
    if config.checkpoint is not None:
        items = [config.checkpoint, *(items or ["prompt_lookup"])]
    if not items and not alone:
        raise InputError(
            "contestants=[] leaves nothing to compare; give checkpoint=RUN, or contestants=[RUN,prompt_lookup]"
        )
    entries: dict[str, ContestantConfig] = {}
    for item in [AUTOREGRESSIVE, *items]:
        entry = resolve(item, trust=parse_trust(config.get("trust")))
        if entry in entries.values():
            continue
        name = entry.name
        if name in entries:  # a second run or variant of one drafter: add the run's directory, or the values
            values = ",".join(f"{key}={value}" for key, value in item_values(item)[1].items())
            name += f":{entry.run.name if entry.run else values or item}"
        while name in entries:  # records and rows of a report are found by name
            name += "'"
        entries[name] = entry
    return entries


def resolve(item: Any, untrained: bool = False, trust: Collection[str] = ()) -> ContestantConfig:
    """Return the contestant of one item of contestants=.

    An item is a run directory or the folder of a published head (RUN or RUN@TREE), a drafter of configs/drafter or
    configs/outside, or a YAML file; {draft_model:{path:FOLDER}} is a drafter with values of its own.

    Args:
        untrained: accept drafters that have weights but no run, to be timed with random weights.
        trust: further classes that a run, or a YAML file outside configs/, may call.
    """
    name, values = item_values(item)
    values = current(values, "drafter")
    path, tree = split_reading(name)
    run = RunDirectory(Path(path))
    is_run, published = run.config.is_file(), is_published_head(run.path)
    if is_run or published:
        if values:
            raise InputError(f"{path} is a trained head and has its own values; {values} cannot be given")
        config: Any = read_run_config(run.config, trust) if is_run else run_config_of(read_head_config(run.path, trust))
        # An old name may be one of two groups, of parallel heads and of autoregressive ones.
        tree = current_option("drafter/paths" if "body" in config.drafter else "drafter/growth", tree)
        row_name = f"{config.drafter.name}{tree and f'@{tree}'}"
        return ContestantConfig(row_name, run.path, config, tree or None, trust=trust, published=not is_run)
    config = compose_drafter_config(drafter_file(name, run.path), values, trust)
    for key in values:
        if key not in config:
            raise InputError(f"drafter {name} has no value {key}; it has {', '.join(map(str, config))}")
    roles = list(config.get("parts", {}))
    for role in values.get("parts", {}):
        if role not in roles:
            raise InputError(f"drafter {name} has no part {role}; it has {', '.join(map(str, roles))}")
    # A text for a mapping names an option, which compose_drafter_config has merged already.
    chosen = {key for key, value in values.items() if OmegaConf.is_dict(config[key]) and isinstance(value, str)}
    config = OmegaConf.merge(config, {key: value for key, value in values.items() if key not in chosen})
    check_config(OmegaConf.create({"drafter": config}))
    target = get_object(config._target_)
    # Drafters without weights are no DraftHead, and a target may be a function.
    if not untrained and isinstance(target, type) and issubclass(target, DraftHead) and not target.usable_untrained:
        raise InputError(f"drafter {name} has weights: train it (train.py drafter={name}) and name its run directory")
    for role, part in (parts := config.pop("parts", {})).items():
        if part is None:
            raise InputError(
                f"drafter {name} needs its part {role}: contestants=[{{{name}:{{parts:{{{role}:...}}}}}}] with a run "
                "or a drafter"
            )
    resolved_parts = {str(role): resolve(part, trust=trust) for role, part in parts.items()}
    return ContestantConfig(config.name, None, config, None, resolved_parts, trust)


def item_values(item: Any) -> tuple[str, Mapping[str, Any]]:
    """{draft_model: {frames: 4}}   ->   draft_model, {frames: 4}"""
    name, values = next(iter(item.items())) if isinstance(item, Mapping) else (str(item), {})
    # Resolved here: later the values are cut off from the config into which they interpolate.
    values = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values or {}
    if not isinstance(values, Mapping):
        raise InputError(
            f"the values of contestant {name} must be a mapping, as in {{{name}:{{frames:4}}}}, got {values}"
        )
    return name, values


def compose_drafter_config(file: Path, chosen: Mapping[str, Any], trust: Collection[str] = ()) -> Any:
    """Return a drafter's YAML with its defaults list resolved; a file outside configs/ is checked as a foreign one.

    Hydra itself would compose only files of its search path.

    Args:
        chosen: options that replace those of the defaults list, by group: {tree: chain}.
    """
    ours = file.resolve().is_relative_to(CONFIGS.resolve())
    config: Any = OmegaConf.load(file) if ours else read_drafter_config(file, trust)
    merged: Any = OmegaConf.create({})
    for default in config.pop("defaults", []):
        for group, option in default.items() if hasattr(default, "items") else [(None, default)]:
            group = group and group.removeprefix("override ")
            folder = file.parent if group is None else DRAFTER_CONFIGS / group
            named = option if group is None else chosen.get(group, option)
            if isinstance(named, str) and named.startswith("/"):  # /from/the/top@_here_
                above, _, named = named.removesuffix("@_here_")[1:].rpartition("/")
                folder = CONFIGS / above
            if isinstance(named, str):
                options = sorted(option.stem for option in folder.glob("*.yaml"))
                if named not in options:
                    raise InputError(f"{group}: {named} is none of {', '.join(options)}")
                named = compose_drafter_config(folder / f"{named}.yaml", {}, trust)
            if group in merged:  # overridden: the other option's values go, too
                del merged[group]
            same_level = group is None or group in named  # an option with `# @package drafter` contains its group
            merged = OmegaConf.merge(merged, named if same_level else {group: named})
    merged = OmegaConf.merge(merged, config)
    if not ours:  # merged with a file of configs/, a value may have become the `path` of hydra.utils.get_method
        refuse_foreign(OmegaConf.to_container(merged, resolve=False), file, ALLOWED_TARGETS["drafter"], trust)
    return merged


def load_base(config: DictConfig, entries: Mapping[str, ContestantConfig]) -> Any:
    """Return the base model of the command line, or that of the first run; `base.path=` alone moves the run's own."""
    runs = [run for entry in entries.values() for run in entry.runs()]
    of_runs = [run_base_config(run) for run in runs if not run.published]
    node: Any = config.base if "_target_" in config.base else None
    if node is None and of_runs:
        node = OmegaConf.merge(of_runs[0], {key: value for key, value in config.base.items() if value is not None})
    if node is None or not (node.path or "of" in node):
        head = next((run.run for run in runs if run.published), None)
        what = f"{head} is a published head without a base: give" if head else "no base: give a run as checkpoint=, or"
        raise InputError(f"{what} base=tiny, or base=local base.path=FOLDER")
    if node.path is None:  # base=shape has random weights and takes none of these
        node = OmegaConf.masked_copy(node, [key for key in node if key not in ("path", "device_map", "quantization")])
    layers = [layer for of in (node, *(run.config.base for run in runs)) for layer in of.get("aux_layers", ["last"])]
    node = OmegaConf.merge(node, {"aux_layers": list(dict.fromkeys(layers))})  # each head takes its own of them
    return instantiate(node, device=config.device, dtype=config.dtype).for_inference()


def run_base_config(run: ContestantConfig) -> Any:
    """Return the base config of a run, with the LoRA adapter it trained, if any, and without ZeRO-3 sharding."""
    changed: dict[str, Any] = {"zero3": False} if run.config.base.get("zero3") else {}
    if run.run is not None and run.config.get("adapt") is not None:
        changed["adapted"] = str(RunDirectory(run.run).adapter)
    return OmegaConf.merge(run.config.base, changed)


def build_contestant(entry: ContestantConfig, base: Any) -> Contestant:
    """Return the contestant with its drafter built, or loaded from its run, for this base."""
    if entry.run is not None:
        return load_contestant(entry, entry.run, base)
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


def load_contestant(entry: ContestantConfig, path: Path, base: Any) -> Contestant:
    run, tree = RunDirectory(path), None
    config: Any = OmegaConf.to_container(entry.config.drafter, resolve=True)
    if entry.tree is not None:
        file = DRAFTER_CONFIGS / "tree" / f"{entry.tree}.yaml"
        if not file.is_file():
            options = ", ".join(sorted(file.stem for file in file.parent.glob("*.yaml")))
            raise InputError(f"@{entry.tree} is not an option of drafter/tree; the options are {options}")
        tree = compose_drafter_config(file, {}, entry.trust)
        config["tree"] = OmegaConf.to_container(tree, resolve=True)
    if entry.published:
        drafter, weights, fingerprint = open_published_head(path, base, entry.trust, tree)
    else:
        fingerprint, weights = run.base_fingerprint(), run.head
        view = view_of_layers(base, fingerprint.get("taps", base.aux_layers))
        drafter = load_drafter(path, view, tree, entry.trust)
        refuse_shared_layers(drafter, view, path)
    parameters = sum(weight.numel() for weight in drafter.trainable_parameters())
    # The config too: the same weights with another beam width are another contestant.
    hashes = (text_hash(json.dumps(config, sort_keys=True)), short_hash(weights.read_bytes()))
    identity = f"config {hashes[0]}, weights {hashes[1]}{identity_suffix(drafter)}"
    objective = instantiate(entry.config.objective) if "objective" in entry.config else None
    frame_tree = getattr(drafter, "frame_tree", None)
    refuse_incompatible(objective, frame_tree)
    return Contestant(drafter, identity, parameters, fingerprint, mismatch(objective, frame_tree))


def identity_suffix(drafter: Any) -> str:
    """Return hashes of what a drafter's config does not determine: content of a folder, code outside the package."""
    content = getattr(drafter, "content_hash", "")
    weights = weights_hash(drafter) if isinstance(drafter, torch.nn.Module) else content
    suffix = f", weights {weights}" if weights else ""
    module = sys.modules[type(drafter).__module__]
    if module.__name__.partition(".")[0] == "ctcdraft" or getattr(module, "__file__", None) is None:
        return suffix
    return f"{suffix}, code {short_hash(Path(str(module.__file__)).read_bytes())}"
