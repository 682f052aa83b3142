"""A finished report is not replaced by one of fewer questions, fewer contestants or another benchmark."""

import json
from functools import partial

import pytest
from small_evaluations import PROMPTS, evaluate_to, interrupt_at, make_evaluation, make_setup, replay_to

from ctcdraft.distributed import Shard
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.errors import InputError
from ctcdraft.evaluation import runner
from ctcdraft.evaluation.output_dir import refuse_smaller_evaluation
from ctcdraft.evaluation.replay.evaluation import ReplayEvaluation

WAYS = "choose another out=, or add overwrite=true to replace it"


def run(path, count, overwrite=False, shard=None, setup=None):
    evaluation = make_evaluation(setup or make_setup(max_new_tokens=4), PROMPTS[:count], shard)
    return evaluate_to(path, evaluation, overwrite, warm_up_tokens=1, profiled=0)


def files_of(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def assert_refused(path, sentence, attempt):
    """Assert that the attempt ends with one sentence and changes no file in `path`."""
    before = files_of(path)
    with pytest.raises(InputError, match=sentence) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    assert files_of(path) == before


def no_work(monkeypatch):
    """Make any further decoding fail the test."""

    def worked(*_):
        raise AssertionError("something was decoded")

    monkeypatch.setattr(runner, "generate_answer", worked)


def test_a_higher_limit_resumes_and_a_lower_one_is_refused(tmp_path, monkeypatch):
    assert run(tmp_path, 1)["rows"][0]["prompts"] == 1
    content = run(tmp_path, 4)
    assert content["environment"]["questions"] == {"asked": 4, "finished": 4, "reused": 1}
    no_work(monkeypatch)
    sentence = rf"holds a report of 4 questions of made_up, and this evaluation asks 2 questions; .*=4 or more.*{WAYS}"
    assert_refused(tmp_path, sentence, lambda: run(tmp_path, 2))
    assert run(tmp_path, 4)["rows"][0]["prompts"] == 4  # nothing to do, and nothing is lost


def test_overwriting_with_a_smaller_one_can_be_interrupted_and_resumed(tmp_path):
    run(tmp_path, 4)
    with interrupt_at(1):
        run(tmp_path, 2, overwrite=True)
    content = run(tmp_path, 2)
    assert content["environment"]["questions"] == {"asked": 2, "finished": 2, "reused": 1}


def test_shards_do_not_shrink_the_report_of_all(tmp_path):
    """Half of the questions are finished; a lower limit would drop some of them."""
    run(tmp_path, 4, shard=Shard(1, 2))
    sentence = r"holds a report of 2 of 4 questions of made_up, and this evaluation asks 3 questions"
    for number in (1, 2):
        assert_refused(tmp_path, sentence, partial(run, tmp_path, 3, shard=Shard(number, 2)))
    assert run(tmp_path, 4, shard=Shard(2, 2))["rows"][0]["prompts"] == 4


def test_a_missing_contestant_is_refused_by_name(tmp_path):
    setup = make_setup(max_new_tokens=4)
    setup.contestants["longer"] = PromptLookup(setup.base, 3, 6)
    run(tmp_path, 2, setup=setup)
    sentence = rf"holds a report of 2 questions of made_up with 3 contestants, .* leaves out longer; .*{WAYS}"
    assert_refused(tmp_path, sentence, lambda: run(tmp_path, 2))


def test_a_replay_is_not_replaced_by_a_smaller_one(tmp_path):
    def replay(count):
        evaluation = make_evaluation(make_setup(max_new_tokens=4), PROMPTS[:count])
        return replay_to(tmp_path, evaluation, ReplayEvaluation([2], 1))

    assert replay(3)["rows"][0]["prompts"] == 3
    sentence = "a report of 3 questions of made_up, and this evaluation asks 1 question;"
    assert_refused(tmp_path, sentence, lambda: replay(1))


@pytest.mark.parametrize(
    ("report", "benchmark", "sentence"),
    [
        ({"rows": [{"drafter": "ctc", "benchmark": "gsm8k", "prompts": 120}]}, "mt_bench", "of 120 questions of gsm8k"),
        ({"rows": [{"drafter": "ctc"}]}, "gsm8k", "a report of something other than a benchmark"),
        ({"rows": [{"drafter": "ctc", "benchmark": "gsm8k", "prompts": 1}]}, "tiny", "of 1 question of gsm8k"),
    ],
)
def test_a_report_of_something_else_is_not_replaced(report, benchmark, sentence, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps({"environment": {}, **report}))
    with pytest.raises(InputError, match=rf"holds .*{sentence}, and this evaluation is of {benchmark}; {WAYS}"):
        refuse_smaller_evaluation(tmp_path, benchmark, 1000, ["autoregressive", "ctc"])


def test_an_unreadable_report_is_written_again(tmp_path):
    run(tmp_path, 2)
    whole = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "report.json").write_text("{")
    run(tmp_path, 2)
    again = json.loads((tmp_path / "report.json").read_text())
    assert [row["tokens"] for row in again["rows"]] == [row["tokens"] for row in whole["rows"]]
