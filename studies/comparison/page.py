"""The page of a comparison, and its publication in results/."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from pathlib import Path

import pandas as pd

from ctcdraft.errors import InputError
from ctcdraft.io import write_text
from studies import results
from studies.comparison.store import COSTS, EVALUATIONS, RULES, TRAININGS, ResultStore
from studies.comparison.tables import rebuild

TITLES = {
    "heads": "Speed-up, timed, with adaptive trees (intervals over questions)",
    "heads_fixed": "Timed, with trees of 16 nodes",
    "heads_tau": "tau at 16 nodes by budget, first seed (intervals over questions)",
    "heads_seeds": "tau of every seed",
    "heads_training": "Training",
    "heads_cost": "Counted cost of a draft",
    "claims": "Differences in tau at 16 nodes",
    "crossed": "Body, loss, correction and tree: tau at 16 nodes, first seed",
    "crossed_effects": "Effect of each factor, all pairs that differ in it alone (intervals over questions)",
    "crossed_decided": "Pairs of cells with several seeds (t intervals over seeds)",
}
ARCHIVED = (RULES, TRAININGS, COSTS, EVALUATIONS)


def write_page(store: ResultStore) -> Path:
    """Write CSV files, figures and page.md below out/results/comparison; return that folder."""
    folder = store.out / "results" / "comparison"
    rebuild(store.raw, folder)
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


def publish(store: ResultStore) -> None:
    """Replace archive, CSV files and figures in results/; README.md is left for a person to write."""
    if not store.measured():
        raise InputError(f"{store.evaluations} holds no evaluation; run the comparison before publish=true")
    folder = write_page(store)
    files = sorted(file for name in ARCHIVED if (file := store.raw / name).is_file())
    # Not the rows of all trainings: other processes append to them.
    tables = [[*one.glob("*.csv"), *one.glob("*.svg")] for one in (store.results, folder)]
    old, new = ([file for file in one if file.name != TRAININGS] for one in tables)
    for file in old:
        file.unlink()
    for file in new:
        shutil.copyfile(file, store.results / file.name)
    (store.results / "raw.tar.gz").write_bytes(archive(files))


def archive(files: list[Path]) -> bytes:
    """Return a compressed archive with the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for file in files:
            text = file.read_bytes()
            info = tarfile.TarInfo(file.name)
            info.size, info.mode = len(text), 0o644
            tar.addfile(info, io.BytesIO(text))
    return gzip.compress(buffer.getvalue(), 9, mtime=0)
