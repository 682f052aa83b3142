"""Command line of a study: overrides of configs/evaluate.yaml, as evaluate.py takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hydra.errors import HydraException, InstantiationException
from omegaconf.errors import OmegaConfBaseException

from ctcdraft.config.cli import compose_config, config_error, find_input_error
from ctcdraft.config.command_line import quote_paths
from ctcdraft.errors import InputError


def run_overrides(run: Callable[[Any], None], overrides: Sequence[str]) -> None:
    """Call `run` with the config of `evaluate.py OVERRIDES`; raise InputError for what is wrong with it."""
    try:
        config = compose_config("evaluate", *quote_paths(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(config_error(error, "evaluate") or str(error)) from error
    try:
        run(config)
    except InstantiationException as error:  # Hydra's wrapper of what a constructor raised
        if (refused := find_input_error(error)) is None:
            raise
        raise refused from error
