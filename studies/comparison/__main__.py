"""`python -m studies.comparison experiment=arena`: a comparison; `... FOLDER...`: the pages of finished ones again.

Pages are made again from the JSON files in their folders.
"""

from __future__ import annotations

from typing import Any

from hydra.utils import instantiate

from ctcdraft.errors import InputError, run_cli
from studies.command_line import run_overrides
from studies.comparison.evaluate import run_evaluations
from studies.comparison.page import rebuild_pages, write_results
from studies.comparison.store import RULES, ResultStore
from studies.comparison.train import train_all


def run(node: Any) -> None:
    """Run the stages of the comparison `arena=`; each continues where it was interrupted."""
    if node.arena is None:
        raise InputError("arena=null names no comparison; give experiment=arena or another of them")
    config = instantiate(node.arena, _convert_="all")
    store = ResultStore(config.out)
    if "train" in config.stages:
        train_all(config, store)
    if "measure" in config.stages:
        run_evaluations(config, store)
    if {"train", "measure"} & set(config.stages):
        store.write(RULES, config.raw_config)  # last, so that all stored results were made by this config
    if "page" in config.stages:
        write_results(config, store)


def main(folders: list[str]) -> None:
    if {"-h", "--help"} & set(folders):
        return print(__doc__)
    if any("=" in folder for folder in folders):
        return run_overrides(run, folders)
    if not folders:
        raise InputError("give experiment=arena, or the folders of finished comparisons")
    rebuild_pages(folders)


if __name__ == "__main__":
    run_cli("arena", main)
