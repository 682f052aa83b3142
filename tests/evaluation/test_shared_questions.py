"""Several processes, here threads, share the questions of an evaluation: each once, the report as of one process."""

from __future__ import annotations

import json

import pytest
from small_evaluations import PROMPTS, Corrupt, evaluate_to, make_evaluation, make_setup, replay_to
from thread_processes import run_threads

from benchmarks.rehearsal import TIMES, without_times
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.evaluation import runner
from ctcdraft.evaluation.records import from_json
from ctcdraft.evaluation.replay.evaluation import ReplayEvaluation
from ctcdraft.report.markdown import statements

ALL = (*PROMPTS, *PROMPTS[:2])


def evaluation(prompts=ALL, shard=None):
    return make_evaluation(make_setup(corrupt=Corrupt()), prompts, shard)


def together(path, processes, prompts=ALL, shard=None, **more):
    shared = evaluation(prompts, shard)  # made before the threads, which have one random generator
    contents = run_threads(lambda process: evaluate_to(path, shared, processes=process, **more), range(processes))
    assert contents[1:] == [None] * (processes - 1)
    return contents[0]


def read_records(path):
    return {file.name: [from_json(line) for line in file.read_text().splitlines()] for file in path.glob("questions*")}


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    return evaluate_to(tmp_path_factory.mktemp("one"), evaluation())


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_answer_each_question_once_and_report_what_one_reports(
    tmp_path, of_one_process, processes, monkeypatch
):
    answered, run_question = [], runner.run_question
    monkeypatch.setattr(runner, "run_question", lambda *args: answered.append(args[2]) or run_question(*args))
    report = together(tmp_path, processes, alone=2)
    ((name, records),) = read_records(tmp_path).items()
    assert name == "questions.jsonl"
    assert sorted(answered) == list(range(len(ALL)))
    assert sorted(record.index for record in records) == list(range(len(ALL)))
    assert sum(record.timed for record in records) == 2
    assert without_times(report["rows"]) == without_times(of_one_process["rows"])
    assert report["environment"]["questions"] == {"asked": 6, "finished": 6, "reused": 0, "timed": 2}
    lookup = report["rows"][1]
    assert lookup["speedup"] > 0
    assert "times and speed-ups are those of 2 questions, which one process answered alone" in statements(
        report["rows"], report["environment"]
    )
    many = [{**row, "prompts": 20} for row in report["rows"]]
    for rows, few in ((report["rows"], True), (many, False)):
        said = [line for line in statements(rows, report["environment"]) if "questions are too narrow" in line]
        assert [line[:34] for line in said] == ["95 % intervals of 6 questions are "] * few
    timed = [record for record in records if record.timed]
    answers = [answer for record in timed for answer in record.answers("prompt_lookup")]
    seconds = sum(answer.seconds for answer in answers)
    assert lookup["tokens_per_second"] == pytest.approx(sum(len(one.tokens) for one in answers) / seconds)


def test_without_questions_of_their_own_no_speeds_are_reported(tmp_path):
    report = together(tmp_path, 2, profiled=0)
    for row in report["rows"]:
        assert {row[key] for key in TIMES - {"time"}} == {None}
    assert json.loads((tmp_path / "report.json").read_text())["rows"][1]["tau"] > 0


@pytest.mark.parametrize("then", [1, 2, 3])
def test_a_killed_job_is_resumed_by_any_number_of_processes(tmp_path, of_one_process, monkeypatch, then):
    answered = []

    def run_question(setup, checker, index, *more):
        answered.append(index)
        if len(answered) == 4:
            raise KeyboardInterrupt
        return original(setup, checker, index, *more)

    original = runner.run_question
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_question", run_question)
        with pytest.raises(KeyboardInterrupt):
            together(tmp_path, 2)
    kept = sum(len(records) for records in read_records(tmp_path).values())
    assert 3 <= kept < 6
    with next(tmp_path.glob("questions*")).open("a") as stream:
        stream.write('{"index": 5, "id')  # as a kill leaves it
    report = evaluate_to(tmp_path, evaluation()) if then == 1 else together(tmp_path, then)
    assert report["environment"]["questions"]["reused"] == kept
    assert list(read_records(tmp_path)) == ["questions.jsonl"]
    assert without_times(report["rows"]) == without_times(of_one_process["rows"])


def test_processes_of_two_shards_complete_one_report(tmp_path, of_one_process):
    first = together(tmp_path, 2, shard=Shard(1, 2))
    assert first["environment"]["questions"]["finished"] == 3
    report = together(tmp_path, 2, shard=Shard(2, 2))
    assert without_times(report["rows"]) == without_times(of_one_process["rows"])
    assert sorted(read_records(tmp_path)) == ["questions-1-of-2.jsonl", "questions-2-of-2.jsonl"]


def test_a_replay_is_shared_too(tmp_path):
    replay = ReplayEvaluation([2, 4], 1)
    setup = make_setup(max_new_tokens=4)
    alone = replay_to(tmp_path / "one", make_evaluation(setup), replay)
    shared = run_threads(
        lambda process: replay_to(tmp_path / "two", make_evaluation(setup), replay, processes=process), range(2)
    )
    assert shared[1] is None
    assert shared[0]["rows"] == alone["rows"]


def test_other_settings_are_refused_in_every_process(tmp_path):
    together(tmp_path, 2, PROMPTS[:2])
    other = make_evaluation(make_setup(corrupt=Corrupt(), max_new_tokens=5), PROMPTS[:2])
    with pytest.raises(InputError, match=r"decoding.max_new_tokens was 12 \(now 5\)"):
        run_threads(lambda process: evaluate_to(tmp_path, other, processes=process), range(2))
