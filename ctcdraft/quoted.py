"""`python -m ctcdraft.quoted`: the cells of every table that a README quotes from results/, written anew. It knows who
names tables, and measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctcdraft.arena import quotations as compared
from ctcdraft.arena import quotations_grid as crossed
from ctcdraft.arena import quotations_weights as weighed
from ctcdraft.errors import tell_and_exit
from ctcdraft.evaluation import quotations as evaluated
from ctcdraft.evaluation.quoting import Quoted
from ctcdraft.files import write_text
from ctcdraft.front_door import REPOSITORY

TABLES = (*evaluated.TABLES, *compared.TABLES, *crossed.TABLES, *weighed.TABLES)


def written_anew(root: Path, tables: Sequence[Quoted] = TABLES) -> dict[Path, str]:
    """The READMEs below `root` that do not say what results/ beside them does, and what they would say."""
    texts = {root / table.file: (root / table.file).read_text() for table in tables}
    made = dict(texts)
    for table in tables:
        made[root / table.file] = table.replaced(made[root / table.file], root / "results")
    return {file: text for file, text in made.items() if text != texts[file]}


def main(words: Sequence[str] = ()) -> None:
    for file, text in written_anew(REPOSITORY).items():
        write_text(file, text)
        print(f"{file.relative_to(REPOSITORY)} says again what results/ does")


if __name__ == "__main__":
    tell_and_exit("quoted", main)
