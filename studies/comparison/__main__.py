"""`python -m studies.comparison experiment=arena`: a comparison; `... FOLDER...`: the pages of finished ones again.

Pages are made again from the JSON files in their folders.
"""

from __future__ import annotations

from typing import Any

from hydra.utils import instantiate

from ctcdraft.errors import InputError, run_cli
from studies.command_line import run_overrides
from studies.comparison.run import rebuild_pages, run_comparison


def run(config: Any) -> None:
    """Run the comparison `arena=` of a config of evaluate.py."""
    if config.arena is None:
        raise InputError("arena=null names no comparison; give experiment=arena or another of them")
    run_comparison(instantiate(config.arena, _convert_="all"))


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
