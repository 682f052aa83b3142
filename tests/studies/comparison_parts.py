"""Comparison configs for tests: a shipped experiment with overrides."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate

from ctcdraft.config.cli import CONFIGS, register_resolvers
from studies.comparison.config import ComparisonConfig


def load_comparison_config(experiment: str, *overrides: str) -> ComparisonConfig:
    register_resolvers()
    arguments = [f"experiment={experiment}", *overrides]
    if GlobalHydra.instance().is_initialized():
        return instantiate(compose("evaluate", arguments).arena, _convert_="all")
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return instantiate(compose("evaluate", arguments).arena, _convert_="all")
