"""Whole evaluations on a random base: interleaving, resuming, shards, the report's contract."""

import json

import pytest
import torch
from small_evaluations import NO_TRACE, PROMPTS, Corrupt, evaluate_to, interrupt_at, make_evaluation, make_setup
from tiny_models import random_base

from ctcdraft.corpus.chat_template import chat_messages, prompt_tokens
from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.static_step import StaticDecoder
from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError
from ctcdraft.evaluation import environment, runner
from ctcdraft.evaluation import evaluation as evaluation_module
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import from_json
from ctcdraft.report import markdown

CONTRACT = {
    *("drafter", "benchmark", "decoding", "temperature", "seed", "nodes", "adaptive", "mean_nodes", "prompts"),
    *("tokens", "passes"),
    *("tau", "tau_ci", "tau_mean", "tau_paper", "alpha", "acceptance_rate"),
    *("speedup", "speedup_ci", "speedup_decode", "speedup_paper", "tokens_per_second"),
    *("time", "c", "v", "o", "predicted_speedup", "roof_share", "peak_memory_bytes", "lossless", "accuracy"),
    *("ended_share", "repeated_4gram_share", "categories", "draft_parameters", "hardware", "dtype", "fingerprint"),
    *("crossing", "quantised_since", "other_kernels", "c_least", "steps"),
}
LOSSLESS = {"unit", "prompts", "equal", "rounding", "first_divergence_margins", "chi_square", "tv", "null_tv"}
LOSSLESS |= {"owes", "p_value", "tokens", "by_draft", "owed", "null"}
COUNTED = ("drafter", "prompts", "tokens", "passes", "tau", "tau_ci", "tau_paper", "alpha", "lossless", "accuracy")


def run(evaluation, path, overwrite=False, timing_questions=2):
    return evaluate_to(path, evaluation, overwrite, profiled=timing_questions)


def run_first(path, overwrite=False, **changes):
    """Evaluate the first question with other settings or another contestant."""
    return run(make_evaluation(make_setup(**changes), PROMPTS[:1]), path, overwrite)


@pytest.fixture
def answered(monkeypatch):
    """The indices of the questions that are answered, and not taken from a file."""
    indices, answer_question = [], runner.run_question
    monkeypatch.setattr(runner, "run_question", lambda *args: indices.append(args[2]) or answer_question(*args))
    return indices


