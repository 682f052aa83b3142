"""Rehearsal of the whole way over several processes on the CPU: `python -m benchmarks.rehearsal --processes 4`.

Responses, stored hidden states, training, a sweep and an evaluation, on the embedded base. In each phase one process is
killed (SIGKILL), and the phase is resumed as its documentation says. The result must equal that of a run in which
nothing was killed: byte for byte, weights of more than two processes to 1e-6 (DDP adds gradients in another order after
its first step), and evaluations without their times.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.01
MARK = "REHEARSED_COMMAND"  # variable of the environment by which the processes of a command are found
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TIMES = {"speedup", "speedup_ci", "speedup_decode", "speedup_paper", "tokens_per_second", "time", "c", "v", "o"}
TIMES |= {"predicted_speedup", "roof_share"}
CORPUS = ["base=tiny", "corpus=tiny", "corpus.limit=48", "answers.batch_size=4", "answers.max_new_tokens=32"]
TRAINING = [
    *CORPUS, "drafter=ctc", "objective.labels=3", "trainer.steps=24", "trainer.batch_size=4",
    "trainer.anchors_per_sequence=8", "trainer.checkpoint_every=4", "trainer.probe_every=24", "trainer.probe_prompts=4",
    "trainer.autocast=false", "decoding.max_new_tokens=16", "hidden_states=offline", "hidden_states.rows=1",
]  # fmt: skip
EVALUATION = [
    "checkpoint=run", "benchmark=tiny", "benchmark.limit=12", "decoding.max_new_tokens=16", "threads=1",
    "timing.questions=1", "timing.alone=2", "trace.questions=1",
]  # fmt: skip

Moment = Callable[[], str | None]  # what was reached when a process is to be killed; None before


@dataclass(frozen=True)
class Row:
    """One phase, as the table shows it."""

    phase: str
    seconds: float  # of the killed command and of the one that resumes it
    killed_at: str
    status: int
    sentence: str
    resumed: str

    @property
    def passed(self) -> bool:
        """Whether the kill was met in this phase and ended the job, and nothing was lost."""
        return self.status != 0 and "missed" not in self.killed_at and not self.resumed.startswith("NO")


@dataclass(frozen=True)
class Workspace:
    """A folder in which commands run as a user's; `processes` is the number that torchrun starts."""

    home: Path
    processes: int

    def command(self, script: str, *arguments: str, alone: bool = False) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        return [sys.executable, *([] if alone else torchrun), str(REPOSITORY / script), *arguments]

    def run(self, command: list[str]) -> float:
        """Run a command that must succeed; return its seconds."""
        status, _, output, seconds = self.killed(command, lambda: None)
        if status:
            raise SystemExit(f"{' '.join(command)} ended with status {status}:\n{output[-4000:]}")
        return seconds

    def killed(self, command: list[str], kill_at: Moment) -> tuple[int, str, str, float]:
        """Run a command and kill its last process; return exit status, moment of the kill, output and seconds."""
        mark, log, moment, start = uuid4().hex, self.home / "log", None, time.perf_counter()
        paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        own = {MARK: mark, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **NO_GPU}
        with log.open("w") as stream:
            process = subprocess.Popen(command, cwd=self.home, env=os.environ | own, stdout=stream, stderr=stream)
            try:
                while process.poll() is None:
                    if moment is None and (moment := kill_at()) is not None:
                        os.kill(last_process(mark) or process.pid, signal.SIGKILL)
                    time.sleep(POLL_SECONDS)
            finally:
                process.terminate()
        output, seconds = log.read_text().replace("\r", "\n"), time.perf_counter() - start
        return process.returncode, moment or "missed: it ended before", output, seconds


def last_process(mark: str) -> int | None:
    """Return the id of the process of the highest rank among those whose environment holds the mark."""
    ranks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            values = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended, or of another user
            continue
        if f"{MARK}={mark}".encode() in values:
            ranks |= {int(value[5:]): int(folder.name) for value in values if value.startswith(b"RANK=")}
    return ranks[max(ranks)] if ranks else None


def sentence(output: str) -> str:
    """Return the first sentence that an entry point has printed about its end."""
    return next((line for line in output.splitlines() if re.match(r"(prepare|train|evaluate)\.py: ", line)), "")


def rehearse(home: Path, processes: int) -> list[Row]:
    """Return the rows of all phases."""
    work = Workspace(home, processes)
    return [responses(work), *training(work), sweep(work), evaluation(work)]


def responses(work: Workspace) -> Row:
    """Generate a corpus; one process alone, which nothing interrupts, must write the same bytes."""
    work.run(work.command("data/prepare.py", *CORPUS, "out=corpus_alone", alone=True))
    command = work.command("data/prepare.py", *CORPUS, "out=corpus")

    def contents(folder: str) -> dict[str, bytes]:
        files = [file for file in (work.home / folder).iterdir() if file.is_file()]
        return {file.name: file.read_bytes() for file in files if file.name != "plan.json"}  # which holds times

    status, killed_at, output, seconds = work.killed(command, reached(work, "corpus/part-*", 3, "part"))
    seconds += work.run(command)
    same = "yes" if contents("corpus") == contents("corpus_alone") else "NO"
    return Row("responses", seconds, killed_at, status, sentence(output), same)


