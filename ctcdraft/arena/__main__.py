"""`python -m ctcdraft.arena FOLDER...`: every table and figure of finished comparisons again, from the
JSON files in their folders."""

from __future__ import annotations

import sys

from ctcdraft.arena.hold import print_anew
from ctcdraft.errors import InputError


def main(folders: list[str]) -> None:
    if {"-h", "--help"} & set(folders):
        return print(__doc__)
    if not folders:
        raise InputError("name the folders of finished comparisons: python -m ctcdraft.arena FOLDER")
    print_anew(folders)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        print(f"arena: {error}", file=sys.stderr)
        raise SystemExit(1) from None
