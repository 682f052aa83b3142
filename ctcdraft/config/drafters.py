"""Drafters from config nodes, trained or not."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ctcdraft.config.allowed import read_run_config
from ctcdraft.errors import InputError
from ctcdraft.training.run_directory import RunDirectory


def build_drafter(config: Any, base: Any, **parts: Any) -> Any:
    """Return the drafter of a `drafter` node for this base.

    Args:
        parts: the drafters that a composite drafter combines, by role.
    """
    values: Any = OmegaConf.to_container(config, resolve=True)
    values.pop("name", None)  # names report rows and files; no constructor takes it
    return instantiate(values, base=base, **parts)


def load_drafter(run: Path, base: Any, tree: Any | None, trust: Collection[str] = ()) -> Any:
    """Return the trained drafter of a run.

    Args:
        tree: config of another tree builder; None for the run's own.
        trust: further classes that the run's config may call (allowed.py).
    """
    directory = RunDirectory(run)
    directory.require()
    directory.refuse_other_base(base.fingerprint())
    config = read_run_config(directory.config, trust).drafter
    if tree is not None:
        config.tree = tree
    try:
        drafter = build_drafter(config, base)
    except InstantiationException as error:
        raise drafter_config_error(error, directory.config) from error
    directory.load_head(drafter)
    return drafter.for_inference(base)


def drafter_config_error(error: Exception, file: Path) -> Exception:
    """Return an InputError for wrong values and for arguments of another version, else the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InputError):
            return InputError(f"{file}: {cause}")
        cause = cause.__cause__
    if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
        return InputError(
            f"{file} names {unknown[1]}, which no part of a drafter has in this version; read the run "
            "with the version that trained it, or train it again"
        )
    return error
