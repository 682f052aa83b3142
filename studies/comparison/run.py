"""A comparison from its config to its page; every stage continues where it was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ctcdraft.errors import InputError
from studies.comparison import page
from studies.comparison.config import ComparisonConfig, comparison_config
from studies.comparison.evaluate import run_evaluations
from studies.comparison.statistics import write_statistics
from studies.comparison.store import RULES, ResultStore
from studies.comparison.train import train_all


def run_comparison(config: ComparisonConfig) -> None:
    """Run the configured stages: train heads; measure them; compute statistics and write the page."""
    store = ResultStore(config.out)
    if "train" in config.stages:
        train_all(config, store)
    if "measure" in config.stages:
        run_evaluations(config, store)
    if {"train", "measure"} & set(config.stages):
        store.write(RULES, config.raw_config)  # last, so that all stored results were made by this config
    if "page" in config.stages:
        write_results(config, store)


def write_results(config: ComparisonConfig, store: ResultStore) -> None:
    write_statistics(config, store)
    page.write_page(config, store)
    print(f"the page is {config.out / 'page.md'}")


def rebuild_pages(folders: Sequence[str]) -> None:
    """Write statistics, page and figures of finished comparisons again, from their JSON files alone."""
    for folder in folders:
        store = ResultStore(Path(folder))
        write_results(stored_config(store), store)


def stored_config(store: ResultStore) -> ComparisonConfig:
    """Return the config of a finished comparison, wherever its folder is now."""
    stored = store.read(RULES)
    if not stored:
        raise InputError(f"{store.out} holds no finished comparison: there is no {RULES}.json")
    try:
        return replace(comparison_config(**stored), out=store.out)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise InputError(
            f"{store.out / RULES}.json is of another version ({' '.join(str(error).split())}); use that version"
        ) from error
