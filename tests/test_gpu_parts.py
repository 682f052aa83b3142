"""`make gpu`, rehearsed on a CPU: it writes the files, goes on where it ended, and refuses a machine without CUDA."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_goals import goals_of
from ctcdraft.config.cli import compose_config
from ctcdraft.config.contestants import resolve_contestants
from ctcdraft.config.schema import check_config
from ctcdraft.errors import InputError
from ctcdraft.evaluation.environment import package_version


@pytest.fixture
def one_drafter(monkeypatch):
    monkeypatch.setattr(gpu, "DRAFTERS", ["prompt_lookup"])
    monkeypatch.setattr(gpu, "SMALL", replace(gpu.SMALL, contexts=(16,)))


def test_latency_writes_every_row_at_once_and_a_second_run_goes_on(tmp_path, one_drafter, monkeypatch, capsys):
    command = ["latency", "device=cpu", f"out={tmp_path}"]
    gpu.main([*command, "seconds=0"])
    assert "4 rows are left" in capsys.readouterr().out
    row, measured = gpu.LatencyTimer.row, []

    def killed(timer, *unit):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(unit)
        return row(timer, *unit)

    monkeypatch.setattr(gpu.LatencyTimer, "row", killed)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(command)
    (folder,) = tmp_path.iterdir()
    file = folder / "latency.jsonl"
    assert len(file.read_text().splitlines()) == 3
    file.write_text(file.read_text() + '{"mode": "cap')  # killed within a line
    measured.clear()
    gpu.main(command)
    assert measured == [("eager", 16, "prompt_lookup")]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["mode"], one["drafter"]) for one in rows] == [
        (mode, drafter) for mode in ("captured", "eager") for drafter in ("autoregressive", "prompt_lookup")
    ]
    for one in rows:
        assert "error" not in one
        assert ("v_by_nodes" in one) is (one["drafter"] == "autoregressive")
        assert one["utilization"] > 0
    report = (folder / "latency.md").read_text()
    assert report.count("| prompt_lookup |") >= 2
    assert "Copy bandwidth" in report
    assert json.loads((folder / "latency-environment.json").read_text())["device"]


def test_an_error_of_one_drafter_is_a_row(tmp_path, one_drafter, monkeypatch):
    monkeypatch.setattr(gpu, "SMALL", replace(gpu.SMALL, contexts=(16,), modes=("eager",)))

    def refuses(name, base):
        if name == "prompt_lookup":
            raise RuntimeError("CUDA error: it broke\nmore lines")
        return random_drafter(name, base)

    random_drafter = gpu.random_drafter
    monkeypatch.setattr(gpu, "random_drafter", refuses)
    gpu.main(["latency", "device=cpu", f"out={tmp_path}"])
    report = next(tmp_path.glob("*/latency.md")).read_text()
    assert "eager, 16, prompt_lookup: CUDA error: it broke" in report


def test_every_drafter_with_weights_is_measured():
    assert {"ctc", "ctc_gru", "transducer", "medusa", "hydra", "eagle_dynamic", "blockwise"} <= set(gpu.DRAFTERS)
    assert gpu.FULL.contexts == (1024, 8192)


def test_goals_beside_the_rows():
    row = {"mode": "captured", "context": 1024, "drafter": "ctc", "c": 0.08, "o": 0.02, "v64": None}
    assert [(one["measure"], one["reached"]) for one in goals_of(row)] == [("c", False), ("o", True)]
    row |= {"drafter": "autoregressive", "utilization": 0.8, "v64": 1.1}
    assert [(one["measure"], one["reached"]) for one in goals_of(row)] == [
        ("utilization", True), ("v64", True), ("o", True),
    ]  # fmt: skip
    assert not list(goals_of(row | {"mode": "eager"}))


def test_the_tests_of_a_gpu_skip_with_a_reason_without_one(tmp_path):
    gpu.main(["tests", "device=cpu", f"out={tmp_path}"])
    log = next(tmp_path.glob("*/tests.txt")).read_text()
    if not torch.cuda.is_available():
        assert " passed" not in log
        assert "no CUDA device" in log
        assert "SKIPPED" in log


def test_the_demo_is_evaluated_three_times(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(gpu, "run_logged", lambda command, log, deadline: commands.append((command, log.name)))
    gpu.main(["demo", "device=cpu", f"out={tmp_path}"])
    assert [name for _, name in commands] == ["bfloat16.txt", "fixed_shapes.txt", "shipped.txt"]
    assert all(command[-1] == "overwrite=false" for command, _ in commands)
    for command, _ in commands:
        config = compose_config(command[0].removesuffix(".py"), *command[1:])
        check_config(config)
        assert "autoregressive" in resolve_contestants(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_is_one_sentence():
    for part in gpu.PARTS:
        with pytest.raises(InputError, match="there is no CUDA device here"):
            gpu.main([part])
    with pytest.raises(InputError, match="give one of tests, latency, demo"):
        gpu.main(["everything"])


def test_the_repository_runs_without_being_installed():
    assert package_version("no-such-package") == "not installed"


def test_the_name_of_a_card_is_a_folder():
    assert gpu.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_output_is_logged_as_it_comes_and_the_deadline_holds(tmp_path):
    log = tmp_path / "log.txt"
    with pytest.raises(InputError, match="the time of this part is over"):
        gpu.run_logged(["-c", "import time; print('first', flush=True); time.sleep(60)"], log, gpu.monotonic() + 3)
    assert log.read_text() == "first\n"
    with pytest.raises(InputError, match="exit status 3"):
        gpu.run_logged(["-c", "raise SystemExit(3)"], log, gpu.monotonic() + 9)
