"""Command lines of this repository's scripts, run one after the other; what each took. It knows no method."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from ctcdraft.errors import InputError
from ctcdraft.front_door import REPOSITORY


@dataclass(frozen=True)
class Took:
    """Seconds of a command. processor: of all its threads; a machine that is shared does not lengthen it much."""

    processor: float
    wall: float


def run(script: str, words: Sequence[str], log: Path | None = None) -> Took:
    """`python SCRIPT WORDS`; what it says goes to `log`, else to the terminal. Raises InputError if it fails."""
    print(shlex.join(["python", script, *words]), flush=True)
    command = [sys.executable, str(REPOSITORY / script), *words]
    before, began = os.times(), perf_counter()
    if log is None:
        status = subprocess.run(command).returncode
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stream:
            status = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT).returncode
    after = os.times()
    if status:
        raise InputError(failure(script, status, log))
    processor = after.children_user - before.children_user + after.children_system - before.children_system
    return Took(processor, perf_counter() - began)


def failure(script: str, status: int, log: Path | None) -> str:
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log is not None else []
    last = f": {said[-1].strip()}" if said else ""
    where = f" (see {log})" if log is not None else ""
    return f"{script} ended with status {status}{last}{where}; what was finished is kept, so mend it and run again"
