"""The order in which jobs run, and what follows when one fails, diverges, does not fit or must run alone."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import ExitStack
from time import monotonic, sleep

import pytest
from test_comparison_jobs import SMALL, paced

from ctcdraft.errors import InputError
from studies.comparison import __main__ as command
from studies.comparison import measure
from studies.comparison.config import load_config
from studies.comparison.schedule import all_jobs
from studies.comparison.store import ResultStore, settings_digest

SECOND = "+bases.second={base:['base=local','base.path=b'],corpus:['corpus=tiny']}"
DIVERGENCE = "the gradient norm of step 9 is nan (trainer.max_nonfinite_steps=10); lower trainer.learning_rate"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A comparison whose jobs take no time; `broken` maps names of jobs to the sentence with which they fail."""
    ran, broken = [], {}

    def run_script(script, overrides, log):
        keys = dict(each.split("=", 1) for each in overrides)
        name = log.relative_to(tmp_path / "out" / "logs").as_posix().removesuffix(".log")
        ran.append(name)
        if name in broken:
            raise InputError(f"{script} ended with status 1: {broken[name]}")
        folder = tmp_path / "out" / keys["run" if script == "train.py" else "out"]
        folder.mkdir(parents=True)
        (folder / "drafter.safetensors" if script == "train.py" else folder / "report.json").write_text('{"rows": []}')
        return {"seconds": 60.0, "processor_seconds": 60.0}

    monkeypatch.setattr(measure, "run_script", run_script)
    monkeypatch.setattr(
        measure, "read_run", lambda folder: measure.Job(folder.name, {}, "", 1, 2.0, 1.0, {"processor": 50.0})
    )
    monkeypatch.setattr(measure, "count_parameters", lambda store, job: 10)
    monkeypatch.setattr(command.costs, "count_missing", lambda config, store, wait=False: None)
    monkeypatch.setattr(command, "write_page", lambda store, rules: None)
    arguments = [*SMALL, SECOND, "crossed=null", "measure.heads=9"]
    arguments += [f"out={tmp_path / 'out'}", f"results={tmp_path / 'results'}"]
    return arguments, ran, broken


def test_heads_at_one_seed_come_before_seeds_and_bases(world):
    arguments, ran, _ = world
    command.main(arguments)
    steps = [name.rpartition("/")[2] for name in ran]
    order = ("ctc.pace.s0", "ctc.1x-0.002.s0", "ctc.timing.s0", "ctc.4x.s0", "tiny-replay-4x.s0",
             "tiny-adaptive-4x.s0", "ctc.2x.s1", "tiny-replay-2x.s1")  # fmt: skip
    assert sorted(order, key=steps.index) == [*order]
    further = ("tiny/tiny-replay-2x.s1", "second/ctc.2x.s0", "second/tiny-fixed-2x.s0", "tiny/ctc.2x.s0")
    assert sorted(further, key=ran.index) == [*further]
    assert len(ran) == len({*ran}) == len(all_jobs(load_config(arguments), ResultStore(*places(arguments)).rows()))


def places(arguments):
    config = load_config(arguments)
    return config.out, config.results


def test_a_failing_job_blocks_only_what_needs_it(world):
    arguments, ran, broken = world
    broken |= {"tiny/medusa.4x.s0": "it does not run", "tiny/tiny-replay-4x.s0": "no memory"}
    with pytest.raises(InputError, match=r"1 jobs failed: tiny/medusa\.4x\.s0"):
        command.main(arguments)
    assert ran.count("tiny/medusa.4x.s0") == 1
    assert "tiny/hydra.4x.s0" in ran
    assert "tiny/ctc.2x.s1" not in ran, "the heads are not chosen before all are trained"
    broken.pop("tiny/medusa.4x.s0")
    with pytest.raises(InputError, match=r"1 jobs failed: tiny/tiny-replay-4x\.s0"):
        command.main(arguments)
    assert "tiny/ctc.2x.s1" in ran


def test_a_training_that_diverged_has_a_row_and_is_not_chosen_or_measured(world):
    arguments, ran, broken = world
    broken |= {"tiny/ctc.1x-0.002.s0": DIVERGENCE, "tiny/hydra.4x.s0": DIVERGENCE}
    command.main(arguments)
    store = ResultStore(*places(arguments))
    rows = store.rows()
    assert rows["tiny/ctc.1x-0.002.s0"]["tau"] == rows["tiny/hydra.4x.s0"]["tau"] == 0.0
    assert rows["tiny/ctc.2x.s0"]["learning_rate"] == 0.004
    assert "gradient norm of step 9" in store.jobs()["tiny/hydra.4x.s0"]["diverged"]
    assert "tiny/hydra.2x.s1" not in ran
    measured = json.dumps(store.jobs()["tiny/tiny-replay-4x.s0"]["overrides"])
    assert "medusa.4x.s0" in measured
    assert "hydra.4x.s0" not in measured


