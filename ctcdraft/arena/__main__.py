"""`python -m ctcdraft.arena FOLDER...`: every table and figure of finished comparisons again, from their logs alone."""

from __future__ import annotations

import sys

from ctcdraft.arena.hold import print_anew
from ctcdraft.errors import InputError

if __name__ == "__main__":
    try:
        if not sys.argv[1:]:
            raise InputError("name the folders of finished comparisons: python -m ctcdraft.arena results/arena/*")
        print_anew(sys.argv[1:])
    except InputError as error:
        print(f"arena: {error}", file=sys.stderr)
        raise SystemExit(1) from None
