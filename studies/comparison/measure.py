"""Running of single jobs by train.py and evaluate.py, and the counts by question behind a finished evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import QuestionSums
from ctcdraft.evaluation.environment import code_hash, git_state
from ctcdraft.evaluation.metrics import paired_answers
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.evaluation import records_at_size
from ctcdraft.training.run_directory import RunDirectory
from ctcdraft.training.sweep import Job, read_metrics, read_run
from studies.comparison.config import Comparison
from studies.comparison.jobs import DIVERGED_TAU, REPLAY, Evaluation, Row, Rows, Training, has_diverged
from studies.comparison.store import ResultStore, run_script, settings_digest

ALL_QUESTIONS = 10**9
BUSY = 1.1  # times its processor time that a timed loop takes at most on a machine that does nothing else
DIVERGED = "trainer.max_nonfinite_steps="  # in the sentence with which train.py ends a training that diverged


def overrides_of(config: Comparison, store: ResultStore, job: Training | Evaluation) -> list[str]:
    """Return the arguments of train.py or evaluate.py."""
    if isinstance(job, Evaluation):
        heads = ",".join(head_folders(store, job))
        return [*job.overrides, f"contestants=[{heads}]", f"out={store.evaluation_folder(job.name)}"]
    base = config.bases[job.base]
    # Nothing but the steps of a pace training is of interest; other probe_prompts would store other hidden states.
    untimed = ["decoding.max_new_tokens=8"] if job.minutes is None else []
    return [
        *base.base, *base.corpus, *config.train, *job.own, *untimed, f"trainer.learning_rate={job.rate:g}",
        f"trainer.steps={job.steps}", f"trainer.warmup_steps={max(1, round(config.warmup * job.steps))}",
        f"trainer.probe_every={job.steps}", f"seed={job.seed}", f"data_seed={config.seeds[0]}",
        f"drafter.name={job.head}", f"run={store.head_folder(job.name)}",
    ]  # fmt: skip


def finished_jobs(store: ResultStore, jobs: Sequence[Training | Evaluation], rows: Rows) -> set[str]:
    """Return the names of the jobs that are finished.

    A head that an evaluation still needs must also be there; with `out` it may have been lost.
    """
    measured = store.measured()
    missing = [job for job in jobs if isinstance(job, Evaluation) and job.name not in measured]
    needed = set[str]().union(*map(needed_heads, missing))

    def is_done(job: Training | Evaluation) -> bool:
        if isinstance(job, Evaluation):
            return job.name in measured
        if job.name not in rows or job.name not in needed or has_diverged(rows[job.name]):
            return job.name in rows
        return is_trained(store.head_folder(job.name))

    return {job.name for job in jobs if is_done(job)}


def is_trained(folder: Path) -> bool:
    """Return whether a training has ended with a head: a head is saved before its last step, too."""
    found = read_run(folder)
    return isinstance(found, Job) and found.status == "complete" and RunDirectory(folder).head.is_file()


def needed_heads(job: Evaluation) -> set[str]:
    """Return the names of the trainings whose heads an evaluation measures."""
    return {f"{job.base}/{head.partition('@')[0]}" for head in job.heads}


def train(config: Comparison, store: ResultStore, job: Training) -> None:
    """Train a head, or go on with one that was interrupted, and append its row."""
    overrides, folder = overrides_of(config, store, job), store.head_folder(job.name)
    if not is_trained(folder):
        store.note(job.name, overrides=overrides, commit=current_commit())
        resumed = [f"resume={folder}"] if RunDirectory(folder).resume_files else [*overrides, "overwrite=true"]
        try:
            run_script("train.py", resumed, store.log_file(job.name))
        except InputError as error:
            if DIVERGED not in str(error) or job.name in store.rows():
                raise
            # A row, because the other learning rates and heads are compared only once all of them are finished.
            store.note(job.name, diverged=str(error))
            seconds = sum(line.get("processor_seconds", 0.0) for line in read_metrics(folder))
            return store.append_row(training_row(store, job, overrides, seconds=seconds, tau=DIVERGED_TAU))
    found = read_run(folder)
    if not isinstance(found, Job):
        raise InputError(f"{folder} has no validation by decoding; trainer.probe_prompts must be >= 1")
    if job.name not in store.rows():
        measured = {"seconds": found.seconds_by_clock.get("processor"), "tau": found.tau, "loss": found.loss}
        measured |= {"frames": found.values.get("drafter.frames"), "parameters": count_parameters(store, job)}
        store.append_row(training_row(store, job, overrides, **measured))


def training_row(store: ResultStore, job: Training, overrides: Sequence[str], **measured: Any) -> Row:
    values = {key: getattr(job, key) for key in ("base", "role", "method", "seed", "steps")}
    commit = store.jobs().get(job.name, {}).get("commit", "unknown")  # with which it was begun, or last continued
    values |= {"learning_rate": job.rate, "commit": commit, "settings": settings_digest(overrides)}
    return {"job": job.name, **values, **job.levels, **measured}


def current_commit() -> str:
    state = git_state(REPOSITORY)
    return state["commit"][:7] if state else "unknown"


def count_parameters(store: ResultStore, job: Training) -> int:
    """Return the number of trained parameters: all that the head's file holds."""
    from safetensors import safe_open

    with safe_open(RunDirectory(store.head_folder(job.name)).head, "pt") as file:
        return sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118


