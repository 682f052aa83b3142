"""A comparison from its rules to its page, stage by stage; every stage goes on where it stood."""

from __future__ import annotations

from ctcdraft.arena import page
from ctcdraft.arena.book import Book
from ctcdraft.arena.judging import judge
from ctcdraft.arena.measuring import measure_all
from ctcdraft.arena.rules import Rules
from ctcdraft.arena.training import train_all


def hold(rules: Rules) -> None:
    """train: rates, arms and seeds. measure: evaluations and what follows from their lines. page: from files alone."""
    book = Book(rules.out)
    if "train" in rules.stages:
        train_all(rules, book)
    if "measure" in rules.stages:
        measure_all(rules, book)
        judge(rules, book)
    if "page" in rules.stages:
        page.write(rules, book)
        print(f"the page is {rules.out / 'page.md'}")
