"""Where the figures of a step go. It knows names and numbers only."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from ctcdraft.errors import InputError
from ctcdraft.io import write_text

WANDB_FILE = "wandb.json"  # in a run directory: what the run is called in W&B
MAX_NAME_LENGTH, MAX_TAG_LENGTH = 128, 64  # characters that W&B takes


class Logger(Protocol):
    def log(self, step: int, figures: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One line per optimiser step; the record of the run, whatever else is logged to.

    Lines that a full disk does not take are kept, and written before the next one.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        write_text(path, lines_up_to(path, first_step))
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def log(self, step: int, figures: dict[str, Any]) -> None:
        record = {name: None if isinstance(value, float) and not isfinite(value) else value
                for name, value in figures.items()}  # fmt: skip
        self._unwritten += (json.dumps({"step": step, **record}) + "\n").encode()
        with contextlib.suppress(OSError):
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        self._file.close()
        if self._unwritten:
            lines = len(self._unwritten.splitlines())
            raise InputError(f"{self.path} lacks its last {lines} lines: the disk is full; make room")


def lines_up_to(path: Path, first_step: int) -> str:
    """The lines of the steps up to here. A killed run may have logged past its checkpoint, or half a line; by their
    numbers, because lines that a full disk did not take are missing."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found += [line + "\n"] if json.loads(line)["step"] <= first_step else []
    return "".join(found)


def refuse_absent(loggers: Iterable[Any]) -> None:
    """Raise InputError for the first logger whose package is not here: a run makes its loggers only when its corpus,
    an hour of answers perhaps, is there."""
    for package, way in (one.needs for one in loggers if hasattr(one, "needs")):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"logger={package} needs {package}, which is not installed; pip install {way}")


class TensorBoardLogger:
    """TensorBoard's event files, in the run's own folder: `tensorboard --logdir runs`."""

    needs = ("tensorboard", "'ctcdraft[tensorboard]'")

    def __init__(self, directory: Path, name: str, config: dict[str, Any], group: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```")

    def log(self, step: int, figures: dict[str, Any]) -> None:
        for figure, value in figures.items():
            if value is not None:
                self._writer.add_scalar(figure, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Weights & Biases; offline unless told otherwise, so that neither an account nor a network is needed.

    A resumed run goes on with the id, name and group that its directory keeps (wandb.json). Steps past the checkpoint
    that a killed run had logged already are the same again, and W&B keeps the first.
    """

    needs = ("wandb", "wandb")

    def __init__(
        self,
        directory: Path,
        project: str,
        mode: Any,
        name: str,
        config: dict[str, Any],
        group: str | None = None,
    ) -> None:
        import wandb

        if mode is None:
            mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            dir=str(directory),
            project=project,
            mode=mode,
            **wandb_identity(directory / WANDB_FILE, name, group),
            resume="allow",
            tags=wandb_tags(config),
            config=config,
            allow_val_change=True,  # trainer.steps may be raised
        )

    def log(self, step: int, figures: dict[str, Any]) -> None:
        self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_identity(file: Path, name: str, group: str | None) -> dict[str, Any]:
    """Return id, name and group of the run in W&B: those in the file, or new ones, which are written there.

    A search names its trials by W&B's own variables, WANDB_NAME and WANDB_RUN_GROUP; so may a user.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text())
        # Nothing else from a file: wandb.init takes the address to send its key to, in settings=, too.
        return {key: stored[key] for key in ("id", "name", "group")}
    identity = {
        "id": secrets.token_hex(4),
        "name": os.environ.get("WANDB_NAME", name)[:MAX_NAME_LENGTH],
        "group": os.environ.get("WANDB_RUN_GROUP", group),
    }
    write_text(file, json.dumps(identity, indent=1) + "\n")
    return identity


def wandb_tags(config: Mapping[str, Any]) -> list[str]:
    """Return what a run is found by: its drafter, the class of its objective, its base."""
    objective = config["objective"]["_target_"].rpartition(".")[2]
    found = (config["drafter"]["name"], objective, config["base"]["name"])
    return [tag[:MAX_TAG_LENGTH] for tag in dict.fromkeys(map(str, found))]
