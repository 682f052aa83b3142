"""python -m ctcdraft.report.html FOLDER ...: the pages of finished evaluations, made again; with png=true their
figures as PNG too."""

from __future__ import annotations

from pathlib import Path

from ctcdraft.errors import InputError, tell_and_exit
from ctcdraft.report.html.files import FIGURES, again, pictures

PNG = "png=true"


def main(words: list[str]) -> None:
    if {"-h", "--help"} & set(words):
        return print(__doc__)
    folders = [Path(word) for word in words if word != PNG]
    if not folders:
        raise InputError(f"no evaluation named; give folders with a report.json in each, and {PNG} for PNG files")
    for folder in folders:
        print(again(folder))
        for picture in pictures(folder / FIGURES) if PNG in words else []:
            print(picture)


if __name__ == "__main__":
    tell_and_exit("pages", main)
