"""Environment of a measurement: command, code, versions and device, and what the device could achieve at best."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ctcdraft.evaluation.profiling import PhaseTimes
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.fingerprint import storage_tensors
from ctcdraft.models.stats import used_share

CPUINFO_FILE = Path("/proc/cpuinfo")
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}  # far larger than any cache, copied in milliseconds
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}  # rows and columns; a fraction of a second on either
# Sources that tokens, forward passes and their times depend on. An evaluation cannot be resumed after a change in one
# of them; after any other change it can, as reports are computed again from its records.
HASHED_SOURCES = (
    *("models/base_model.py", "models/loading.py", "models/checkpoints.py", "models/device_map.py"),
    *("models/deepspeed.py", "models/aux_layers.py", "models/fused_layers.py"),
    *("ctc", "decoding", "drafters", "nn", "fused.py", "array_kernels.py"),
    *("corpus/chat_template.py", "corpus/types.py"),  # rendering of prompts
    *("evaluation/contestants.py", "evaluation/runner.py", "evaluation/profiling.py"),
    *("evaluation/replay/drafts.py", "evaluation/replay/evaluation.py"),
    # The checks stored in a record.
    *("evaluation/losslessness.py", "evaluation/half_precision.py", "evaluation/distribution_test.py"),
)


def environment() -> dict[str, Any]:
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_state(Path(__file__).parents[2]),
        "versions": {"python": platform.python_version()}
        | {package: package_version(package) for package in ("ctcdraft", "torch", "transformers")},
    }


def package_version(package: str) -> str:
    """Return the version of a package; this one also runs from its repository, without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def code_hash(package: Path = Path(__file__).parents[1]) -> str:
    """Return a hash of HASHED_SOURCES, which also distinguishes code that is not committed."""
    digest = hashlib.sha256()
    for part in HASHED_SOURCES:
        path = package / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def hardware_name(device: torch.device) -> str:
    """Return the accelerator's name, or the processor's and its threads; speeds are comparable on equal ones only."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPUINFO_FILE.read_text().splitlines() if CPUINFO_FILE.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == "model name")
    name = next(models, "") or platform.processor() or platform.machine()  # elsewhere than on Linux the architecture
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def git_state(repository: Path) -> dict[str, Any] | None:
    """Return the commit, and whether the working tree differs from it; None if the code is not under git."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def weight_bytes(base: BaseLM) -> int:
    """Return the bytes of weights that a forward pass of one token reads: all but embeddings and idle experts."""
    head, embedding = base.head.weight, base.embedding.weight
    # Of the embeddings only N rows are read, unless they are tied to the lm_head, which reads all of them.
    read = [pair for pair in base.lm.named_parameters() if pair[1] is head or pair[1] is not embedding]
    # By the storage: a torchao int8 weight itself reports the element size of bfloat16.
    return sum(
        int(part.numel() * part.element_size() * used_share(name, base.lm.config))
        for name, weight in read
        for part in storage_tensors(weight)
    )


def count_matmul_weights(base: BaseLM) -> int:
    """Return the number of weights each node is multiplied by: all but embeddings, unless tied, and idle experts."""
    count = 0
    for path, module in base.lm.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if hasattr(module, "in_features"):  # by its features: quantised weights are packed, two or more per byte
            own.pop("weight", None)
            count += module.in_features * module.out_features
        if module is not base.embedding:
            count += sum(int(w.numel() * used_share(f"{path}.{name}", base.lm.config)) for name, w in own.items())
    return count


def copy_bandwidth(device: torch.device, rounds: int = 5) -> float:
    """Return the bytes per second, read plus written, of a large copy: the best round after a warm-up."""
    source = torch.ones(COPY_BYTES.get(device.type, 2**28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / fastest_seconds(lambda: target.copy_(source), device, rounds)


def matmul_rate(base: BaseLM, rounds: int = 5) -> float:
    """Return the FLOP/s of a square matrix product in the base model's dtype: the best round after a warm-up."""
    size = MATMUL_SIZE.get(base.device.type, 1024)
    # Not of ones, which an accelerator multiplies with less power, so faster.
    left, right = torch.randn(2, size, size, dtype=base.dtype, device=base.device)
    return 2 * size**3 / fastest_seconds(lambda: left @ right, base.device, rounds)


def fastest_seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    return min([time_call(device, call) for _ in range(rounds + 1)][1:])  # the first one is a warm-up


def time_call(device: torch.device, call: Callable[[], object]) -> float:
    """Return the seconds of a call, including the work it queues on a CUDA device."""
    wait: Callable[[], object] = partial(torch.cuda.synchronize, device) if device.type == "cuda" else int
    wait()
    began = perf_counter()
    call()
    wait()
    return perf_counter() - began


def bandwidth_utilization(spent: PhaseTimes, weight_bytes: int, bandwidth: float) -> float | None:
    """Return the memory-bandwidth utilization: the least possible time of the forward passes / their measured time."""
    if not spent.passes or not spent.seconds["read"]:
        return None
    return (weight_bytes * spent.passes + spent.kv_bytes) / bandwidth / spent.seconds["read"]


@dataclass(frozen=True)
class HardwareLimits:
    """What bounds a forward pass."""

    weight_bytes: int
    weights: int
    bandwidth: float  # bytes per second of a copy
    rate: float  # FLOP/s of a matrix product

    @classmethod
    def measure_on(cls, base: BaseLM) -> HardwareLimits:
        return cls(weight_bytes(base), count_matmul_weights(base), copy_bandwidth(base.device), matmul_rate(base))

    def min_seconds(self, kv_bytes: float, nodes: float) -> float:
        """Return the least seconds of a forward pass: of streaming its bytes or of its products, the longer one."""
        return max((self.weight_bytes + kv_bytes) / self.bandwidth, 2 * self.weights * nodes / self.rate)
