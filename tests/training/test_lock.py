"""Two processes never train in one run directory; a killed process leaves no lock behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from entry_parts import REPOSITORY, expect_error, run_script, train_args

from ctcdraft.training.run_lock import LOCK_FILE, InUseError, run_lock

HOLDS = """
import sys, time
from pathlib import Path
from ctcdraft.training.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def held():
    """A function that starts a process which locks a directory."""
    children = []

    def hold(directory):
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(directory)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        children.append(child)
        assert child.stdout.readline() == "held\n"
        return child

    yield hold
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path, held):
    child = held(tmp_path / "run")
    with pytest.raises(InUseError) as refusal, run_lock(tmp_path / "run"):
        pass
    host = os.uname().nodename
    assert str(refusal.value) == (
        f"{tmp_path}/run is being trained by process {child.pid} on {host}; wait until it ends or stop it, or choose "
        "another run="
    )
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert (tmp_path / "run" / LOCK_FILE).exists()
    with run_lock(tmp_path / "run"), pytest.raises(InUseError, match=f"by process {os.getpid()} on {host}"):
        run_lock(tmp_path / "run").__enter__()


def test_the_lock_leaves_no_file(tmp_path):
    with run_lock(tmp_path / "refused"):
        assert (tmp_path / "refused" / LOCK_FILE).exists()
    assert not (tmp_path / "refused").exists()
    with run_lock(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").touch()
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    "arguments", [["resume=busy"], train_args("run=busy", "overwrite=true"), train_args("run=fresh")],
    ids=["resume", "overwrite", "fresh start"],
)  # fmt: skip
def test_neither_a_resume_nor_a_start_runs_in_a_locked_directory(world, monkeypatch, capsys, held, arguments):
    """Fresh start: the other process is still preparing its corpus."""
    monkeypatch.chdir(world)
    place = Path("fresh" if "run=fresh" in arguments else "busy")
    if place.name == "busy" and not place.exists():
        run_script(monkeypatch, "train.py", *train_args("run=busy"))
    child = held(world / place)
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    capsys.readouterr()
    message = expect_error(monkeypatch, capsys, "train.py", *arguments)
    assert f"{place} is being trained by process {child.pid} on " in message
    assert message.count("\n") == 1
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    child.kill()
    child.wait()
    run_script(monkeypatch, "train.py", *arguments)  # the lock is free now
    assert not (place / LOCK_FILE).exists()
    assert (place / "drafter.safetensors").is_file()
