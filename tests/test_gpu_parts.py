"""`make gpu`, rehearsed on a CPU: it writes the files, goes on where it ended, and refuses a machine without CUDA."""

import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate

from benchmarks import gpu, gpu_latency
from ctcdraft.config.cli import compose_config
from ctcdraft.config.contestants import resolve_contestants
from ctcdraft.config.schema import check_config
from ctcdraft.errors import InputError
from ctcdraft.evaluation.environment import package_version


@pytest.fixture
def one_drafter(monkeypatch):
    monkeypatch.setattr(gpu_latency, "DRAFTERS", ["prompt_lookup"])
    monkeypatch.setattr(gpu_latency, "SMALL", replace(gpu_latency.SMALL, contexts=(16,)))


def measure(folder, seconds=300.0):
    gpu_latency.measure(torch.device("cpu"), folder, gpu.monotonic() + seconds)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "latency.jsonl").read_text().splitlines()]


def finished(folder):
    return [row for row in rows_of(folder) if "error" not in row]


def test_latency_writes_every_row_at_once_and_a_second_run_goes_on(tmp_path, one_drafter, monkeypatch, capsys):
    measure(tmp_path, seconds=0)
    assert "4 rows are left" in capsys.readouterr().out
    row, measured = gpu_latency.LatencyTimer.row, []

    def killed(timer, *unit):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(unit)
        return row(timer, *unit)

    monkeypatch.setattr(gpu_latency.LatencyTimer, "row", killed)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path)
    assert len(finished(tmp_path)) == 2
    file = tmp_path / "latency.jsonl"
    file.write_text(file.read_text() + '{"mode": "cap')  # killed within a line
    monkeypatch.setattr(gpu_latency.LatencyTimer, "row", lambda *unit: measured.append(unit[1:]) or row(*unit))
    measured.clear()
    measure(tmp_path)
    assert measured == [("eager", 16, "prompt_lookup"), ("eager", 16, "autoregressive")]  # the one not finished is last
    measure(tmp_path)
    assert len(measured) == 2
    rows = finished(tmp_path)
    assert {(one["mode"], one["drafter"]) for one in rows} == {
        (mode, drafter) for mode in ("captured", "eager") for drafter in ("autoregressive", "prompt_lookup")
    }
    for one in rows:
        assert ("v_by_nodes" in one) is (one["drafter"] == "autoregressive")
        assert one["utilization"] > 0
        assert one["captured"] is False  # on a CPU nothing is
    reads = {(one["mode"], one["drafter"]): one["reads"] for one in rows}
    assert reads["captured", "prompt_lookup"] == "eager, exact shapes (its drafts need the host)"
    assert reads["captured", "autoregressive"] == "eager, fixed shapes"
    assert reads["eager", "autoregressive"] == "eager, exact shapes"
    report = (tmp_path / "latency.md").read_text()
    assert report.count("| prompt_lookup | eager, exact shapes") == 2
    assert "Copy bandwidth" in report
    assert "| goal |" not in report
    monkeypatch.setattr(gpu_latency, "rows_hash", lambda: "other code")
    measure(tmp_path, seconds=0)
    assert "4 rows are left" in capsys.readouterr().out


def test_rows_of_other_code_configs_or_torch_are_measured_anew(tmp_path, monkeypatch):
    before = gpu_latency.rows_hash()
    monkeypatch.setattr(torch, "__version__", "2.99")
    other = gpu_latency.rows_hash()
    monkeypatch.undo()
    sources = ["benchmarks/gpu.py", *gpu_latency.SOURCES]
    assert {"benchmarks/gpu_latency.py", "ctcdraft/evaluation/latency.py", "ctcdraft/models/meta.py"} <= set(sources)
    monkeypatch.setattr(gpu_latency, "SOURCES", sources)
    assert len({before, other, gpu_latency.rows_hash()}) == 3
    monkeypatch.undo()
    assert gpu_latency.rows_hash() == before


class CompilationError(Exception):
    """As Triton's, no RuntimeError."""


def test_an_error_of_one_drafter_is_a_row_and_tried_again(tmp_path, one_drafter, monkeypatch):
    monkeypatch.setattr(gpu_latency, "SMALL", replace(gpu_latency.SMALL, contexts=(16,), modes=("eager",)))
    random_drafter, errors = gpu_latency.random_drafter, [CompilationError(), CompilationError("it broke\nmore lines")]

    def refuses(name, base):
        if name == "prompt_lookup" and errors:
            raise errors.pop()
        return random_drafter(name, base)

    monkeypatch.setattr(gpu_latency, "random_drafter", refuses)
    for sentence in ("eager, 16, prompt_lookup: it broke\n", "eager, 16, prompt_lookup: CompilationError\n"):
        measure(tmp_path)
        assert sentence in (tmp_path / "latency.md").read_text()
    measure(tmp_path)
    assert [row["drafter"] for row in finished(tmp_path)] == ["autoregressive", "prompt_lookup"]
    assert "prompt_lookup:" not in (tmp_path / "latency.md").read_text()


