"""The front door: where config becomes plain values, and a bad input one sentence. No room behind imports it."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.errors import InputError


def meta_base(config: Any) -> Any:
    """The base of a `base` node on paper, where it cannot be loaded on this machine; else None. Only what `load_base`
    loads has a config that a plan can be made from."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=True)
    if values["_target_"] != "ctcdraft.models.loading.load_base":
        return None
    return instantiate({**values, "_target_": "ctcdraft.models.meta.meta_base_if_absent", "_convert_": "all"})


def portable_config(node: Any) -> Any:
    """The values of a node for a file that others read: places in this repository by their way from its root, so that
    it says the same wherever the repository lies."""
    from omegaconf import OmegaConf

    def portable(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: portable(one) for key, one in value.items()}
        if isinstance(value, list):
            return [portable(one) for one in value]
        return value.removeprefix(f"{REPOSITORY}/") if isinstance(value, str) else value

    return portable(OmegaConf.to_container(node, resolve=True))


def build_drafter(config: Any, base: Any, **parts: Any) -> Any:
    """The drafter of a `drafter` node, for this base; its YAML's `name` is for rows and files, not for it.
    parts: the drafters that a composite is made of."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=True)
    values.pop("name", None)
    return instantiate(values, base=base, **parts)


def load_drafter(run: Path, base: Any, tree: Any | None, trust: Collection[str] = ()) -> Any:
    """Return the trained drafter of a run; `tree`: config of another tree builder, `trust`: see allowed.py."""
    from hydra.errors import InstantiationException

    from ctcdraft.config.allowed import read_run_config
    from ctcdraft.training.run_directory import RunDirectory

    directory = RunDirectory(run)
    directory.require()
    directory.refuse_other_base(base.fingerprint())
    config = read_run_config(directory.config, trust).drafter
    if tree is not None:
        config.tree = tree
    try:
        drafter = build_drafter(config, base)
    except InstantiationException as error:
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            raise InputError(
                f"{directory.config} names {unknown[1]}, which no part of a drafter has in this version; read the run "
                "with the version that trained it, or train it again"
            ) from error
        raise
    directory.load_head(drafter)
    return drafter.for_inference(base)
