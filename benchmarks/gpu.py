"""What only a CUDA device can show: `make gpu PART=tests`, `latency`, `kernels` and `demo`, at most 8 minutes each.

    tests      the tests marked `gpu`
    latency    bandwidth, and c, v, o of every drafter on random weights of a 7 B Llama: eager, captured, compiled
    kernels    times of captured steps and of the kernels in them, on the same weights
    demo       losslessness in bfloat16, and experiment=shipped, on the embedded base

Everything is written as it is measured, into results/device/CARD; what is there is not measured again by the same code.
`device=cpu` rehearses the parts on small shapes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.errors import InputError, first_line, run_cli
from ctcdraft.evaluation.environment import code_hash, environment, hardware_name
from ctcdraft.io import write_text

SECONDS = 470.0  # of a part; what is left over is done by the next run


def main(arguments: Sequence[str]) -> None:
    part, *options = arguments or ("",)
    values = dict(option.partition("=")[::2] for option in options)
    if part not in PARTS or not values.keys() <= {"device", "out", "seconds"}:
        raise InputError(f"give one of {', '.join(PARTS)}, and device=, out= or seconds=, got {' '.join(arguments)}")
    try:
        device, seconds = torch.device(values.get("device", "cuda")), float(values.get("seconds", SECONDS))
    except (RuntimeError, ValueError) as error:
        raise InputError(f"device= or seconds= is wrong: {first_line(error)}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; device=cpu rehearses a part on small shapes")
    out = Path(values.get("out", REPOSITORY / "results" / "device")).resolve() / slug(hardware_name(device))
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{part}-environment.json", json.dumps(environment() | {"device": hardware_name(device)}) + "\n")
    PARTS[part](device, out, monotonic() + seconds)


def slug(name: str) -> str:
    """NVIDIA H100 80GB HBM3   ->   nvidia-h100-80gb-hbm3"""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def run_tests(device: torch.device, out: Path, deadline: float) -> None:
    """Run the tests marked `gpu`; those that need CUDA skip without it."""
    marks = re.compile(r"mark\.gpu|runs_kernels")  # the second is a mark of tests/fused_parts.py
    files = sorted(file for file in (REPOSITORY / "tests").rglob("test_*.py") if marks.search(file.read_text()))
    # The options in pyproject.toml need plugins that may be absent; other versions of packages have other warnings.
    ours = ["-o", "addopts=-ra", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    workers = ["-n", str(min(12, os.cpu_count() or 1))] if find_spec("xdist") else []  # they mostly compile kernels
    command = ["-m", "pytest", "-m", "gpu", "-v", *ours, *workers, *map(str, files)]
    run_logged(command, out / "tests.txt", deadline)


def run_demo(device: torch.device, out: Path, deadline: float) -> None:
    """Evaluate the embedded head in bfloat16, and as `make demo` does, with steps of fixed shapes."""
    head, limit = "data/tiny/head", 30 if device.type == "cuda" else 1
    common = [f"device={device}", f"benchmark.limit={limit}"]
    half = ["base=tiny", "dtype=bfloat16", "benchmark=tiny", f"contestants=[prompt_lookup,{head},transformers_eager]"]
    fixed = ["base=tiny", "base.static_shapes=true", "benchmark=tiny", f"contestants=[{head}]", "decoding.nodes=16"]
    shipped = ["experiment=shipped", "base.static_shapes=true"]
    for name, overrides in (("bfloat16", half), ("fixed_shapes", fixed), ("shipped", shipped)):
        # What this code has answered is kept; answers of other code would be refused.
        settings = out / name / "settings.json"
        stale = settings.is_file() and json.loads(settings.read_text()).get("code") != code_hash()
        last = [f"out={out / name}", f"overwrite={str(stale).lower()}"]
        run_logged(["evaluate.py", *overrides, *common, *last], out / f"{name}.txt", deadline)


def run_logged(command: Sequence[str], log: Path, deadline: float) -> None:
    """Run Python with its output on the terminal and in a file, until the deadline; raise InputError if it fails."""
    limited = ["timeout", str(max(1, int(deadline - monotonic()))), sys.executable, *command]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with log.open("w") as stream, subprocess.Popen(limited, cwd=REPOSITORY, **pipes) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            stream.write(line)
            stream.flush()
        status = process.wait()
    if status == 124:
        raise InputError(f"the time of this part is over; {log} has what was done, and the same command goes on")
    if status not in (0, 5):  # 5: pytest found no test
        raise InputError(f"exit status {status}; see {log}")


def run_latency(device: torch.device, out: Path, deadline: float) -> None:
    """Measure rows in a process of its own, which the deadline ends even within a row."""
    seconds = max(0.0, deadline - monotonic())
    run_logged(["-m", "benchmarks.gpu_latency", str(device), str(out), f"{seconds:.0f}"], out / "latency.txt", deadline)


def run_kernels(device: torch.device, out: Path, deadline: float) -> None:
    if device.type != "cuda":
        raise InputError(f"device={device} captures no steps; this part needs a CUDA device")
    seconds = max(0.0, deadline - monotonic() - 60.0)  # what was begun then has a minute
    run_logged(["-m", "benchmarks.gpu_kernels", str(out), f"{seconds:.0f}"], out / "kernels-log.txt", deadline)


PARTS = {"tests": run_tests, "latency": run_latency, "kernels": run_kernels, "demo": run_demo}

if __name__ == "__main__":
    run_cli("gpu", main)
