"""python -m ctcdraft.evaluation.pages FOLDER ...: the pages of finished evaluations, made again."""

from __future__ import annotations

import sys
from pathlib import Path

from ctcdraft.errors import InputError
from ctcdraft.evaluation.pages.files import again

if __name__ == "__main__":
    try:
        if len(sys.argv) < 2:
            raise InputError("no evaluation named; give folders with a report.json in each")
        for folder in sys.argv[1:]:
            print(again(Path(folder)))
    except InputError as error:
        print(f"pages: {error}", file=sys.stderr)
        raise SystemExit(1) from None
