"""What a report says about sampled drafts and lossy verifiers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_evaluations import PROMPTS, Corrupt, evaluate_to, make_evaluation, make_setup
from test_distribution import Biased, Sampled

from ctcdraft.decoding.lossy_acceptance import RelaxedAcceptance, TypicalAcceptance
from ctcdraft.decoding.verification import (
    Rejection,
    match,
    multi_round,
)
from ctcdraft.evaluation.contestants import qualified_name
from ctcdraft.evaluation.distribution_test import (
    MIN_TOKENS_FOR_P_VALUE,
)
from ctcdraft.evaluation.records import SAME_DISTRIBUTION
from ctcdraft.report import markdown as report_markdown


def run(setup, path):
    return evaluate_to(path, make_evaluation(setup, PROMPTS[:2]))


def with_sampled(drafter, **changes):
    setup = make_setup(temperature=1.0, token_for_token=False, max_new_tokens=60, **changes)
    setup.contestants["drawn"] = drafter
    return setup


def test_the_report_states_the_guarantee_of_each_row(tmp_path):
    setup = with_sampled(Sampled(2, 261), verify=Rejection(multi_round))
    content = run(setup, tmp_path)
    rows = {row["drafter"]: row["lossless"] for row in content["rows"]}
    assert {name: lossless["owes"] for name, lossless in rows.items()} == {
        "autoregressive": "words", "prompt_lookup": "words", "drawn": SAME_DISTRIBUTION,
    }  # fmt: skip
    assert rows["prompt_lookup"]["equal"] == 2
    assert rows["drawn"]["tv"] > 0
    assert rows["drawn"]["null_tv"] == rows["autoregressive"]["tv"]
    assert rows["drawn"]["tokens"] == content["rows"][-1]["tokens"] + 3  # with the prefill's, in each of three turns
    assert MIN_TOKENS_FOR_P_VALUE < rows["drawn"]["by_draft"]["tokens"] < rows["drawn"]["tokens"]
    assert rows["autoregressive"]["by_draft"] is None
    for text in ((tmp_path / "report.md").read_text(), report_markdown.terminal(**content)):
        assert "drawn must follow the base model's distribution" in text
        assert "in the order of q/p" in text
        assert "LOSS" not in text.replace("LOSSY: not even", "")
    again = run(setup, tmp_path)  # from the lines on disk
    assert again["rows"][-1]["lossless"] == rows["drawn"] | {"owes": SAME_DISTRIBUTION}


def test_a_biased_verifier_is_reported(tmp_path):
    content = run(with_sampled(Biased(1, 261), verify=Rejection(multi_round)), tmp_path)
    assert "NOT LOSSLESS: drawn must follow the base model's distribution" in report_markdown.terminal(**content)


class SampledOrCorrupt(Sampled):
    """Samples in answers to short prompts; in others it drafts nothing and corrupts the tokens the base model reads."""

    def draft(self, context, memory, rng):
        memory = memory or len(context.tokens_L)
        if memory < 24:
            return super().draft(context, None, rng)[0], memory
        return Corrupt().draft(context, None, rng)[0], memory


def test_tokens_must_be_equal_in_answers_without_sampled_drafts(tmp_path):
    setup = with_sampled(SampledOrCorrupt(1, 261), verify=Rejection(multi_round))
    content = run(setup, tmp_path)
    lossless = content["rows"][-1]["lossless"]
    assert lossless["owes"] == SAME_DISTRIBUTION
    assert lossless["p_value"] is None or lossless["owed"]["wrong"] == 1
    result = report_markdown.terminal(**content)
    assert "NOT LOSSLESS: drawn differs on 1 of 2 questions in responses without sampled draft tokens" in result


def test_too_few_tokens_are_not_tested(tmp_path):
    setup = with_sampled(Biased(1, 261), verify=Rejection(multi_round))
    content = run(replace(setup, settings=replace(setup.settings, max_new_tokens=12)), tmp_path)
    text = report_markdown.terminal(**content)
    assert "too few for a test" in text
    assert "NOT LOSSLESS" not in text


@pytest.mark.parametrize(
    ("verify", "temperature"), [(TypicalAcceptance(0.09, 0.3), 1.0), (RelaxedAcceptance(5, 3.0), 0.0)]
)
def test_lossy_is_written_in_every_table(tmp_path, verify, temperature):
    """Relaxed acceptance is lossy at temperature 0, too, where all other verifiers give the base's tokens."""
    setup = with_sampled(Sampled(1, 261), verify=verify, lossless=False)
    content = run(replace(setup, settings=replace(setup.settings, temperature=temperature)), tmp_path)
    assert [row["lossless"]["owes"] for row in content["rows"]] == ["words", "nothing", "nothing"]
    markdown = (tmp_path / "report.md").read_text()
    lines = [line for line in markdown.split("\n") if line.startswith("| ") and " drawn" in line]
    assert len(lines) >= 5
    assert all("drawn (LOSSY)" in line for line in lines)
    text = report_markdown.terminal(**content)
    assert "LOSSY: this verifier" in text
    assert "every method's tokens equal the baseline's" not in text
    if temperature == 0:
        assert content["rows"][2]["lossless"]["equal"] < 2
        assert "drawn (LOSSY) has no guarantee; its tokens equal the baseline's on" in text


def test_at_temperature_0_tokens_must_be_equal(tmp_path):
    setup = with_sampled(Sampled(2, 261), verify=Rejection(multi_round))
    content = run(make_setup(**{"verify": setup.settings.verify, "token_for_token": False}), tmp_path)
    assert {row["lossless"]["owes"] for row in content["rows"]} == {"words"}
    assert {row["lossless"]["chi_square"] for row in content["rows"]} == {None}


def test_above_temperature_0_the_distribution_is_tested_for_all_rows(tmp_path):
    """A contestant whose tokens equal autoregression's fits exactly as well as it does."""
    content = run(make_setup(temperature=1.0, max_new_tokens=60), tmp_path)
    rows = {row["drafter"]: row["lossless"] for row in content["rows"]}
    assert {lossless["owes"] for lossless in rows.values()} == {"words"}
    assert rows["autoregressive"]["tokens"] > MIN_TOKENS_FOR_P_VALUE
    assert rows["prompt_lookup"]["tv"] == rows["prompt_lookup"]["null_tv"] == rows["autoregressive"]["tv"] > 0
    page = (tmp_path / "report.html").read_text()
    assert page.count(f"<td>{rows['autoregressive']['null_tv']:.4f}</td>") == 2 * len(rows)


def test_the_name_of_a_verifier_does_not_depend_on_the_process():
    assert qualified_name(match) == "ctcdraft.decoding.verification.match"
    assert (
        qualified_name(TypicalAcceptance(0.1, 0.2))
        == "ctcdraft.decoding.lossy_acceptance.TypicalAcceptance(epsilon=0.1, delta=0.2)"
    )
    inner = "ctcdraft.decoding.verification.multi_round"
    assert qualified_name(Rejection(multi_round)) == f"ctcdraft.decoding.verification.Rejection(rule={inner})"
