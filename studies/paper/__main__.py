"""`python -m studies.paper experiment=table_mt_bench [table.recorded=FOLDER] [table.reports=[FILE,...]]`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ctcdraft.config.schema import as_list
from ctcdraft.errors import InputError, run_cli
from studies.command_line import run_overrides
from studies.paper import export
from studies.paper.tables import read_table


def run(config: Any) -> None:
    """Write the table `table.name=` as Markdown, LaTeX and CSV."""
    if config.table.name is None:
        raise InputError("table.name=null names no table; give experiment=table_mt_bench or another of them")
    table = read_table(config.table.name, config.table.recorded, as_list(config.table.reports, "table.reports"))
    out = Path(config.out) if config.out is not None else Path("runs") / "tables" / config.table.name
    if (out / "table.md").exists() and not config.overwrite:
        raise InputError(f"{out} holds a table; choose another out=, or add overwrite=true to replace it")
    export.write(out, table)
    print(f"{export.markdown(table)}\nthe table is {out / 'table.md'}, and beside it as LaTeX and CSV")


if __name__ == "__main__":
    run_cli("paper", partial(run_overrides, run))
