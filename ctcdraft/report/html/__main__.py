"""`python -m ctcdraft.report.html FOLDER ...`: render the pages and figures of finished evaluations again."""

from __future__ import annotations

from pathlib import Path

from ctcdraft.errors import InputError, run_cli
from ctcdraft.report.html.files import rebuild_page


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        return print(__doc__)
    if not arguments:
        raise InputError("no evaluation named; give folders with a report.json in each")
    for folder in map(Path, arguments):
        print(rebuild_page(folder))


if __name__ == "__main__":
    run_cli("pages", main)