def head_folders(store: ResultStore, job: Evaluation) -> list[str]:
    return [*(str(store.head_folder(f"{job.base}/{head}")) for head in job.heads), *job.untrained]


def measure(config: Comparison, store: ResultStore, job: Evaluation) -> None:
    """Run an evaluation, or go on with one that was interrupted, and append its report and counts by question."""
    folder, heads = store.evaluation_folder(job.name), head_folders(store, job)
    overrides = overrides_of(config, store, job)
    store.note(job.name, overrides=overrides)
    if not (folder / "report.json").is_file():
        anew = ["overwrite=true"] if is_outdated(folder) else []
        took = run_script("evaluate.py", [*overrides, *anew], store.log_file(job.name))
        store.note(job.name, **took)
        if job.is_timed and took["seconds"] > BUSY * took["processor_seconds"]:
            print(f"{job.name} took {took['seconds'] / took['processor_seconds']:.2f} times its processor time")
    report = json.loads((folder / "report.json").read_text())
    # Tokens, steps and seconds by question: what intervals need, without the text of responses, which may not be
    # published with other people's prompts.
    counts: dict[str, dict[int, Any]] = {}
    records = OutputDir(folder, Shard(1, 1)).records(ALL_QUESTIONS)
    for row in report["rows"]:
        drafter, nodes = row["drafter"], row["nodes"]
        replayed = not job.is_timed and drafter != AUTOREGRESSIVE
        own = records_at_size(records, drafter, nodes) if replayed else records
        sums = QuestionSums.from_questions(paired_answers(drafter, own)[0])
        totals = [len(sums.passes), sum(sums.committed), sum(sums.passes)]
        if totals != [row[key] for key in ("prompts", "tokens", "passes")]:
            raise InputError(f"the responses in {folder} are not those of its report.json; remove the folder")
        counts.setdefault(drafter, {})[nodes] = plain_sums(sums)
    noted = {key: store.jobs()[job.name].get(key) for key in ("seconds", "processor_seconds")}
    noted["settings"] = settings_digest(overrides)
    store.append_evaluation(job.name, kind=job.kind, **noted, contestants=len(heads), report=report, counts=counts)


def is_outdated(folder: Path) -> bool:
    """Return whether an evaluation was begun by code that gives other tokens or times, so that it cannot go on."""
    file = folder / "settings.json"
    return file.is_file() and json.loads(file.read_text()).get("code") != code_hash()


def plain_sums(sums: QuestionSums) -> dict[str, list[float]]:
    # To the microsecond: all digits of a float would make the file larger and no interval better.
    return {key: [round(cell, 6) for cell in column] for key, column in vars(sums).items() if column}


def passed_check(kind: str, row: Row) -> bool:
    """Return whether a row was compared, is lossless, and has in a replay the tokens per step of decoding."""
    lossless, replay = row["lossless"], row.get("replay") or {}
    if not lossless["prompts"] or lossless["equal"] is None or lossless["owed"]["wrong"]:
        return False
    is_replayed = kind == REPLAY and row["drafter"] != AUTOREGRESSIVE
    return not is_replayed or 0 < replay.get("answers", 0) == replay["alike"]


def passed_rows(one: Row) -> list[Row]:
    """Return the rows of an evaluation that passed the check."""
    return [row for row in one["report"]["rows"] if passed_check(one["kind"], row)]


def failed_rows(measured: Mapping[str, Row], names: Sequence[str]) -> list[str]:
    """Return the rows of these evaluations that failed the check, as DRAFTER in EVALUATION."""
    evaluations = [measured[name] for name in names]
    return [
        f"{row['drafter']} in {one['evaluation']}"
        for one in evaluations
        for row in one["report"]["rows"]
        if not passed_check(one["kind"], row)
    ]


def estimate(job: Training | Evaluation, measured: Mapping[str, Row]) -> float | None:
    """Return the processor seconds that a job is estimated to take; None of an evaluation unlike those finished."""
    if isinstance(job, Training):
        return 60 * job.minutes if job.minutes is not None else None
    prefix = f"/{job.benchmark}-{job.kind}-"
    alike = [line for name, line in measured.items() if prefix in name and line["seconds"]]
    contestants = sum(line["contestants"] for line in alike)
    count = len(job.heads) + len(job.untrained)
    return count * sum(line["seconds"] for line in alike) / contestants if contestants else None
