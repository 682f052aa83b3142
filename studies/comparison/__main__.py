"""`python -m studies.comparison FOLDER...`: every table and figure of finished comparisons again, from the
JSON files in their folders."""

from __future__ import annotations

from ctcdraft.errors import InputError, tell_and_exit
from studies.comparison.run import print_anew


def main(folders: list[str]) -> None:
    if {"-h", "--help"} & set(folders):
        return print(__doc__)
    if not folders:
        raise InputError("name the folders of finished comparisons: python -m studies.comparison FOLDER")
    print_anew(folders)


if __name__ == "__main__":
    tell_and_exit("arena", main)
