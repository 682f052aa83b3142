"""SIGKILL at twenty random moments leaves no trace in the corpus: the process is data/prepare.py as a user runs it."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.corpus.part_files import PLAN_FILE
from ctcdraft.corpus.prepared import is_complete

TESTS = Path(__file__).resolve().parents[1]
KILLS = 20


class ForkServer:
    """Starts data/prepare.py in `folder` by forking a process that has imported its packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = str(TESTS.parent / "data" / "prepare.py")
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "fork_server.py"), script, "base"],
            cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def started(self, out: str) -> int:
        """Start a run and return its pid once it holds the lock."""
        arguments = [
            "base=local", "base.path=base", "corpus.path=prompts.jsonl", f"out={out}", "device=cpu",
            "answers.max_new_tokens=24", "answers.batch_size=2", "answers.temperature=1", "answers.samples=2",
        ]  # fmt: skip
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        pid = json.loads(self.process.stdout.readline())["pid"]
        lock = self.folder / out / "writer.lock"
        while not (lock.exists() and f"process {pid} " in lock.read_text()):
            over, _, _ = select.select([self.process.stdout], [], [], 0.002)
            assert not over, f"{out} ended before it wrote anything"
        return pid

    def ended(self) -> int:
        """Return the exit status of the run; below 0 it is the signal that ended it."""
        return json.loads(self.process.stdout.readline())["status"]


@pytest.fixture
def server(tmp_path):
    random_lm().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    prompts = [
        {"id": n, "category": "test", "turns": [f"prompt {turn} {n}" + "!" * (n % 30) for turn in range(1 + n % 2)]}
        for n in range(80)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    server = ForkServer(tmp_path)
    yield server
    server.process.kill()
    server.process.wait()
    server.process.stdin.close()
    server.process.stdout.close()


def content(folder):
    """Return the content of all files but plan.json; the manifest too must be byte-identical."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != PLAN_FILE}


def count_parts(folder):
    return len(list(folder.glob("part-*.jsonl")))


def test_a_corpus_killed_at_twenty_random_moments_is_the_same_byte_for_byte(server, tmp_path):
    server.started("whole")
    since = time.monotonic()
    assert server.ended() == 0
    seconds = time.monotonic() - since
    whole = content(tmp_path / "whole")

    rng, finished, written = random.Random(0), [0], {}
    for _ in range(KILLS):
        pid = server.started("killed")
        kill_at = time.monotonic() + rng.uniform(0, seconds / KILLS)  # the sum is about half of the work
        # One new part is enough: on a machine that became faster the work would end before the last kill.
        while time.monotonic() < kill_at and count_parts(tmp_path / "killed") < finished[-1] + 1:
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        assert server.ended() == -signal.SIGKILL  # it was still running
        assert not is_complete(tmp_path / "killed")  # and had not finished
        parts = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("killed/part-*.jsonl")}
        assert written.items() <= parts.items()  # finished parts exist and were not written again
        written = parts
        finished.append(len(parts))
    print(f"{KILLS} kills; parts of {len(whole) - 1} after each of them: {finished[1:]}; unkilled {seconds:.1f} s")
    assert finished == sorted(finished)  # no finished part is lost
    assert len(set(finished)) > KILLS // 2  # the kills were spread over the work
    assert finished[-1] < len(whole) - 1

    server.started("killed")
    assert server.ended() == 0
    assert content(tmp_path / "killed") == whole  # every file, manifest.json included
    assert all((tmp_path / "killed" / name).stat().st_mtime_ns == when for name, when in written.items())
