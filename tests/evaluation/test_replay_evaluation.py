"""Evaluation by replay: rows equal those of the decoding loop, and the losslessness check is a real one."""

import json
from dataclasses import replace
from functools import partial

import pytest
from small_evaluations import NO_TRACE, PROMPTS, Corrupt, make_evaluation, make_setup, replay_to
from tiny_models import random_base
from training_parts import block_head

from ctcdraft.decoding.settings import DecodeStep
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.trees.sampled import SampledTokens
from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import QuestionSums, comparison_pairs, paired_difference, pool_sums
from ctcdraft.evaluation.contestants import StockGenerate
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.records import Answer
from ctcdraft.evaluation.replay.evaluation import ReplayEvaluation
from ctcdraft.nn.bodies import ResidualBody
from ctcdraft.report import markdown

SIZES = (2, 4, 8)


def with_lookups(corrupt=None):
    """Two of a kind, so that there is a difference to tell; text that repeats itself, so that lookups find some."""
    setup = make_setup(random_base(initializer_range=0.1), corrupt=corrupt, max_new_tokens=24)
    return replace(setup, contestants={**setup.contestants, "shorter": PromptLookup(setup.base, 1, 2)})


def replayed(path, setup, checked=1, how=None, pairs=(("prompt_lookup", "shorter"),)):
    one = replace(make_evaluation(setup, PROMPTS[:3]), pairs=pairs)
    return replay_to(path, one, how or ReplayEvaluation(SIZES, checked))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay")
    return path, replayed(path, with_lookups())


def test_rows_and_differences_are_those_of_the_loop(finished, tmp_path):
    content = finished[1]
    assert content["environment"]["replay"] == {"nodes": list(SIZES), "checked": 1, "answers": 6, "alike": 6}
    for nodes in SIZES:
        setup = with_lookups()
        loop = replace(make_evaluation(replace(setup, settings=replace(setup.settings, nodes=nodes)), PROMPTS[:3]))
        loop = replace(loop, pairs=(("prompt_lookup", "shorter"),))
        timed = loop.run(OutputDir(tmp_path / str(nodes), loop.shard), False, 0, 0, NO_TRACE)
        for row in timed["rows"]:
            size = 1 if row["drafter"] == "autoregressive" else nodes
            [ours] = [one for one in content["rows"] if (one["drafter"], one["nodes"]) == (row["drafter"], size)]
            for key in ("tokens", "passes", "tau", "tau_ci", "tau_mean", "alpha", "acceptance_rate", "accuracy"):
                assert ours[key] == row[key], key
            assert ours["speedup"] is ours["c"] is ours["tokens_per_second"] is None
            assert ours["lossless"]["prompts"] == ours["lossless"]["equal"] == 1
        [decoded], [ours] = timed["differences"], [one for one in content["differences"] if one["nodes"] == nodes]
        assert (decoded["tau"], decoded["tau_ci"], decoded["questions"]) == (ours["tau"], ours["tau_ci"], 3)
        assert decoded["speedup_ci"][0] <= decoded["speedup"] <= decoded["speedup_ci"][1]
        assert ours["speedup"] is None


def test_the_report_states_what_was_replayed_and_what_was_checked(finished):
    path, content = finished
    for shown in ((path / "report.md").read_text(), markdown.terminal(**content)):
        assert "the loop decoded 1 of them as well, at every size, and 6 of 6 responses took exactly" in shown
        assert "every method's tokens equal the baseline's on all 1 questions" in shown
    assert "prompt_lookup minus shorter, 8 nodes: tau +" in markdown.terminal(**content)
    assert json.loads((path / "report.json").read_text()) == json.loads(json.dumps(content))


