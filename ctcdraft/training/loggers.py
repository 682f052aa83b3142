"""Loggers of step metrics: JSON lines, TensorBoard, Weights & Biases; time and memory of a step."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import netrc
import os
import secrets
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol
from urllib.parse import urlsplit

from ctcdraft.errors import InputError, first_line
from ctcdraft.hardware import peak_process_bytes
from ctcdraft.io import write_text

WANDB_FILE = "wandb.json"  # in a run directory: id, name and group of the run in W&B
MAX_NAME_LENGTH, MAX_TAG_LENGTH = 128, 64  # characters, limits of W&B
# Equal runs may differ in these; processor_seconds is of all threads, memory_bytes the peak of the process.
MACHINE_METRICS = ("tokens_per_second", "wall_seconds", "processor_seconds", "memory_bytes")


class Logger(Protocol):
    def log(self, step: int, metrics: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One JSON line per optimiser step, written by every run."""

    def __init__(self, path: Path, first_step: int) -> None:
        write_text(path, lines_up_to(path, first_step))
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""  # lines that did not fit on a full disk; they are written before the next one

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        # NaN is not JSON.
        record = {name: None if isinstance(v, float) and not isfinite(v) else v for name, v in metrics.items()}
        self._unwritten += (json.dumps({"step": step, **record}) + "\n").encode()
        with contextlib.suppress(OSError):
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        self._file.close()
        if self._unwritten:
            lines = len(self._unwritten.splitlines())
            raise InputError(f"{self.path} lacks its last {lines} lines because the disk is full; make room")


def lines_up_to(path: Path, first_step: int) -> str:
    """Return the lines of the steps up to `first_step`; a killed run may have logged further, or half a line."""
    kept = []  # by their step and not by their number, because a full disk may have lost some
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            kept += [line + "\n"] if json.loads(line)["step"] <= first_step else []
    return "".join(kept)


def refuse_absent(loggers: Iterable[Any]) -> None:
    """Raise InputError for a logger whose package is not installed, before hours of response generation."""
    for package, requirement in (one.needs for one in loggers if hasattr(one, "needs")):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"logger={package} needs {package}, which is not installed; pip install {requirement}")


class TensorBoardLogger:
    """TensorBoard event files in the run directory: `tensorboard --logdir runs`."""

    needs = ("tensorboard", "'ctcdraft[tensorboard]'")

    def __init__(self, directory: Path, name: str, config: dict[str, Any], group: str | None = None) -> None:
        self._directory, self._config = str(directory), f"```\n{json.dumps(config, indent=2)}\n```"
        self._writer: Any = None
        self._failed = False  # events of a writer that failed once cannot be read after that place

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        if self._failed:
            return
        try:
            self._write(step, metrics)
        except OSError as error:
            self._failed = True
            print(f"step {step}: TensorBoard events end here ({first_line(error)}); metrics.jsonl has all steps")

    def _write(self, step: int, metrics: dict[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Steps that a killed run had logged after its checkpoint are logged again: readers drop the earlier ones.
            self._writer = SummaryWriter(self._directory, purge_step=step)
            self._writer.add_text("config", self._config)
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()


class WandbLogger:
    """Weights & Biases; offline by default, so that neither an account nor a network is needed.

    A resumed run keeps the id, name and group stored in its directory (wandb.json). Steps that a killed run had logged
    after its checkpoint are logged again with the same values, and W&B keeps the first.
    """

    needs = ("wandb", "wandb")

    def __init__(
        self, directory: Path, project: str, mode: Any, name: str, config: dict[str, Any], group: str | None = None
    ) -> None:
        import wandb

        try:
            self._run = wandb.init(
                dir=str(directory),
                project=project,
                mode=wandb_mode(mode),
                **wandb_identity(directory / WANDB_FILE, name, group),
                resume="allow",
                tags=wandb_tags(config),
                config=config,
                allow_val_change=True,  # trainer.steps may be raised
            )
        except (wandb.Error, ValueError) as error:
            raise InputError(f"W&B does not start: {first_line(error)}; give logger=jsonl to do without") from error

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_mode(mode: Any) -> Any:
    """Return the mode of a config, or for null that of the environment; offline if it has none."""
    return os.environ.get("WANDB_MODE", "offline") if mode is None else mode


def refuse_missing_key(mode: Any) -> None:
    """Raise InputError where metrics are to be sent to W&B without an API key, before hours of response generation."""
    if wandb_mode(mode) not in ("online", "shared"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):  # where `wandb login` writes it
        if netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None:
            return
    if not any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        raise InputError(
            f"logger.wandb.mode={wandb_mode(mode)} needs an API key; run `wandb login` or set WANDB_API_KEY, or give "
            "logger.wandb.mode=offline"
        )


def wandb_identity(file: Path, name: str, group: str | None) -> dict[str, Any]:
    """Return id, name and group of the run in W&B: those in the file, or new ones, which are written to it.

    The environment variables WANDB_NAME and WANDB_RUN_GROUP take precedence; a search names its trials by them.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text())
        # No other key is taken from the file: wandb.init's settings= could send the API key to another address.
        return {key: stored[key] for key in ("id", "name", "group")}
    identity = {
        "id": secrets.token_hex(4),
        "name": os.environ.get("WANDB_NAME", name)[:MAX_NAME_LENGTH],
        "group": os.environ.get("WANDB_RUN_GROUP", group),
    }
    write_text(file, json.dumps(identity, indent=1) + "\n")
    return identity


def wandb_tags(config: Mapping[str, Any]) -> list[str]:
    objective = config["objective"]["_target_"].rpartition(".")[2]
    names = (config["drafter"]["name"], objective, config["base"]["name"])
    return [tag[:MAX_TAG_LENGTH] for tag in dict.fromkeys(map(str, names))]


class StepTimer:
    """Time of one step, without the validation and checkpoint after it."""

    def __init__(self) -> None:
        self.began = perf_counter(), process_time()

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return MACHINE_METRICS since the start. tokens: that the step read, padding included."""
        wall, processor = perf_counter() - self.began[0], process_time() - self.began[1]
        return dict(zip(MACHINE_METRICS, (tokens / wall, wall, processor, peak_process_bytes()), strict=True))
