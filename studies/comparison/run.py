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


def run_comparison(given: ComparisonConfig) -> None:
    """train: rates, arms and seeds. measure: evaluations, counted. page: verdict and page, from small files alone."""
    book = ResultStore(given.out)
    if "train" in given.stages:
        train_all(given, book)
    if "measure" in given.stages:
        run_evaluations(given, book)
    if {"train", "measure"} & set(given.stages):
        book.write(RULES, given.said)  # not before all that is there was made by these
    if "page" in given.stages:
        write_results(given, book)


def write_results(given: ComparisonConfig, book: ResultStore) -> None:
    write_statistics(given, book)
    page.write_page(given, book)
    print(f"the page is {given.out / 'page.md'}")


def rebuild_pages(folders: Sequence[str]) -> None:
    """Verdict, page and figures of finished comparisons, from what stands in their folders."""
    for folder in folders:
        book = ResultStore(Path(folder))
        write_results(stored_config(book), book)


def stored_config(book: ResultStore) -> ComparisonConfig:
    """Those that a finished comparison was held by, wherever its folder is now."""
    said = book.read(RULES)
    if not said:
        raise InputError(f"{book.out} holds no finished comparison: there is no {RULES}.json")
    try:
        return replace(comparison_config(**said), out=book.out)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise InputError(
            f"{book.out / RULES}.json is of another version ({' '.join(str(error).split())}); print it with that one"
        ) from error
