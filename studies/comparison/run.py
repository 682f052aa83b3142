"""A comparison from its rules to its page, stage by stage; every stage goes on where it stood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ctcdraft.errors import InputError
from studies.comparison import page
from studies.comparison.config import Rules, rules
from studies.comparison.evaluate import measure_all
from studies.comparison.statistics import judge
from studies.comparison.store import RULES, Book
from studies.comparison.train import train_all


def hold(given: Rules) -> None:
    """train: rates, arms and seeds. measure: evaluations, counted. page: verdict and page, from small files alone."""
    book = Book(given.out)
    if "train" in given.stages:
        train_all(given, book)
    if "measure" in given.stages:
        measure_all(given, book)
    if {"train", "measure"} & set(given.stages):
        book.write(RULES, given.said)  # not before all that is there was made by these
    if "page" in given.stages:
        judge_and_print(given, book)


def judge_and_print(given: Rules, book: Book) -> None:
    judge(given, book)
    page.write(given, book)
    print(f"the page is {given.out / 'page.md'}")


def print_anew(folders: Sequence[str]) -> None:
    """Verdict, page and figures of finished comparisons, from what stands in their folders."""
    for folder in folders:
        book = Book(Path(folder))
        judge_and_print(kept_rules(book), book)


def kept_rules(book: Book) -> Rules:
    """Those that a finished comparison was held by, wherever its folder is now."""
    said = book.read(RULES)
    if not said:
        raise InputError(f"{book.out} holds no finished comparison: there is no {RULES}.json")
    try:
        return replace(rules(**said), out=book.out)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise InputError(
            f"{book.out / RULES}.json is of another version ({' '.join(str(error).split())}); print it with that one"
        ) from error
