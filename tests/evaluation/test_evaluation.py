"""Whole evaluations on a random base: interleaving, warm-up, the report's contract."""

import json

import pytest
import torch
from small_evaluations import PROMPTS, Corrupt, evaluate_to, make_evaluation, make_setup
from tiny_models import random_base

from ctcdraft.corpus.chat_template import chat_messages, prompt_tokens
from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.static_step import StaticDecoder
from ctcdraft.errors import InputError
from ctcdraft.evaluation import evaluation as evaluation_module
from ctcdraft.evaluation import runner
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
        eager = first is not None and first.count_1 is None  # behind a prompt that is not padded
        shape = id(self), rows, None if first is None else len(first.new_tokens_K)
        late.extend([shape] * (not eager and state["clock_runs"] and shape not in state["seen"]))
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
    assert {rows for _, rows, _ in state["seen"]} == {256, 512}
    assert late == []
    reason = "exact shapes (its drafts need the host)"
    assert [row["steps"] for row in report["rows"]] == ["eager, fixed shapes", reason]
    assert f"steps of prompt_lookup: {reason}" in (tmp_path / "report.md").read_text()


def test_sampling_is_equal_token_for_token_too(tmp_path):
    rows = run(make_evaluation(make_setup(temperature=1.0), PROMPTS[:2]), tmp_path)["rows"]
    assert [row["lossless"]["equal"] for row in rows] == [2, 2]


@pytest.mark.parametrize("changes", [{"nodes": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}])
def test_impossible_settings(changes):
    with pytest.raises(InputError):
        make_setup(**changes)
