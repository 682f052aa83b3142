"""The page of a comparison, and its publication in `results`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from ctcdraft.errors import InputError
from ctcdraft.io import write_text
from studies import results
from studies.comparison.measure import failed_rows
from studies.comparison.store import RULES, TRAININGS, ResultStore
from studies.comparison.tables import rebuild

TITLES = {
    "main": "All heads: training, tau, draft cost, speed-up",
    "main_timed": "The same, of those that were timed on the embedded base",
    "main_further": "Further bases",
    "main_speedups": "Speed-up with adaptive trees, in short",
    "heads": "Speed-up, timed, with adaptive trees (intervals over questions)",
    "heads_fixed": "Timed, with trees of 16 nodes",
    "heads_again": "Speed-ups that were timed twice (of decoding, computed from tau and costs of the same loop)",
    "heads_tau": "tau at 16 nodes by budget, first seed (intervals over questions)",
    "main_seeds": "tau of every seed at 16 nodes",
    "heads_training": "Training",
    "heads_cost": "Counted cost of a draft",
    "claims": "Differences in tau: t intervals over seeds, then those over seeds and questions",
    "claims_questions": "The same with one seed (intervals over questions)",
    "claims_speed": "Differences in speed-up, with adaptive trees and with 16 nodes (intervals over questions)",
    "doublings": "tau gained by twice the budget, 16 nodes, first seed (intervals over questions)",
    "crossed": "Body, loss, correction and tree: tau at 16 nodes, first seed",
    "crossed_effects": "Effect of each factor, all pairs that differ in it alone (intervals over questions)",
    "crossed_trees": "Effect of each tree, all cells that have both (intervals over questions)",
    "crossed_decided": "Pairs of cells with several seeds: t intervals over seeds, then those over seeds and questions",
    "crossed_again": "The same with one cell at another learning rate",
}


def write_page(store: ResultStore, rules: Mapping[str, Any]) -> Path:
    """Write CSV files, figures and page.md below out/results/comparison; return that folder."""
    folder = store.out / "results" / "comparison"
    rebuild(rules, store, folder)
    parts = ["# The comparison"]
    for name, title in TITLES.items():
        if text := table_text(folder, name):
            parts += [f"## {title}", f"<!-- table: {name} -->\n{text}<!-- /table -->"]
    parts += [f"![]({file.name})" for file in sorted(folder.glob("*.svg"))]
    write_text(folder / "page.md", "\n\n".join(parts) + "\n")
    print(f"the page is {folder / 'page.md'}")
    return folder


def table_text(folder: Path, name: str) -> str:
    """Return a table as Markdown; nothing where nothing of it is measured yet."""
    try:
        text = results.table(name, folder.parents[1])
    except (FileNotFoundError, pd.errors.UndefinedVariableError, KeyError):
        return ""
    return text if text.count("\n") > 2 else ""


def publish(store: ResultStore, rules: Mapping[str, Any]) -> None:
    """Replace tables, figures and their rules in `results`; README.md is left for a person to write."""
    if not store.measured():
        raise InputError(f"{store.evaluations} holds no evaluation; run the comparison before publish=true")
    folder = write_page(store, rules)
    # Not the rows of all trainings, to which other processes append; an earlier version also had an archive.
    for old in [file for pattern in ("*.csv", "*.svg", "raw.tar.gz") for file in store.results.glob(pattern)]:
        if old.name != TRAININGS:
            old.unlink()
    for new in [*folder.glob("*.csv"), *folder.glob("*.svg")]:
        shutil.copyfile(new, store.results / new.name)
    write_text(store.results / RULES, json.dumps(rules, indent=1) + "\n")
    if failed := failed_rows(store.measured(), rules["evaluations"]):
        raise InputError(f"{len(failed)} rows failed a check (losslessness or replay) and are in no table, see above")
