"""Evaluations that are continued, split over processes, or found with other settings or damaged files."""

import json

import pytest
from small_evaluations import NO_TRACE, PROMPTS, Corrupt, interrupt_at, make_evaluation, make_setup
from test_evaluation import COUNTED, lines, run, run_first

from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.evaluation import environment, runner
from ctcdraft.evaluation import evaluation as evaluation_module
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.report import markdown


@pytest.fixture
def answered(monkeypatch):
    """The indices of the questions that are answered, and not taken from a file."""
    indices, answer_question = [], runner.run_question
    monkeypatch.setattr(runner, "run_question", lambda *args: indices.append(args[2]) or answer_question(*args))
    return indices


def test_running_again_resumes(tmp_path, answered):
    setup = make_setup()
    whole = run(make_evaluation(setup), tmp_path / "whole")
    with interrupt_at(2):
        run(make_evaluation(setup), tmp_path / "again")
    file = tmp_path / "again" / "questions.jsonl"
    before = file.read_text()
    file.write_text(before + before[:40])  # an incomplete last line

    answered.clear()
    again = run(make_evaluation(setup), tmp_path / "again")
    assert answered == [2, 3]
    assert file.read_text().startswith(before)
    assert [record.index for record in lines(tmp_path / "again")] == [0, 1, 2, 3]
    assert counted(again) == counted(whole)
    assert "reused" not in (tmp_path / "whole" / "report.md").read_text()
    assert again["environment"]["questions"] == {"asked": 4, "finished": 4, "reused": 2}
    report = run(make_evaluation(setup), tmp_path / "again")
    assert answered == [2, 3]
    for text in ((tmp_path / "again" / "report.md").read_text(), markdown.terminal(**report)):
        assert "the responses to 4 of 4 questions are reused from an earlier start" in text


def counted(report):
    """Return what does not depend on time."""
    return [{key: row[key] for key in COUNTED} for row in report["rows"]]


def test_shards_merge_to_the_report_of_one_run(tmp_path):
    setup = make_setup(corrupt=Corrupt())
    whole = run(make_evaluation(setup), tmp_path / "whole")
    for shard in (Shard(2, 2), Shard(1, 2)):
        report = run(make_evaluation(setup, shard=shard), tmp_path / "parts", timing_questions=1)
    assert counted(report) == counted(whole)
    assert [record.index for record in lines(tmp_path / "parts")] == [0, 2, 1, 3]
    assert {file.name for file in (tmp_path / "parts").glob("timing*")} == {"timing-1-of-2.json", "timing-2-of-2.json"}
    kept = (tmp_path / "parts" / "questions-1-of-2.jsonl").read_text()
    run(make_evaluation(setup, shard=Shard(2, 2)), tmp_path / "parts", overwrite=True, timing_questions=1)
    assert (tmp_path / "parts" / "questions-1-of-2.jsonl").read_text() == kept  # of another shard


def test_a_shard_without_questions_reports_nothing(tmp_path):
    report = run(make_evaluation(make_setup(), PROMPTS[:1], shard=Shard(2, 2)), tmp_path)
    assert report["rows"][0]["prompts"] == 0
    assert report["rows"][0]["tau"] is report["rows"][1]["speedup_ci"] is report["rows"][1]["c"] is None
    for text in ((tmp_path / "report.md").read_text(), markdown.terminal(**report)):
        assert "no question is finished here" in text
        assert "every method" not in text


def test_other_settings_are_refused_in_one_sentence(tmp_path):
    run_first(tmp_path)
    with pytest.raises(InputError, match=r"decoding.nodes was 8 \(now 4\).*overwrite=true"):
        run_first(tmp_path, nodes=4)
    with pytest.raises(InputError, match=r"contestants\.corrupt was None"):
        run_first(tmp_path, corrupt=Corrupt())
    (tmp_path / "mine.txt").write_text("not ours")
    report = run_first(tmp_path, overwrite=True, nodes=4)
    assert report["rows"][0]["nodes"] == 4
    assert (tmp_path / "mine.txt").exists()


def test_changes_that_affect_speed_or_text_are_refused(tmp_path, monkeypatch):
    """One change at a time to base model or libraries is refused by name."""

    def refused(key):
        with pytest.raises(InputError, match=rf"in which {key} was [^,]*; repeat") as caught:
            run(make_evaluation(setup, PROMPTS[:1]), tmp_path)
        assert "\n" not in str(caught.value)

    setup = make_setup()
    monkeypatch.setattr(evaluation_module, "environment", lambda: circumstances)
    circumstances = environment.environment() | {"git": {"commit": "abc", "dirty": False}}
    run(make_evaluation(setup, PROMPTS[:1]), tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["commit"], settings["attention"], settings["context_length"]) == ("abc", "sdpa", 256)

    whole = circumstances
    for package in ("torch", "transformers"):
        circumstances = whole | {"versions": whole["versions"] | {package: "0.1"}}
        refused(rf"versions\.{package}")
    circumstances = whole | {"git": {"commit": "abc", "dirty": True}, "date": "later", "command": "another"}
    run(make_evaluation(setup, PROMPTS[:1]), tmp_path)

    setup.base.context_length = 255
    refused("context_length")
    setup.base.context_length = 256
    setup.base.lm.set_attn_implementation("eager")
    refused("attention")
    setup.base.lm.set_attn_implementation("sdpa")
    with pytest.raises(InputError, match=r"warm_up_tokens was 4 \(now 5\)"):
        make_evaluation(setup, PROMPTS[:1]).run(
            OutputDir(tmp_path, Shard(1, 1)), False, warm_up_tokens=5, timing_questions=1, trace=NO_TRACE
        )


@pytest.mark.parametrize(
    ("before", "after"), [("1/2 2/2", Shard(1, 1)), ("1/1", Shard(2, 2)), ("2/2", Shard(2, 3)), ("1/12", Shard(1, 2))]
)
def test_another_split_of_the_questions_is_refused_or_replaced(before, after, tmp_path, answered):
    """Records of i/M would count for i/N: nothing would be measured, and old numbers reported for a new command."""
    setup = make_setup()
    for shard in map(Shard.parse, before.split()):
        run(make_evaluation(setup, shard=shard), tmp_path, timing_questions=1)
    old = {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(InputError, match=rf"is no part of shard={after.number}/{after.of}; .*overwrite=true") as caught:
        run(make_evaluation(setup, shard=after), tmp_path)
    assert "\n" not in str(caught.value)
    assert {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()} == old

    answered.clear()
    now = make_evaluation(setup, shard=after)
    report = run(now, tmp_path, overwrite=True, timing_questions=1)
    assert answered == list(now.prompts)
    assert report["rows"][0]["prompts"] == len(answered)
    measured = [file.name for file in tmp_path.iterdir() if file.name.startswith(("questions", "timing"))]
    assert sorted(measured) == [f"questions{after}.jsonl", f"timing{after}.json"]


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0"])
def test_invalid_shards_are_refused(text):
    with pytest.raises(InputError, match="i/N"):
        Shard.parse(text)


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [("settings.json", "{", r"settings\.json is unreadable"), ("questions.jsonl", "{}\n", "line 1 of")],
)
def test_a_damaged_file_is_named_and_can_be_overwritten(file, text, sentence, tmp_path):
    run_first(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(InputError, match=sentence):
        run_first(tmp_path)
    run_first(tmp_path, overwrite=True)
