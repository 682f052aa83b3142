"""`make gpu PART=latency`: c, v and o of one drafter at a time on random weights, with the goals of the project.

python -m benchmarks.gpu_latency DEVICE FOLDER SECONDS
"""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from hydra.utils import instantiate

from benchmarks.drafter_cases import OVERRIDES, random_drafter
from ctcdraft.config.cli import REPOSITORY, compose_config
from ctcdraft.config.contestants import load_base
from ctcdraft.decoding.loop import uses_fixed_shapes, why_not_captured
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.static_graphs import can_capture
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.errors import InputError, first_line, run_cli
from ctcdraft.evaluation.environment import code_hash, hardware_name
from ctcdraft.evaluation.latency import measure_contexts
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.io import write_text
from ctcdraft.report.tables import Columns, markdown_table

ROW_SECONDS = {"compiled": 90.0, "captured": 25.0, "eager": 25.0}  # of one row; compiled: with two sizes to compile
FIRST = ("ctc", "ctc_gru", "medusa", "hydra", "eagle_dynamic")  # measured in all contexts before the others are
OTHERS = [name for name in OVERRIDES if name not in FIRST and not name.startswith(("draft_model", AUTOREGRESSIVE))]
DRAFTERS = [*FIRST, *OTHERS]
MODES = {"captured": (True, False), "eager": (False, False), "compiled": (True, True)}  # static shapes, compiled
UNIT = ("mode", "context", "drafter")
PRINTED = ("mode", "context", "drafter", "reads", "c", "v", "o", "error")
# Besides code_hash(): what is measured, and how.
SOURCES = (
    *("ctcdraft/evaluation/latency.py", "ctcdraft/evaluation/environment.py", "ctcdraft/models/meta.py"),
    *("benchmarks/drafter_cases.py", "benchmarks/gpu_latency.py"),
)


