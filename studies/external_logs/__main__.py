"""`python -m studies.external_logs recorded.path=FILE [recorded.baseline=FILE] [out=FOLDER]`: measure answer files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError, run_cli
from ctcdraft.evaluation.environment import environment
from ctcdraft.evaluation.output_dir import refuse_existing_report
from ctcdraft.report.html import files
from studies.command_line import run_overrides
from studies.external_logs import compare, page
from studies.external_logs.read import read_log


def run(config: Any) -> None:
    """Measure `recorded.path=`, against `recorded.baseline=` where it is given, and write the report."""
    if config.recorded.path is None:
        alone = "as recorded.baseline= alone is not enough"
        raise InputError(f"recorded.path= is missing; give the answer file of the run, {alone}")
    log = read_log(config.recorded.path)
    baseline = read_log(config.recorded.baseline) if config.recorded.baseline is not None else None
    comparison = compare.compare_logs(log, baseline, config.seed)
    out = Path(config.out) if config.out is not None else Path("runs") / "recorded" / log.name.partition(".")[0]
    refuse_existing_report(out, config.overwrite)
    circumstances = environment()
    compare.write(out, comparison, circumstances)
    page.write_page(out, comparison, circumstances)
    print(compare.terminal(comparison))
    print(f"the report is {out / 'report.md'}, and as a page: {out / files.PAGE_FILE}")


if __name__ == "__main__":
    run_cli("external_logs", partial(run_overrides, run))
