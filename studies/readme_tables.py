"""`python -m studies.readme_tables`: the cells of every table that a README quotes from results/, written
anew. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.errors import tell_and_exit
from ctcdraft.io import write_text
from studies import readme_comparison_tables as compared
from studies import readme_evaluation_tables as evaluated
from studies import readme_grid_tables as crossed
from studies import readme_weight_tables as weighed
from studies.readme_quotes import Quoted

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
