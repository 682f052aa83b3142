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
from time import perf_counter
from typing import Any

import torch

from ctcdraft.evaluation.profiling import PhaseTimes
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.fingerprint import storage_tensors

CPUINFO_FILE = Path("/proc/cpuinfo")
# Folders and files of this package that tokens, forward passes and their times come from. An evaluation cannot go on
# after a change in one of them; it can after a change elsewhere: reports and pages are made again from its lines.
HASHED_SOURCES = (
    *("models/base_model.py", "models/loading.py", "models/values.py", "models/checkpoints.py", "models/adapters.py"),
    *("models/device_map.py", "models/zero3.py"),
    *("ctc", "decoding", "drafters", "nn"),
    *("corpus/chat_template.py", "corpus/types.py"),  # how a prompt is rendered
    *("evaluation/runner.py", "evaluation/stock_generate.py", "evaluation/profiling.py"),
    *("evaluation/replay/drafts.py", "evaluation/replay/evaluation.py"),
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


COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}  # bytes: far beyond any cache, and milliseconds to copy

MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}  # rows and columns: a fraction of a second on either


def weight_bytes(base: BaseLM) -> int:
    """Every parameter once a pass, but not the input embeddings, of which a pass reads N rows.

    Where head and embeddings are tied they are one parameter, and the head reads it whole.
    """
    parameters = {id(weight): weight for weight in base.lm.parameters()}
    head = base.head.weight
    looked_up = base.embedding.weight
    return sum(storage_bytes(weight) for weight in parameters.values() if weight is head or weight is not looked_up)


def storage_bytes(weight: Any) -> int:
    """Of a quantised weight the bytes of what it is made of: by its face, torchao's int8 is as wide as bfloat16."""
    return sum(part.numel() * part.element_size() for part in storage_tensors(weight))


def count_matmul_weights(base: BaseLM) -> int:
    """Weights that every node read is multiplied by: all but the embeddings, unless they are the head too.

    Counted by what a layer takes and gives, because quantised weights are packed, two and more in a byte.
    """
    count = 0
    for module in base.lm.modules():
        own = dict(module.named_parameters(recurse=False))
        if hasattr(module, "in_features"):
            own.pop("weight", None)
            count += module.in_features * module.out_features
        if module is not base.embedding:
            count += sum(weight.numel() for weight in own.values())
    return count


def copy_bandwidth(device: torch.device, rounds: int = 5) -> float:
    """Bytes a second of a large copy, read and written both counted: the best of some rounds after a first."""
    source = torch.ones(COPY_BYTES.get(device.type, 2**28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(rounds + 1):
        began = perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - began)
    return 2 * source.numel() / min(seconds[1:])


def matmul_rate(base: BaseLM, rounds: int = 5) -> float:
    """Operations a second of a square product in the base's dtype, an addition and a product each: the best of some."""
    device = base.device
    size = MATMUL_SIZE.get(device.type, 1024)
    left, right = torch.ones(2, size, size, dtype=base.dtype, device=device)
    seconds = []
    for _ in range(rounds + 1):
        began = perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - began)
    return 2 * size**3 / min(seconds[1:])


def bandwidth_utilization(spent: PhaseTimes, weight_bytes: int, bandwidth: float) -> float | None:
    """How near the reads come to the memory's limit: the least possible time of a read / its measured time."""
    if not spent.passes or not spent.seconds["read"]:
        return None
    least = (weight_bytes * spent.passes + spent.kv_bytes) / bandwidth
    return least / spent.seconds["read"]
