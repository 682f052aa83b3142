"""A comparison from its rules to its page, stage by stage; every stage goes on where it stood."""

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
    """train: rates, arms and seeds. measure: evaluations, counted. page: verdict and page, from small files alone."""
    book = ResultStore(config.out)
    if "train" in config.stages:
        train_all(config, book)
    if "measure" in config.stages:
        run_evaluations(config, book)
    if {"train", "measure"} & set(config.stages):
        book.write(RULES, config.raw_config)  # not before all that is there was made by these
    if "page" in config.stages:
        write_results(config, book)


def write_results(config: ComparisonConfig, store: ResultStore) -> None:
    write_statistics(config, store)
    page.write_page(config, store)
    print(f"the page is {config.out / 'page.md'}")


def rebuild_pages(folders: Sequence[str]) -> None:
    """Verdict, page and figures of finished comparisons, from what stands in their folders."""
    for folder in folders:
        book = ResultStore(Path(folder))
        write_results(stored_config(book), book)


def stored_config(store: ResultStore) -> ComparisonConfig:
    """Those that a finished comparison was held by, wherever its folder is now."""
    stored = store.read(RULES)
    if not stored:
        raise InputError(f"{store.out} holds no finished comparison: there is no {RULES}.json")
    try:
        return replace(comparison_config(**stored), out=store.out)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise InputError(
            f"{store.out / RULES}.json is of another version ({' '.join(str(error).split())}); print it with that one"
        ) from error
