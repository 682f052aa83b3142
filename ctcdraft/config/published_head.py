"""Folders of published draft heads, as `PublishedHead.save_pretrained` writes them: reading, checking, building."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from safetensors.torch import load_file

from ctcdraft.config.allowed import HEAD_TARGETS, refuse_foreign
from ctcdraft.config.drafters import build_drafter, drafter_config_error
from ctcdraft.drafters.base import DraftHead
from ctcdraft.drafters.tree_policy import MAX_NODES, AdaptivePolicy
from ctcdraft.errors import InputError
from ctcdraft.models.aux_layers import refuse_shared_layers, view_of_layers
from ctcdraft.renamed import current
from ctcdraft.training import run_directory
from ctcdraft.training.run_directory import load_trainable_state, refuse_other_base

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
MAX_NAME_LENGTH = 200
# Not the chat template: where a prompt is formatted by others, it does not matter.
MATCHING_FIELDS = ("weights", "width", "vocabulary", "taps", "tokenizer")


def is_published_head(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and (folder / WEIGHTS_FILE).is_file()


def read_head_config(folder: Path, trust: Collection[str] = ()) -> dict[str, Any]:
    """Return config.json; raise InputError where it is damaged, or names classes that are not allowed."""
    try:
        values = current(json.loads((folder / CONFIG_FILE).read_text()))
    except (OSError, ValueError, RecursionError) as error:
        if run_directory.RunDirectory(folder).config.is_file():
            sentence = f"{folder} is a run directory, not a published head; PublishedHead.from_run reads it"
            raise InputError(sentence) from error
        raise damaged_file_error(folder / CONFIG_FILE) from error
    if not isinstance(values, dict) or not isinstance(values.get("drafter", {}), dict):
        raise damaged_file_error(folder / CONFIG_FILE)
    missing = [key for key in ("drafter", "nodes", "fingerprint") if key not in values]
    if missing:
        raise InputError(f"{folder / CONFIG_FILE} has no `{missing[0]}`, so it is not a head of ctcdraft")
    fingerprint, nodes = values["fingerprint"], values["nodes"]
    layers = fingerprint.get("taps") if isinstance(fingerprint, dict) else None
    # The layers become a part of the base's config, whose nodes are instantiated: nothing but names and numbers.
    if (
        not isinstance(layers, list)
        or layers[:1] != ["last"]
        or not all(layer == "last" or type(layer) is int for layer in layers)
    ):
        raise damaged_file_error(folder / CONFIG_FILE)
    if type(nodes) is not int or not 1 <= nodes <= MAX_NODES or not isinstance(fingerprint.get("base"), str):
        raise damaged_file_error(folder / CONFIG_FILE)
    refuse_foreign({"drafter": values["drafter"]}, folder / CONFIG_FILE, HEAD_TARGETS, trust)
    name = values["drafter"].get("name", "")
    if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME_LENGTH:  # terminals, tables, figures
        raise InputError(f"drafter.name in {folder / CONFIG_FILE} must be printable, got {name!a:.80}")
    return values


def read_policy(config_values: Mapping[str, Any]) -> AdaptivePolicy | None:
    """Return the policy of config.json, None without one; raise InputError for one that is damaged."""
    if "policy" not in config_values:
        return None
    try:
        return AdaptivePolicy.from_json(config_values["policy"])
    except InputError as error:
        raise InputError(f"{CONFIG_FILE}: {error}") from error


def load_published_drafter(
    folder: Path, values: dict[str, Any], base: Any, must_agree: Sequence[str] = MATCHING_FIELDS
) -> DraftHead:
    """Return the drafter of a published head for this base. values: of `read_head_config`."""
    refuse_other_base(values["fingerprint"], base.fingerprint(), folder, must_agree)
    try:
        drafter = build_drafter(OmegaConf.create(values["drafter"]), base)
    except (InstantiationException, OmegaConfBaseException) as error:
        known = drafter_config_error(error, folder / CONFIG_FILE)
        raise known if isinstance(known, InputError) else damaged_file_error(folder / CONFIG_FILE) from error
    if not isinstance(drafter, DraftHead):
        raise InputError(f"{folder / CONFIG_FILE} names {values['drafter'].get('_target_')}, which is not a draft head")
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise damaged_file_error(folder / WEIGHTS_FILE) from error
    load_trainable_state(drafter, tensors, folder / WEIGHTS_FILE)
    return drafter.for_inference(base)


def run_config_of(values: Mapping[str, Any]) -> Any:
    """Return what config.yaml of a run would say of a published head: its drafter, and the layers it reads."""
    return OmegaConf.create({"drafter": values["drafter"], "base": {"aux_layers": values["fingerprint"]["taps"]}})


def open_published_head(
    folder: Path, base: Any, trust: Collection[str], tree: Any | None = None
) -> tuple[DraftHead, Path, dict[str, Any]]:
    """Return the drafter of a published head, its file of weights, and the fingerprint of its base.

    Args:
        tree: config of another tree builder; None for the head's own.
    """
    values = read_head_config(folder, trust)
    if tree is not None:
        values["drafter"]["tree"] = OmegaConf.to_container(tree, resolve=True)
    view = view_of_layers(base, values["fingerprint"]["taps"])
    drafter = load_published_drafter(folder, values, view, run_directory.MATCHING_FIELDS)
    refuse_shared_layers(drafter, view, folder)
    return drafter, folder / WEIGHTS_FILE, values["fingerprint"]


def damaged_file_error(file: Path) -> InputError:
    return InputError(f"{file} is missing or damaged; give a folder written by save_pretrained, or download it again")
