"""`python -m studies.comparison FOLDER...`: every table and figure of finished comparisons again, from the
JSON files in their folders."""

from __future__ import annotations

from ctcdraft.errors import InputError, run_cli
from studies.comparison.run import rebuild_pages


def main(folders: list[str]) -> None:
    if {"-h", "--help"} & set(folders):
        return print(__doc__)
    if not folders:
        raise InputError("name the folders of finished comparisons: python -m studies.comparison FOLDER")
    rebuild_pages(folders)


if __name__ == "__main__":
    run_cli("arena", main)