def training(work: Workspace) -> list[Row]:
    """Train on stored hidden states, with a kill while they are computed and one in a step."""
    here = [*TRAINING, "drafter.frames=4"]
    # This one has all processes generate a corpus of its own.
    whole = ["run=whole", "hidden_states.path=states_whole", "prepared=corpus_whole"]
    work.run(work.command("train.py", *here, *whole))
    first = work.command("train.py", *here, "run=run", "hidden_states.path=states", "prepared=corpus")
    states = work.killed(first, reached(work, "states/*/*.safetensors", 2, "shard", before="states/*/complete.json"))
    # Hidden states may be stored before the run directory is begun; then the same command goes on.
    begun = (work.home / "run" / "config.yaml").is_file()
    again = work.command("train.py", "resume=run") if begun else first
    steps = work.killed(again, reached(work, "run/metrics.jsonl", 6, "step", lines=True))
    again = work.command("train.py", "resume=run")
    seconds = work.run(again)
    same = compare_weights(work, "run", "whole", 0.0 if work.processes <= 2 else 1e-6)
    if len({json.loads(file.read_text())["hash"] for file in work.home.glob("corpus*/manifest.json")}) > 1:
        same = "NO: train.py generated another corpus"
    return [
        Row(name, first_seconds + more, killed_at, status, sentence(output), same)
        for name, (status, killed_at, output, first_seconds), more in (
            ("hidden states", states, 0.0), ("training", steps, seconds),
        )
    ]  # fmt: skip


def sweep(work: Workspace) -> Row:
    """Train two jobs one after the other; the second is killed, and the same command finishes it alone."""
    here = [*TRAINING, "hidden_states.path=states", "prepared=corpus"]
    work.run(work.command("train.py", *here, "drafter.frames=5", "run=job_alone", alone=True))
    both = work.command("train.py", "-m", *here, "drafter.frames=4,5", "run=sweep", alone=True)
    status, killed_at, output, seconds = work.killed(
        both, reached(work, "sweep/1/metrics.jsonl", 6, "step", lines=True)
    )
    finished = work.home / "sweep" / "0" / "drafter.safetensors"
    written = finished.stat().st_mtime_ns
    seconds += work.run(both)
    again = finished.stat().st_mtime_ns != written
    same = "NO: the finished job was run again" if again else compare_weights(work, "sweep/1", "job_alone", 0.0)
    return Row("sweep", seconds, f"job 2, {killed_at}", status, sentence(output), same)


def evaluation(work: Workspace) -> Row:
    """Evaluate the trained head; one process alone must report the same, but for times."""
    work.run(work.command("evaluate.py", *EVALUATION, "out=evaluation_alone", alone=True))
    command = work.command("evaluate.py", *EVALUATION, "out=evaluation")
    moment = reached(work, "evaluation/questions*", 3, "question", lines=True)
    status, killed_at, output, seconds = work.killed(command, moment)
    seconds += work.run(command)
    one, two = (json.loads(file.read_text())["rows"] for file in work.home.glob("evaluation*/report.json"))
    same = "yes" if without_times(one) == without_times(two) else "NO"
    return Row("evaluation", seconds, killed_at, status, sentence(output), same)


def without_times(value: Any) -> Any:
    """Return the content of a report without the fields that hold times, or follow from them."""
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if key not in TIMES}
    return [*map(without_times, value)] if isinstance(value, list | tuple) else value


def reached(work: Workspace, pattern: str, count: int, unit: str, before: str = "", lines: bool = False) -> Moment:
    """Return the moment at which so many files, or lines of files, exist, but none of `before`."""

    def moment() -> str | None:
        files = work.home.glob(pattern)
        found = sum(file.read_text().count("\n") if lines else file.is_file() for file in files)
        over = before and any(work.home.glob(before))
        return f"{unit} {found}" if found >= count and not over else None

    return moment


def efficiency(work: Workspace) -> str:
    """Return how much more processor time several processes take for a step of the same rows than one."""
    files = (work.home / run / "metrics.jsonl" for run in ("sweep/0", "whole"))
    alone, each = (median(json.loads(line)["processor_seconds"] for line in file.open()) for file in files)
    whole = each * work.processes
    return f"processor time of a step: {alone:.3f} s alone, {whole:.3f} s shared, efficiency {alone / whole:.0%}"


def compare_weights(work: Workspace, run: str, other: str, tolerance: float) -> str:
    one, two = (load_file(work.home / name / "drafter.safetensors") for name in (run, other))
    difference = max(float((one[name] - two[name]).abs().max()) for name in one)
    same = "yes" if one.keys() == two.keys() and difference <= tolerance else "NO"
    return f"{same}: weights apart by {difference:.1g}"


def table(rows: list[Row]) -> str:
    """Return the rows as a table of markdown."""
    text = "phase | seconds | killed at | exit status | sentence | resumed equal\n---|---|---|---|---|---"
    for row in rows:
        text += f"\n{row.phase} | {row.seconds:.0f} | {row.killed_at} | {row.status} | {row.sentence} | {row.resumed}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    processes = parser.parse_args().processes
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        rows = rehearse(Path(home), processes)
        print(table(rows), efficiency(Workspace(Path(home), processes)), sep="\n\n")
    minutes, failed = (time.perf_counter() - start) / 60, [row.phase for row in rows if not row.passed]
    print(f"\n{minutes:.1f} minutes with {processes} processes; failed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
