"""Under which circumstances something was measured: command, code, versions, machine. It measures nothing itself."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

CPUINFO_FILE = Path("/proc/cpuinfo")
# Folders and files of this package that tokens, forward passes and their times come from. An evaluation cannot go on
# after a change in one of them; it can after a change elsewhere: reports and pages are made again from its lines.
HASHED_SOURCES = (
    *("models/base_model.py", "models/loading.py", "models/values.py", "models/checkpoints.py", "models/adapters.py"),
    *("models/device_map.py", "models/zero3.py"),
    *("ctc", "decoding", "drafters", "nn"),
    *("corpus/chat_template.py", "corpus/types.py"),  # how a prompt is rendered
    *("evaluation/runner.py", "evaluation/stock_generate.py", "evaluation/profiling.py"),
    *("evaluation/replay.py", "evaluation/replay_evaluation.py"),
    *("evaluation/losslessness.py", "evaluation/distribution_test.py"),  # what a line says about its tokens
)


def environment() -> dict[str, Any]:
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_state(Path(__file__).parents[2]),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in ("ctcdraft", "torch", "transformers")},
    }


def code_hash(package: Path = Path(__file__).parents[1]) -> str:
    """Return a hash of the sources in DECIDING: it tells apart what is not committed yet, or not under git at all."""
    digest = hashlib.sha256()
    for part in HASHED_SOURCES:
        place = package / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def code_version(circumstances: dict[str, Any]) -> dict[str, Any]:
    """Return under which name the version of this package is found again; `dirty` where it is in no commit."""
    git = circumstances["git"] or {"commit": None, "dirty": None}
    return {"version": circumstances["versions"]["ctcdraft"], **git}


def hardware_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's and the threads used: what speeds may be compared on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' if threads > 1 else ''}"


def processor_name() -> str:
    """Linux knows the model; elsewhere the architecture must do."""
    if CPUINFO_FILE.is_file():
        for line in CPUINFO_FILE.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def git_state(repository: Path) -> dict[str, Any] | None:
    """Commit, and whether the tree differed from it; None where the code is not under git."""

    def ask(*arguments: str) -> str:
        run = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None