GOALS = (  # of captured rows: the measure, its limit, and whose; None: of all drafters
    ("utilization", ">=", 0.75, AUTOREGRESSIVE),
    ("c", "<=", 0.07, "ctc"),
    ("c", "<=", 0.12, "ctc_gru"),
    ("v64", "<=", 1.15, None),
    ("o", "<=", 0.03, None),
)


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements."""

    overrides: tuple[str, ...]  # of evaluate.py benchmark=latency
    contexts: tuple[int, ...]
    compiled_nodes: tuple[int, ...]  # each takes up to a minute to compile
    modes: tuple[str, ...]


FULL = Scale(
    # Fewer repeats than by default, as each has a prefill.
    ("base=shape", "base.of.max_position_embeddings=16384", "dtype=bfloat16", "benchmark.repeats=3"),
    contexts=(1024, 8192),
    compiled_nodes=(1, 64),
    modes=tuple(MODES),
)
SMALL = Scale(
    (
        *("base=shape_tiny", "base.of.num_hidden_layers=2", "dtype=bfloat16", "decoding.nodes=4"),
        *("benchmark.nodes=[1,4]", "benchmark.passes=2", "benchmark.repeats=1"),
    ),
    contexts=(16, 32),
    compiled_nodes=(1,),
    modes=("captured", "eager"),
)


def main(arguments: Sequence[str]) -> None:
    device, folder, seconds = arguments
    measure(torch.device(device), Path(folder), monotonic() + float(seconds))


def measure(device: torch.device, out: Path, deadline: float) -> None:
    """Append a row for every mode, context and drafter that is missing, and print the goals."""
    scale, file, code = FULL if device.type == "cuda" else SMALL, out / "latency.jsonl", rows_hash()
    rows = {tuple(row[key] for key in UNIT): row for row in stored_rows(file) if row["code"] == code}  # the last ones
    units = sorted(
        product(scale.modes, scale.contexts, [AUTOREGRESSIVE, *DRAFTERS]),
        key=lambda unit: (scale.modes.index(unit[0]), unit[2] in OTHERS),
    )
    # What failed, or was not finished, is tried again, but last: it keeps no other row from being measured.
    todo = sorted((unit for unit in units if "error" in rows.get(unit, "error")), key=rows.__contains__)
    if todo:
        timer = LatencyTimer(device, scale)
    for number, unit in enumerate(todo):
        if monotonic() + ROW_SECONDS[unit[0]] > deadline:
            print(f"{len(todo) - number} rows are left for the next run of the same command")
            break
        begun = {**dict(zip(UNIT, unit, strict=True)), "code": code}
        append_row(file, begun | {"error": "not finished"})
        row = rows[unit] = begun | timer.row(*unit)
        append_row(file, row)
        write_text(out / "latency.md", report(hardware_name(device), list(rows.values())))
        print({key: row[key] for key in PRINTED if key in row}, flush=True)
        if "error" in row and not still_works(device):
            raise InputError(
                f"the device computes nothing after an error of {row['drafter']} ({row['mode']}: {row['error']}); run "
                "the same command again, which measures the other rows first"
            )
    print(report(hardware_name(device), list(rows.values())))


def append_row(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def rows_hash() -> str:
    """Return a hash of all that rows depend on besides the machine: sources, configs and torch."""
    digest = hashlib.sha256(f"{code_hash()} {torch.__version__}".encode())
    configs = sorted((REPOSITORY / "configs").rglob("*.yaml"))
    for file in [*(REPOSITORY / source for source in SOURCES), *configs]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def still_works(device: torch.device) -> bool:
    """Return whether the device computes: after an illegal access or an assertion a process has lost it."""
    try:
        return int(torch.ones(2, device=device).sum()) == 2
    except RuntimeError:
        return False


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
        self.config = compose_config("evaluate", "benchmark=latency", *scale.overrides, f"device={device}")
        self.base = load_base(self.config, {})
        self.compiled_forward: Any = None

    def row(self, mode: str, context: int, drafter: str) -> dict[str, Any]:
        """Return the costs of a drafter; of autoregression also v(n)."""
        static, compiled = MODES[mode]
        self.renew_shapes(static, compiled)
        alone = drafter == AUTOREGRESSIVE
        nodes = (self.scale.compiled_nodes if compiled else self.config.benchmark.nodes) if alone else (1,)
        benchmark = instantiate(self.config.benchmark, contexts=[context], nodes=list(nodes))
        names = dict.fromkeys((AUTOREGRESSIVE, drafter))
        try:
            drafters = {name: random_drafter(name, self.base) for name in names}
            settings = instantiate(self.config.decoding)
            measured = measure_contexts(self.base, drafters, settings, benchmark, self.config.seed)
        except Exception as error:  # of any kind, as compilers have; the other drafters are measured all the same
            return {"error": first_line(error)}
        (read,), row = measured["reads"], measured["drafters"][-1]
        of_trees = {"v_by_nodes": read["v"], "v64": read["v"].get("64"), "seconds_prefill": read["seconds_prefill"]}
        return {
            **{key: row[key] for key in ("tree_nodes", "c", "c_head", "c_search", "v", "o", "time")},
            "seconds_step": read["seconds_step"],
            # Of the whole step, not of the forward pass alone.
            "utilization": row["roof_share"] * row["v"] / (row["c"] + row["v"] + row["o"]),
            "machine": measured["machine"],
            **self.execution(drafters[drafter], settings),
            **(of_trees if alone else {}),
        }

    def renew_shapes(self, static: bool, compiled: bool) -> None:
        """Drop the graphs and caches of the row before, which hold memory; keep compiled code."""
        self.base.static_shapes = None
        gc.collect()  # drafters, decoders and closures refer to each other
        if self.base.device.type == "cuda":
            torch.cuda.empty_cache()
        self.base.static_shapes = shapes = StaticShapes.of(static, compiled)
        if shapes is not None and compiled:
            shapes.compiled_forward = self.compiled_forward = self.compiled_forward or shapes.compiled_forward

    def execution(self, drafter: Any, settings: DecodingSettings) -> dict[str, Any]:
        """Return how the steps of a drafter ran, and whether all of the row were captured.

        They are also those of autoregression, which it is measured against, and of the trees of v(n).
        """
        shapes, reads = self.base.static_shapes, self.base.execution_mode
        if shapes is not None and not uses_fixed_shapes(self.base, drafter, settings):
            return {"reads": f"eager, exact shapes ({why_not_captured(drafter)})", "captured": False}
        captured = shapes is not None and shapes.capture_error is None and can_capture(self.base.device)
        return {"reads": reads, "captured": captured}


def report(hardware: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as tables, with the goals beside them."""
    measured = [row for row in rows if "error" not in row]
    columns = columns_of(*UNIT, "reads", "c", "v", "o", "utilization")
    parts = [f"# Latency on {hardware}"]
    if measured:
        bandwidth = statistics.median(row["machine"]["bandwidth"] for row in measured)
        parts += [f"Copy bandwidth {bandwidth / 1e9:,.0f} GB/s.", markdown_table(measured, columns)]
    goals = [goal for row in measured for goal in goals_of(row)]
    if goals:
        parts.append(markdown_table(goals, columns_of(*UNIT, "measure", "value", "goal", "reached")))
    parts += [f"{row['mode']}, {row['context']}, {row['drafter']}: {row['error']}" for row in rows if "error" in row]
    return "\n\n".join(parts) + "\n"


def columns_of(*keys: str) -> Columns:
    """Return columns of these fields, fractions with three digits."""

    def cell(key: str, row: dict[str, Any]) -> str:
        return f"{row[key]:.3f}" if isinstance(row[key], float) else str(row[key])

    return {key: partial(cell, key) for key in keys}


def goals_of(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the goals of a row, if all its steps were captured, and whether they are reached."""
    for measure, sign, limit, drafter in GOALS if row["captured"] else ():
        if drafter in (None, row["drafter"]) and (value := row.get(measure)) is not None:
            reached = value >= limit if sign == ">=" else value <= limit
            goal = {"measure": measure, "value": value, "goal": f"{sign} {limit}", "reached": reached}
            yield {**{key: row[key] for key in UNIT}, **goal}


if __name__ == "__main__":
    run_cli("gpu", main)