def test_no_job_begins_that_is_estimated_to_take_longer_than_what_is_left(world):
    arguments, _, _ = world
    config, store = load_config(arguments), ResultStore(*places(arguments))
    for row in paced(config).values():
        store.append_row(row)
    assert command.run_next(config, store, set(), end=monotonic() + 59.0) is None
    with ThreadPoolExecutor() as threads, store.lock("machine"):
        waiting = threads.submit(command.run_next, config, store, set(), monotonic() + 60.3)
        sleep(0.5)
    assert waiting.result(timeout=30) is None, "too little time is left after the wait"
    assert command.run_next(config, store, set(), end=monotonic() + 61.0) == "tiny/ctc.1x-0.002.s0"


def test_what_is_timed_waits_until_it_is_alone(world):
    arguments, ran, _ = world
    config, store = load_config(arguments), ResultStore(*places(arguments))

    def waits_for_others():
        ran.clear()
        with ThreadPoolExecutor() as threads, ExitStack() as other:
            other.enter_context(store.lock("machine", shared=True))
            waiting = threads.submit(command.run_next, config, store, set())
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
            assert ran == []
            other.close()
            return waiting.result(timeout=30)

    assert waits_for_others() == "tiny/ctc.pace.s0"
    command.main([*arguments, "measure.loops.adaptive=null", "measure.loops.fixed=null"])
    assert waits_for_others() == "tiny/tiny-adaptive-4x.s0"


def test_other_jobs_share_the_machine(world):
    arguments, _, _ = world
    config, store = load_config(arguments), ResultStore(*places(arguments))
    for row in paced(config).values():
        store.append_row(row)
    with store.lock("machine", shared=True):
        assert command.run_next(config, store, set()) == "tiny/ctc.1x-0.002.s0"


def test_what_results_has_is_not_made_again_where_out_was_lost(world):
    arguments, ran, _ = world
    command.main(arguments)
    store = ResultStore(*places(arguments))
    rows = store.trainings.read_text()
    shutil.rmtree(store.out)
    ran.clear()
    command.main(arguments)
    assert ran == []
    kept = [line for name, line in store.measured().items() if name != "tiny/tiny-replay-4x.s0"]
    store.evaluations.unlink()
    for line in kept:
        store.append_evaluation(line.pop("evaluation"), **line)
    command.main(arguments)
    assert ran[-1] == "tiny/tiny-replay-4x.s0"
    assert {name.rpartition("/")[2].partition(".")[2] for name in ran[:-1]} == {"4x.s0"}, "the heads that it measures"
    assert store.trainings.read_text() == rows
    shutil.rmtree(store.out)
    with pytest.raises(InputError, match=r"tiny/tiny-replay-.* in .* was made with other settings \(digest"):
        command.main([*arguments, "measure.checked=2"])


def test_settings_are_the_same_in_another_folder_and_differ_with_a_value():
    digest = settings_digest(["benchmark.path=a/b/test.jsonl", "drafter/tree=chain", "run=x/heads/h", "steps=2"])
    assert digest == settings_digest(["benchmark.path=c/test.jsonl", "drafter/tree=chain", "run=y/heads/h", "steps=2"])
    for other in ("steps=3", "benchmark.path=train.jsonl", "drafter/tree=prefix"):
        key = other.partition("=")[0]
        values = ["benchmark.path=a/b/test.jsonl", "drafter/tree=chain", "run=x/heads/h", "steps=2"]
        assert digest != settings_digest([other if one.startswith(key) else one for one in values])
    lists = ["contestants=[{}/heads/h@chain,{{copies:{{name:copies,path:{}/corpus}}}}]", "corpus.path=[{}/a,{}/b]"]
    digests = [settings_digest([one.replace("{}", folder).format() for one in lists]) for folder in ("/x/y", "z")]
    assert digests[0] == digests[1] != settings_digest([lists[0], "corpus.path=[x/a,x/c]"])


def test_a_head_whose_training_has_not_ended_is_not_measured(tmp_path, monkeypatch):
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "drafter.safetensors").touch()
    for status, trained in (("complete", True), ("250 of 400 steps", False)):
        job = measure.Job("head", {}, "", 1, 2.0, 1.0, {}, status)
        monkeypatch.setattr(measure, "read_run", lambda folder, job=job: job)
        assert measure.is_trained(folder) is trained
