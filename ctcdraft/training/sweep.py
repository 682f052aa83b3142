"""Comparison of the runs of a sweep: a table, a plot, and whether the best setting is ahead by more than seed noise."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import yaml

from ctcdraft.io import write_text
from ctcdraft.renamed import current, current_key

FAILURE_FILE = "failed.json"
LOCATION_KEYS = ("run", "resume", "overwrite", "plan_only")  # keys that do not change what is trained


@dataclass(frozen=True)
class Job:
    """A run that has been validated."""

    name: str
    values: Mapping[str, Any]  # the whole config, with dotted keys
    command: str  # that repeats the run; empty for runs that did not store it
    steps: int  # taken so far
    tau: float  # of the best validation
    loss: float | None  # of the last step
    # Time of all steps, `processor` and `wall`; empty for runs that did not log it.
    seconds_by_clock: Mapping[str, float] = field(default_factory=dict)
    status: str = "complete"


@dataclass(frozen=True)
class Unmeasured:
    """A job that has failed, or was not validated yet."""

    name: str
    values: Mapping[str, Any]
    status: str


def setting(job: Job | Unmeasured, keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(job.values.get(key) for key in keys)


def write_failure(folder: Path, values: Mapping[str, Any], reason: str) -> None:
    content = {"reason": " ".join(reason.split()), "values": values}
    write_text(folder / FAILURE_FILE, json.dumps(content, indent=1) + "\n")


def forget_failure(folder: Path) -> None:
    (folder / FAILURE_FILE).unlink(missing_ok=True)


def read_failure(folder: Path) -> Unmeasured | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        content = json.loads((folder / FAILURE_FILE).read_text())
        values = {current_key(key): value for key, value in content["values"].items()}
        return Unmeasured(folder.name, values, f"failed: {content['reason']}")
    return None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that a run has written so far; none before the first, or if it is no text."""
    metrics = []
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line may be half written
                metrics.append(json.loads(line))
    return metrics


def read_job(folder: Path) -> Job | None:
    """Return the run in a folder; None if there is none, or it was never validated."""
    job = read_run(folder)
    return job if isinstance(job, Job) else None


def read_run(folder: Path) -> Job | Unmeasured | None:
    """Return the run in a folder, which may have failed; None if there is none."""
    lines = read_metrics(folder)
    taus = [line["tau"] for line in lines if "tau" in line]
    try:
        values = flatten_config(current(yaml.safe_load((folder / "config.yaml").read_text())))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    steps = values.get("trainer.steps", 0)
    status = "complete" if len(lines) >= steps else f"{len(lines)} of {steps} steps"
    if not taus:
        return Unmeasured(folder.name, values, status)
    command = (folder / "command.txt").read_text().strip() if (folder / "command.txt").is_file() else ""
    seconds = {clock: [line.get(f"{clock}_seconds") for line in lines] for clock in ("processor", "wall")}
    totals: dict[str, float] = {clock: sum(filter(None, each)) for clock, each in seconds.items() if None not in each}
    return Job(folder.name, values, command, len(lines), max(taus), lines[-1].get("loss"), totals, status)


def read_cells(folder: Path) -> tuple[list[Job], list[Unmeasured]]:
    """Return the validated jobs in the folder of a sweep, best first, and the others by name."""
    cells = [read_failure(run) or read_run(run) for run in sorted(folder.glob("*/"))]
    jobs = sorted((cell for cell in cells if isinstance(cell, Job)), key=lambda job: (-job.tau, job.name))
    return jobs, [cell for cell in cells if isinstance(cell, Unmeasured)]


def describe_unfinished(folder: Path) -> list[str]:
    """Return a line per job of a sweep that is not complete, and one that counts them; none if all are."""
    cells = {cell.name: cell.status for group in read_cells(folder) for cell in group}
    # Hydra makes the folder of a job before the job writes into it.
    empty = {path.name: "0 steps" for path in folder.glob("*/") if path.name.isdecimal() and path.name not in cells}
    lines = [f"job {name}: {status}" for name, status in sorted({**empty, **cells}.items()) if status != "complete"]
    return [*lines, f"{len(lines)} of {len(cells) + len(empty)} jobs are not complete"] if lines else []


def flatten_config(node: Any, above: str = "") -> dict[str, Any]:
    """Return a config with dotted keys; lists become text.   {"trainer": {"steps": 3}}  ->  {"trainer.steps": 3}"""
    if not isinstance(node, Mapping):
        return {above: str(node) if isinstance(node, list) else node}
    return {
        key: value for name in node for key, value in flatten_config(node[name], f"{above}.{name}".lstrip(".")).items()
    }


def swept_keys(jobs: Sequence[Job | Unmeasured]) -> list[str]:
    """Return the keys in which jobs differ; of keys that determine each other, the one with the shortest name."""
    differing: list[str] = []
    for key in sorted({key for job in jobs for key in job.values}, key=lambda key: (len(key), key)):
        holders = [job for job in jobs if key in job.values]  # a failed trial of a search has the searched keys alone
        column = [job.values[key] for job in holders]
        alike = any(determine_each_other(column, [job.values.get(other) for job in holders]) for other in differing)
        if key.split(".")[0] not in LOCATION_KEYS and len(set(column)) > 1 and not alike:
            differing.append(key)
    return sorted(differing)


def determine_each_other(one: Sequence[Any], other: Sequence[Any]) -> bool:
    # As many pairs as values: no value of one column stands beside two values of the other.
    return len(set(zip(one, other, strict=True))) == len(set(one)) == len(set(other))


