"""What only a CUDA device can show: `make gpu PART=tests`, `PART=latency` and `PART=demo`, at most 8 minutes each.

    tests      the tests marked `gpu`
    latency    bandwidth, and c, v, o of every drafter on random weights of a 7 B Llama: eager, captured, compiled
    demo       losslessness in bfloat16, and experiment=shipped, on the embedded base

Everything is written as it is measured, into results/device/CARD; what is there is not measured again by the same code.
`device=cpu` rehearses the parts on small shapes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from hydra.utils import instantiate

from benchmarks.drafter_cases import OVERRIDES, random_drafter
from benchmarks.gpu_goals import report
from ctcdraft.config.cli import REPOSITORY, compose_config
from ctcdraft.config.contestants import load_base
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.errors import InputError, first_line, run_cli
from ctcdraft.evaluation.environment import code_hash, environment, hardware_name
from ctcdraft.evaluation.latency import LatencyBenchmark, measure_contexts
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.io import write_text

SECONDS = 470.0  # of a part; what is left over is done by the next run
ROW_SECONDS = 90.0  # of one row of the latency part, with two sizes to compile
DRAFTERS = [name for name in OVERRIDES if not name.startswith(("draft_model", AUTOREGRESSIVE))]
MODES = {"captured": (True, False), "eager": (False, False), "compiled": (True, True)}  # static shapes, compiled


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements."""

    base: tuple[str, ...]  # overrides of evaluate.py
    contexts: tuple[int, ...]
    nodes: tuple[int, ...]
    compiled_nodes: tuple[int, ...]  # each takes up to a minute to compile
    tree: int
    passes: int
    repeats: int
    modes: tuple[str, ...]


FULL = Scale(
    ("base=shape", "base.of.max_position_embeddings=16384", "dtype=bfloat16"),
    contexts=(1024, 8192),
    nodes=(1, 8, 16, 32, 64, 128, 256),
    compiled_nodes=(1, 64),
    tree=64,
    passes=8,
    repeats=3,  # each with prefills
    modes=tuple(MODES),
)
SMALL = Scale(
    ("base=shape_tiny", "base.of.num_hidden_layers=2", "dtype=bfloat16"),
    contexts=(16, 32),
    nodes=(1, 4),
    compiled_nodes=(1,),
    tree=4,
    passes=2,
    repeats=1,
    modes=("captured", "eager"),
)


def main(arguments: Sequence[str]) -> None:
    part, *options = arguments or ("",)
    values = dict(option.partition("=")[::2] for option in options)
    if part not in PARTS or not values.keys() <= {"device", "out", "seconds"}:
        raise InputError(f"give one of {', '.join(PARTS)}, and device=, out= or seconds=, got {' '.join(arguments)}")
    device = torch.device(values.get("device", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; device=cpu rehearses a part on small shapes")
    out = Path(values.get("out", REPOSITORY / "results" / "device")) / slug(hardware_name(device))
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{part}-environment.json", json.dumps(environment() | {"device": hardware_name(device)}) + "\n")
    PARTS[part](device, out, monotonic() + float(values.get("seconds", SECONDS)))


def slug(name: str) -> str:
    """NVIDIA H100 80GB HBM3   ->   nvidia-h100-80gb-hbm3"""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def run_tests(device: torch.device, out: Path, deadline: float) -> None:
    """Run the tests marked `gpu`; those that need CUDA skip without it."""
    files = sorted(file for file in (REPOSITORY / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text())
    # The options in pyproject.toml need plugins that may be absent; other versions of packages have other warnings.
    ours = ["-o", "addopts=-ra", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    command = ["-m", "pytest", "-m", "gpu", "-v", *ours, *map(str, files)]
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


def measure_latency(device: torch.device, out: Path, deadline: float) -> None:
    """Append a row for every mode, context and drafter that is missing, and print the goals."""
    scale, file, code = FULL if device.type == "cuda" else SMALL, out / "latency.jsonl", code_hash()
    rows = [row for row in stored_rows(file) if row["code"] == code]
    done = {(row["mode"], row["context"], row["drafter"]) for row in rows}
    todo = [each for each in units(scale) if each not in done]
    if todo:
        timer = LatencyTimer(device, scale)
    for number, (mode, context, drafter) in enumerate(todo):
        if monotonic() + ROW_SECONDS > deadline:
            print(f"{len(todo) - number} rows are left for the next run of the same command")
            break
        row = {"mode": mode, "context": context, "drafter": drafter, "code": code, **timer.row(mode, context, drafter)}
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        rows.append(row)
        print(
            {key: value for key, value in row.items() if key in ("mode", "context", "drafter", "c", "v", "o", "error")}
        )
    write_text(out / "latency.md", report(hardware_name(device), rows))
    print(report(hardware_name(device), rows))


def units(scale: Scale) -> Iterator[tuple[str, int, str]]:
    for mode in scale.modes:
        for context in scale.contexts:
            for drafter in [AUTOREGRESSIVE, *DRAFTERS]:
                yield mode, context, drafter


def stored_rows(file: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a file; a killed run may leave half a line, which is cut off."""
    if not file.is_file():
        return []
    text = file.read_text()
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        write_text(file, complete)
    return [json.loads(line) for line in complete.splitlines()]


class LatencyTimer:
    """One base on the device, and measurements of one drafter at a time."""

    def __init__(self, device: torch.device, scale: Scale) -> None:
        self.scale = scale
        self.config = compose_config(
            "evaluate", *scale.base, "benchmark=latency", f"decoding.nodes={scale.tree}", f"device={device}"
        )
        self.base = load_base(self.config, {})
        self.shapes: StaticShapes | None = None

    def row(self, mode: str, context: int, drafter: str) -> dict[str, Any]:
        """Return the costs of a drafter; of autoregression also v(n)."""
        # Anew for every row, as graphs hold memory; compiled code is kept.
        static, compiled = MODES[mode]
        before, self.shapes = self.shapes, StaticShapes.of(static, compiled)
        if self.shapes is not None and before is not None and before.compiled == self.shapes.compiled:
            self.shapes.compiled_forward = before.compiled_forward
        self.base.static_shapes = self.shapes
        alone = drafter == AUTOREGRESSIVE
        nodes = (self.scale.compiled_nodes if compiled else self.scale.nodes) if alone else (1,)
        benchmark = LatencyBenchmark(
            "latency", [], [context], nodes, passes=self.scale.passes, repeats=self.scale.repeats, tau={}
        )
        names = dict.fromkeys((AUTOREGRESSIVE, drafter))
        try:
            drafters = {name: random_drafter(name, self.base) for name in names}
            settings = instantiate(self.config.decoding)
            measured = measure_contexts(self.base, drafters, settings, benchmark, self.config.seed)
        except (RuntimeError, InputError) as error:  # the other drafters are measured all the same
            return {"error": first_line(error)}
        (read,), row = measured["reads"], measured["drafters"][-1]
        return {
            **{key: row[key] for key in ("tree_nodes", "c", "c_head", "c_search", "v", "o", "time")},
            "seconds_step": read["seconds_step"],
            # Of the whole step, not of the forward pass alone.
            "utilization": row["roof_share"] * row["v"] / (row["c"] + row["v"] + row["o"]),
            "machine": measured["machine"],
            "reads": self.base.execution_mode,
            **(
                {"v_by_nodes": read["v"], "v64": read["v"].get("64"), "seconds_prefill": read["seconds_prefill"]}
                if alone
                else {}
            ),
        }


PARTS = {"tests": run_tests, "latency": measure_latency, "demo": run_demo}

if __name__ == "__main__":
    run_cli("gpu", main)