def test_an_interrupted_replay_resumes(finished, tmp_path):
    path, content = finished
    lines = (path / "questions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "settings.json").write_text((path / "settings.json").read_text())
    (tmp_path / "questions.jsonl").write_text("".join(lines[:2]) + lines[2][:40])
    again = replayed(tmp_path, with_lookups())
    assert again["rows"] == content["rows"]
    with pytest.raises(InputError, match=r"replay\.checked was 1"):
        replayed(tmp_path, with_lookups(), checked=2)


def test_a_loop_that_changes_the_text_is_caught(tmp_path):
    """A corrupt drafter drafts nothing, so its replay is correct; the loop that decodes it is not."""
    content = replayed(tmp_path, with_lookups(Corrupt()), how=ReplayEvaluation([4], 2), pairs=())
    [row] = [row for row in content["rows"] if row["drafter"] == "corrupt"]
    assert row["lossless"]["owed"]["wrong"] > 0
    assert "NOT LOSSLESS: corrupt differs" in markdown.terminal(**content)


def test_what_cannot_be_replayed_is_refused(tmp_path):
    for wrong in ({"nodes": []}, {"nodes": [4, 2]}, {"nodes": [1, 4]}, {"checked": 0}):
        with pytest.raises(InputError, match=r"measure\."):
            ReplayEvaluation(**{"nodes": [4], "checked": 1, **wrong})
    setup = with_lookups()
    outside = {**setup.contestants, "outside": StockGenerate(setup.base, {}, None, None)}
    with pytest.raises(InputError, match="outside does not decode with our loop"):
        replayed(tmp_path, replace(setup, contestants=outside))
    head = block_head(setup.base, partial(ResidualBody, blocks=1), SampledTokens(1))
    with pytest.raises(InputError, match="samples its draft tokens"):
        replayed(tmp_path / "drawn", replace(setup, contestants={**setup.contestants, "drawn": head}))


def question(tokens, passes, seconds=0.0):
    step = DecodeStep(tokens // passes, 0, False, 1, 0)
    return [Answer(tuple(range(tokens)), "", (step,) * passes, True, 0.0, seconds, None)]


def test_a_difference_by_hand():
    """Every question gains the same, so a paired interval is a point, however much questions differ."""
    more = QuestionSums.from_questions([question(20, 5, 1.0), question(40, 10, 2.0), question(4, 1, 0.2)])
    less = QuestionSums.from_questions([question(20, 10, 2.0), question(40, 20, 4.0), question(4, 2, 0.4)])
    base = QuestionSums.from_questions([question(20, 20, 4.0), question(40, 40, 8.0), question(4, 4, 0.8)])
    decoded = paired_difference(more, less, base, seed=0)
    assert (decoded["tau"], decoded["speedup"], decoded["questions"]) == (2.0, pytest.approx(2.0), 3)
    assert decoded["tau_ci"] == pytest.approx([2.0, 2.0])
    assert decoded["speedup_ci"] == pytest.approx([2.0, 2.0])
    assert paired_difference(less, more, base, seed=0)["tau"] == -2.0
    alone = [QuestionSums.from_questions([question(4, passes)]) for passes in (1, 2, 4)]
    untimed = paired_difference(*alone, seed=0)
    assert (untimed["tau"], untimed["tau_ci"], untimed["speedup"]) == (2.0, None, None)
    assert pool_sums([alone[0], alone[1]]) == QuestionSums([8], [3], [], [])
    assert pool_sums([more, more]).seconds == [2.0, 4.0, 0.4]


def test_default_and_given_pairs():
    names = ["autoregressive", "ctc", "medusa", "hydra"]
    assert comparison_pairs(names, None) == [("ctc", "medusa"), ("ctc", "hydra")]
    assert comparison_pairs(names[:1] + names[1:2], None) == comparison_pairs(names[:1], None) == []
    assert comparison_pairs(names, [["hydra", "medusa"]]) == [("hydra", "medusa")]
    for wrong in ([["ctc"]], [["ctc", "eagle"]]):
        with pytest.raises(InputError, match="must be pairs of the rows"):
            comparison_pairs(names, wrong)
