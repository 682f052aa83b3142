"""Where the figures of a step go. It knows names and numbers only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from ctcdraft.files import write_text


class Logger(Protocol):
    def log(self, step: int, figures: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One line per optimiser step; the record of the run, whatever else is logged to."""

    def __init__(self, path: Path, first_step: int) -> None:
        kept = path.read_text().splitlines()[:first_step] if path.exists() else []
        text = "".join(line + "\n" for line in kept)  # a killed run may have logged past its checkpoint
        write_text(path, text)
        self._file = path.open("a", buffering=1)

    def log(self, step: int, figures: dict[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **figures}) + "\n")

    def close(self) -> None:
        self._file.close()


class WandbLogger:
    """Weights & Biases; offline unless told otherwise, so that neither an account nor a network is needed."""

    def __init__(self, directory: Path, project: str, mode: Any, name: str, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(dir=str(directory), project=project, mode=mode, name=name, config=config)

    def log(self, step: int, figures: dict[str, Any]) -> None:
        self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()