def write_table(folder: Path) -> list[Job]:
    """Write sweep.csv, sweep.md and sweep.svg of all jobs in a folder; return those that were validated."""
    jobs, others = read_cells(folder)
    if jobs or others:
        keys = swept_keys([*jobs, *others])
        write_text(folder / "sweep.csv", csv_table(jobs, keys, others))
        write_text(folder / "sweep.md", markdown_page(jobs, keys, others))
    if jobs:
        write_text(folder / "sweep.svg", svg_plot(jobs, [key for key in swept_keys(jobs) if key != "seed"]))
    return jobs


def csv_table(jobs: Sequence[Job], keys: Sequence[str], others: Sequence[Unmeasured]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *keys, "tau", "loss", "steps", "status"])
    for job in jobs:
        writer.writerow([job.name, *setting(job, keys), job.tau, job.loss, job.steps, job.status])
    for other in others:
        writer.writerow([other.name, *setting(other, keys), "", "", "", other.status])
    return text.getvalue()


def tau_by_seed(same: Sequence[Job]) -> list[float]:
    """Return the tau of each seed of one setting."""
    # Runs with the same seed are averaged, as they share its noise: they would make the spread look small.
    seeds: dict[Any, list[float]] = {}
    for job in same:
        seeds.setdefault(job.values.get("seed"), []).append(job.tau)
    return [statistics.mean(taus) for taus in seeds.values()]


def markdown_page(jobs: Sequence[Job], keys: Sequence[str], others: Sequence[Unmeasured]) -> str:
    """Return a table with one row per setting over its seeds, then one per job that was not validated."""
    named = [key for key in keys if key != "seed"]
    settings: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        settings.setdefault(setting(job, named), []).append(job)
    ranked = sorted(settings.items(), key=lambda item: -statistics.mean(tau_by_seed(item[1])))
    lines = [
        "tau: tokens committed per forward pass over the held-out prompts, in each run's best validation; spread: "
        "standard deviation over seeds.",
        "",
        "| " + " | ".join([*named, "tau", "spread", "seeds", "last loss", "jobs"]) + " |",
        "|" + "---|" * (len(named) + 5),
    ]
    for values, same in ranked:
        taus = tau_by_seed(same)
        spread = f"{statistics.stdev(taus):.3f}" if len(taus) > 1 else ""
        losses = [job.loss for job in same if job.loss is not None]
        loss = f"{statistics.mean(losses):.3f}" if losses else ""
        names = " ".join(sorted(job.name for job in same))
        cells = [*map(str, values), f"{statistics.mean(taus):.3f}", spread, str(len(taus)), loss, names]
        lines.append("| " + " | ".join(cells) + " |")
    for other in others:
        cells = [*map(str, setting(other, named)), other.status, "", "0", "", other.name]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    if jobs:
        conclusion = describe_best_setting([tau_by_seed(same) for _, same in ranked])
        lines += ["", conclusion, "", "The best run again:", "", f"    {jobs[0].command}"]
    return "\n".join(lines) + "\n"


def describe_best_setting(ranked: Sequence[Sequence[float]]) -> str:
    """Return by how much the best setting is ahead. ranked: the taus of each setting's seeds, best setting first."""
    if len(ranked) == 1:
        return "There is only one setting."
    first, second = (statistics.mean(taus) for taus in ranked[:2])
    conclusion = f"The first setting is ahead of the second by {first - second:.3f} in tau"
    repeated = [taus for taus in ranked if len(taus) > 1]
    freedom = sum(len(taus) - 1 for taus in repeated)
    if not freedom:
        return f"{conclusion}; no setting was run with two seeds, so its noise is unknown: add seed=0,1,2 data_seed=0."
    # The noise over seeds is pooled: a few seeds of one setting are too few for its estimate.
    noise = (sum(statistics.variance(taus) * (len(taus) - 1) for taus in repeated) / freedom) ** 0.5
    # Standard deviation of the difference of two means, each over its own number of seeds.
    error = noise * sum(1 / len(taus) for taus in ranked[:2]) ** 0.5
    verdict = "more than two deviations" if first - second > 2 * error else "within two: not decided"
    return f"{conclusion}; standard deviation over seeds {noise:.3f}, of that difference {error:.3f}: {verdict}."


def svg_plot(jobs: Sequence[Job], keys: Sequence[str]) -> str:
    """Return a plot of tau against every swept key, one panel each; dots are jobs, the line joins their means."""
    width, height, edge = 220, 160, 34
    taus = [job.tau for job in jobs]
    low, high = min(taus), max(max(taus), min(taus) + 1e-3)
    size = f'width="{width * max(len(keys), 1)}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">']

    def y(tau: float) -> float:
        return height - edge - (height - 2 * edge) * (tau - low) / (high - low)

    for panel, key in enumerate(keys):
        left, seen = panel * width + edge, {job.values.get(key) for job in jobs}
        # Numbers before texts, which they cannot be compared with: null and 8 may be values of one key.
        values = sorted(seen, key=lambda value: (0, value) if isinstance(value, int | float) else (1, str(value)))
        x = {v: left + (width - 2 * edge) * i / max(len(values) - 1, 1) for i, v in enumerate(values)}
        means = [(x[v], y(statistics.mean(job.tau for job in jobs if job.values.get(key) == v))) for v in values]
        parts.append(f'<polyline fill="none" stroke="#888" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in means)}"/>')
        parts += [f'<circle cx="{x[job.values.get(key)]:.1f}" cy="{y(job.tau):.1f}" r="3"/>' for job in jobs]
        below = f'y="{height - edge + 14}" text-anchor="middle"'
        parts += [f'<text x="{x[v]:.1f}" {below}>{escape(str(v))}</text>' for v in values]
        parts += [f'<text x="{left - 6}" y="{y(t) + 3:.1f}" text-anchor="end">{t:.2f}</text>' for t in (low, high)]
        parts.append(f'<text x="{left}" y="{edge - 14}">tau, by {escape(key)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
