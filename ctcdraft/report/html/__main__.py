"""python -m ctcdraft.report.html FOLDER ...: the pages of finished evaluations, made again; with png=true their
figures as PNG too."""

from __future__ import annotations

from pathlib import Path

from ctcdraft.errors import InputError, run_cli
from ctcdraft.report.html.files import FIGURES_FOLDER, export_png, rebuild_page

PNG_OPTION = "png=true"


def main(words: list[str]) -> None:
    if {"-h", "--help"} & set(words):
        return print(__doc__)
    folders = [Path(word) for word in words if word != PNG_OPTION]
    if not folders:
        raise InputError(
            f"no evaluation named; give folders with a report.json in each, and {PNG_OPTION} for PNG files"
        )
    for folder in folders:
        print(rebuild_page(folder))
        for picture in export_png(folder / FIGURES_FOLDER) if PNG_OPTION in words else []:
            print(picture)


if __name__ == "__main__":
    run_cli("pages", main)