def lines(path):
    return [from_json(line) for file in sorted(path.glob("questions*")) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One evaluation with a corrupt contestant, shared by tests that only read it."""
    path = tmp_path_factory.mktemp("finished")
    return path, run(make_evaluation(make_setup(corrupt=Corrupt())), path)


def test_the_report_has_exactly_the_fields_of_the_contract(finished):
    path, report = finished
    text = (path / "report.json").read_text()
    assert text.count("\n") == 1  # compact: report.md is the readable one
    written = json.loads(text)
    assert written == json.loads(json.dumps(report))
    assert [row["drafter"] for row in written["rows"]] == ["autoregressive", "prompt_lookup", "corrupt"]
    for row in written["rows"]:
        assert set(row) == CONTRACT
        assert list(row["time"]) == ["draft", "tree", "read", "verify", "keep", "other", "prefill"]
        assert set(row["lossless"]) == LOSSLESS
        assert list(row["categories"]) == ["sums", "talk"]


def test_the_autoregressive_row_is_one(finished):
    row = finished[1]["rows"][0]
    assert row["tau"] == row["speedup"] == row["speedup_decode"] == 1
    assert row["c"] + row["v"] + row["o"] == pytest.approx(1, abs=1e-12)
    assert row["predicted_speedup"] == pytest.approx(1, abs=1e-12)


def test_a_corrupt_contestant_is_reported(finished):
    path, report = finished
    faithful, corrupt = report["rows"][1:]
    assert faithful["lossless"]["equal"] == 4
    assert corrupt["lossless"]["equal"] + corrupt["lossless"]["rounding"] < 4
    assert len(corrupt["lossless"]["first_divergence_margins"]) >= 4 - corrupt["lossless"]["equal"]
    for text in ((path / "report.md").read_text(), markdown.terminal(**report)):
        assert "NOT LOSSLESS: corrupt differs" in text
    assert max(map(len, markdown.terminal(**report).split("\n")[:4])) <= 110


def test_a_corrupt_contestant_is_reported_in_half_precision(tmp_path):
    setup = make_setup(random_base().to(torch.bfloat16), corrupt=Corrupt())
    report = run(make_evaluation(setup, PROMPTS[:2]), tmp_path)
    assert "NOT LOSSLESS: corrupt differs on 2 of 2 questions" in markdown.terminal(**report)


def test_prompts_that_do_not_fit_are_counted_and_reported(finished):
    path, report = finished
    cut = next(record.turns[0].cut for record in lines(path) if record.id == "d")
    assert report["environment"]["cut"] == {"turns": 1, "tokens": cut}
    assert f"truncated on the left by {cut} tokens" in (path / "report.md").read_text()


def test_a_second_turn_follows_the_autoregressive_answer_for_all_contestants(finished):
    record = next(record for record in lines(finished[0]) if record.id == "b")
    tokenizer = make_setup().base.tokenizer
    response = record.turns[0].answers["autoregressive"].text
    assert response != record.turns[0].answers["corrupt"].text
    assert record.turns[1].prompt_tokens == len(prompt_tokens(tokenizer, chat_messages(PROMPTS[1].turns, [response])))


def test_the_order_is_shuffled_and_complete(finished):
    orders = [tuple(turn.answers) for record in lines(finished[0]) for turn in record.turns]
    assert len(set(orders)) > 1
    assert {frozenset(order) for order in orders} == {frozenset(orders[0])}
    assert len({order.index("autoregressive") for order in orders}) > 1  # autoregression is shuffled as well


def test_all_contestants_are_warmed_up_before_anything_is_timed(tmp_path, monkeypatch):
    """Also if every question was answered by an earlier process, and only profiling is left."""
    setup, calls = make_setup(), []
    names = {drafter: name for name, drafter in setup.contestants.items()}
    generate, instrument = runner.generate_answer, evaluation_module.profile_answer

    def recorded(base, drafter, prompt_L, settings, *rest):
        calls.append((names[drafter], settings.max_new_tokens))
        return generate(base, drafter, prompt_L, settings, *rest)

    monkeypatch.setattr(runner, "generate_answer", recorded)  # warming up
    monkeypatch.setattr("ctcdraft.evaluation.contestants.generate_answer", recorded)
    monkeypatch.setattr(evaluation_module, "profile_answer", lambda *args: calls.append("clocks") or instrument(*args))
    run(make_evaluation(setup, PROMPTS[:1]), tmp_path, timing_questions=1)
    warm_up = [("autoregressive", 4), ("prompt_lookup", 4)]
    assert sorted(calls[:2]) == warm_up
    assert {tokens for _, tokens in calls[2:4]} == {12}
    assert sorted(calls[4:6]) == warm_up
    assert calls[6:] == ["clocks", "clocks"]

    calls.clear()
    (tmp_path / "timing.json").unlink()
    run(make_evaluation(setup, PROMPTS[:1]), tmp_path, timing_questions=1)
    assert sorted(calls[:2]) == warm_up
    assert calls[2:] == ["clocks", "clocks"]


def test_no_shape_is_run_for_the_first_time_while_an_answer_is_timed(tmp_path, monkeypatch):
    """Steps of fixed shapes are captured when they first run; a longer text makes another one."""
    base, state, late = random_base(context=600), {"clock_runs": False, "seen": set()}, []
    base.static_shapes = StaticShapes()
    run_step, timed_answer = StaticDecoder.run, runner.timed_answer

    def recorded(self, rows, first=None, watch=None):
        shape = id(self), rows
        late.extend([shape] * (first is None and state["clock_runs"] and shape not in state["seen"]))
        state["seen"].add(shape)
        run_step(self, rows, first, watch)

    def timed(*arguments):
        state["clock_runs"] = True
        answer = timed_answer(*arguments)
        state["clock_runs"] = False
        return answer

    monkeypatch.setattr(StaticDecoder, "run", recorded)
    monkeypatch.setattr(runner, "timed_answer", timed)
    prompts = [Prompt(str(size), "x", ("x" * size,), None) for size in (5, 235, 310)]
    report = run(make_evaluation(make_setup(base, nodes=12), prompts), tmp_path, timing_questions=0)
    assert {rows for _, rows in state["seen"]} == {256, 512}
    assert late == []
    reason = "exact shapes (its drafts need the host)"
    assert [row["steps"] for row in report["rows"]] == ["eager, fixed shapes", reason]
    assert f"steps of prompt_lookup: {reason}" in (tmp_path / "report.md").read_text()


def test_sampling_is_equal_token_for_token_too(tmp_path):
    rows = run(make_evaluation(make_setup(temperature=1.0), PROMPTS[:2]), tmp_path)["rows"]
    assert [row["lossless"]["equal"] for row in rows] == [2, 2]


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


@pytest.mark.parametrize("changes", [{"nodes": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}])
def test_impossible_settings(changes):
    with pytest.raises(InputError):
        make_setup(**changes)


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
