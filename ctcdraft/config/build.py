"""Objects from config nodes: the base of a dry run, and untrained or trained drafters."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.errors import InputError


def meta_base(config: Any) -> Any:
    """Return the base of a `base` node on the meta device if it cannot be loaded on this machine, else None.

    Only bases that `load_base` loads can be planned for without weights.
    """
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=True)
    if values["_target_"] != "ctcdraft.models.loading.load_base":
        return None
    return instantiate({**values, "_target_": "ctcdraft.models.meta.meta_base_if_absent", "_convert_": "all"})


def portable_config(node: Any) -> Any:
    """Return the plain values of a node, with paths inside this repository relative to its root.

    So files that are written into run directories do not depend on where the repository is.
    """
    from omegaconf import OmegaConf

    def portable(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: portable(item) for key, item in value.items()}
        if isinstance(value, list):
            return [portable(item) for item in value]
        return value.removeprefix(f"{REPOSITORY}/") if isinstance(value, str) else value

    return portable(OmegaConf.to_container(node, resolve=True))


def build_drafter(config: Any, base: Any, **parts: Any) -> Any:
    """Return the drafter of a `drafter` node for this base.

    Args:
        parts: the drafters that a composite drafter combines, by role.
    """
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=True)
    values.pop("name", None)  # names report rows and files; no constructor takes it
    return instantiate(values, base=base, **parts)


def load_drafter(run: Path, base: Any, tree: Any | None, trust: Collection[str] = ()) -> Any:
    """Return the trained drafter of a run.

    Args:
        tree: config of another tree builder; None for the run's own.
        trust: further classes that the run's config may call (allowed.py).
    """
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