def test_a_lost_device_ends_the_run_with_a_sentence(tmp_path, one_drafter, monkeypatch):
    def lost(name, base):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_latency, "random_drafter", lost)
    monkeypatch.setattr(gpu_latency, "still_works", lambda device: False)
    with pytest.raises(
        InputError, match=r"computes nothing after an error of autoregressive \(captured: CUDA error: an"
    ):
        measure(tmp_path)
    assert [row["error"] for row in rows_of(tmp_path)][-1].startswith("CUDA error")
    monkeypatch.undo()
    assert gpu_latency.still_works(torch.device("cpu"))


def test_graphs_and_caches_of_a_row_are_gone_in_the_next(one_drafter, monkeypatch):
    timer, caches = gpu_latency.LatencyTimer(torch.device("cpu"), gpu_latency.SMALL), []
    measure_contexts = gpu_latency.measure_contexts

    def checked(base, *rest):
        assert [cache() for cache in caches] == [None] * len(caches)
        measured = measure_contexts(base, *rest)
        caches.append(weakref.ref(base.static_shapes.cache))
        return measured

    monkeypatch.setattr(gpu_latency, "measure_contexts", checked)
    for _ in range(2):
        assert "error" not in timer.row("captured", 16, "autoregressive")
    assert len(caches) == 2


def test_compiled_code_is_kept(monkeypatch):
    timer = gpu_latency.LatencyTimer(torch.device("cpu"), gpu_latency.SMALL)
    forwards = []
    for _ in range(2):
        timer.renew_shapes(True, True)
        forwards.append(timer.base.static_shapes.compiled_forward)
    assert forwards[0] is forwards[1] is not None


def test_a_failed_capture_is_reported_as_such(monkeypatch):
    monkeypatch.setattr(gpu_latency, "can_capture", lambda device: True)
    timer = gpu_latency.LatencyTimer(torch.device("cpu"), gpu_latency.SMALL)
    settings, drafters = instantiate(timer.config.decoding), gpu_latency.random_drafter
    timer.renew_shapes(True, False)
    assert timer.execution(drafters("ctc", timer.base), settings)["captured"] is True
    assert timer.execution(drafters("prompt_lookup", timer.base), settings)["captured"] is False
    timer.base.static_shapes.decoders["ctc"] = SimpleNamespace(graphs=SimpleNamespace(error="it waits"))
    assert timer.execution(drafters("ctc", timer.base), settings)["captured"] is False
    timer.renew_shapes(False, False)
    assert timer.execution(drafters("ctc", timer.base), settings)["captured"] is False


def test_every_drafter_with_weights_is_measured():
    parallel = {"ctc", "ctc_gru", "transducer", "medusa", "blockwise", "dflash", "dspark", "domino", "peagle"}
    assert {*parallel, "hydra", "eagle_dynamic"} <= set(gpu_latency.DRAFTERS)
    assert gpu_latency.FULL.contexts == (1024, 8192)


def test_goals_beside_the_rows():
    row = {"mode": "captured", "captured": True, "context": 1024, "drafter": "ctc", "c": 0.08, "o": 0.02, "v64": None}
    assert [(one["measure"], one["reached"]) for one in gpu_latency.goals_of(row)] == [("c", False), ("o", True)]
    row |= {"drafter": "autoregressive", "utilization": 0.8, "v64": 1.1}
    assert [(one["measure"], one["reached"]) for one in gpu_latency.goals_of(row)] == [
        ("utilization", True), ("v64", True), ("o", True),
    ]  # fmt: skip
    assert not list(gpu_latency.goals_of(row | {"captured": False}))


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
    with pytest.raises(InputError, match="give one of tests, latency, kernels, demo"):
        gpu.main(["everything"])


def test_the_repository_runs_without_being_installed():
    assert package_version("no-such-package") == "not installed"


def test_latency_is_ended_by_the_deadline_within_a_row(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(gpu, "run_logged", lambda *call: commands.append(call))
    gpu.main(["latency", "device=cpu", f"out={tmp_path}", "seconds=200"])
    ((command, log, deadline),) = commands
    folder = next(tmp_path.iterdir())
    assert command == ["-m", "benchmarks.gpu_latency", "cpu", str(folder), "200"]
    assert (log, round(deadline - gpu.monotonic())) == (folder / "latency.txt", 200)
    assert json.loads((folder / "latency-environment.json").read_text())["device"]


def test_the_name_of_a_card_is_a_folder():
    assert gpu.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_output_is_logged_as_it_comes_and_the_deadline_holds(tmp_path):
    log = tmp_path / "log.txt"
    with pytest.raises(InputError, match="the time of this part is over"):
        gpu.run_logged(["-c", "import time; print('first', flush=True); time.sleep(60)"], log, gpu.monotonic() + 3)
    assert log.read_text() == "first\n"
    with pytest.raises(InputError, match="exit status 3"):
        gpu.run_logged(["-c", "raise SystemExit(3)"], log, gpu.monotonic() + 9)
