"""What READMEs quote of a whole comparison, by pencil: who is named, in which arm, by which measurement."""

import json

import pytest
from arenas import rules_of

from ctcdraft.errors import InputError
from studies.comparison.tables import Found
from studies.readme_comparison_tables import Compared, against_rivals, contributions, timed, timed_heads

DIFFERENCE = {"benchmark": "gsm8k", "tau": 0.5, "tau_ci": [0.25, 0.75]}


def difference(more, less, arm, kind, **changes):
    return (
        {"more": more, "less": less, "arm": arm, "kind": kind, "nodes": 16, "temperature": 0.0} | DIFFERENCE | changes
    )


def head(entrant, arm, same_as=None, readings=(None,)):
    return {"entrant": entrant, "arm": arm, "same_as": same_as, "readings": list(readings), "seed": 0, "parameters": 1}


def row(asked, drafter, speed):
    place = {"kind": "loop", "benchmark": asked, "temperature": 0.0, "nodes": 16, "drafter": drafter}
    return place | {"speedup": speed, "fingerprint": {"base": "a base"}}


@pytest.fixture
def compared():
    training = {
        "ctc_gru": head("ctc_gru", "steps"),
        "medusa": head("medusa", "steps", readings=(None, "direct")),
        "ctc_gru.time": head("ctc_gru", "time", "ctc_gru"),
        "medusa.time": head("medusa", "time", readings=(None, "direct")),
        "blockwise.time": head("blockwise", "time", readings=("direct",)),
    }
    speeds = {
        "ctc_gru": 1.5,
        "medusa": 9.0,
        "medusa.time": 1.2,
        "medusa.time@direct": 1.3,
        "blockwise.time@direct": 1.1,
    }
    speeds |= {"oracle": 4.0, "prompt_lookup": 1.4, "transformers_greedy": 0.9}
    rows = [row(asked, name, speed) for asked in ("gsm8k", "mt_bench") for name, speed in speeds.items()]
    rows.remove(row("mt_bench", "transformers_greedy", 0.9))  # not certified there
    told = [
        difference("ctc_gru", "medusa", "latency", "replay"),
        difference("ctc_gru", "medusa", "latency", "replay", nodes=64),
        difference("ctc_gru", "medusa", "latency", "replay", temperature=1.0),
        difference("ctc_gru", "medusa@direct", "latency", "replay"),
        difference("ctc_gru", "hydra", "time", "replay", tau=0.125, tau_ci=[0.0, 0.25]),  # of more questions
        difference("ctc_gru", "hydra", "time", "loop"),
        difference("ctc_gru", "medusa@direct", "time", "loop"),
        difference("ctc_gru", "ctc_paper", "latency", "replay"),
        difference("ctc_gru", "ctc", "steps", "replay"),
        difference("ctc_gru", "ctc", "parameters", "replay"),
        difference("ctc", "ctc_paper", "time", "replay"),
        difference("ctc", "ctc_paper", "time", "loop"),
    ]
    matching = {"latency, once trained": {"medusa": {"ratio": 1.1}}}
    return Compared("a folder", rules_of("arena"), Found(training, matching, {"differences": told}, rows, ()))


def test_the_arm_of_equal_training_time_is_timed_and_everyone_has_the_name_of_the_entrant(compared):
    said = [(row["drafter"], row["gsm8k"]["speedup"]) for row in timed(compared)]
    assert said == [
        ("oracle", 4.0), ("ctc_gru", 1.5), ("prompt_lookup", 1.4), ("medusa@direct", 1.3), ("medusa", 1.2),
        ("blockwise@direct", 1.1),
    ]  # fmt: skip
    assert [row["drafter"] for row in timed_heads(compared)] == [
        "ctc_gru",
        "prompt_lookup",
        "medusa",
        "blockwise@direct",
    ]


def test_rivals_are_those_of_the_rules_and_only_a_matched_reading_has_equal_draft_time(compared):
    said = [(row["less"], row["arm"], row["kind"], row["tau"], row["taken"]) for row in against_rivals(compared)]
    assert said == [
        ("medusa", "latency", "replay", 0.5, {"ratio": 1.1}),
        ("hydra", "time", "loop", 0.125, None),
        ("medusa@direct", "time", "loop", 0.5, None),
    ]


def test_every_row_says_of_which_comparison_it_is(compared):
    for told in (timed, against_rivals, contributions):
        assert {row["comparison"] for row in told(compared)} == {"a folder"}


def test_parts_are_told_where_steps_or_training_time_are_equal(compared):
    said = [(row["more"], row["less"], row["arm"], row["kind"]) for row in contributions(compared)]
    assert said == [("ctc_gru", "ctc", "steps", "replay"), ("ctc", "ctc_paper", "time", "replay")]


def test_a_comparison_that_was_not_timed_is_refused(tmp_path):
    (tmp_path / "rules.json").write_text(json.dumps(rules_of("arena").said))
    (tmp_path / "verdict.json").write_text(json.dumps({"differences": []}))
    with pytest.raises(InputError, match="holds no finished comparison with clocks, but a README quotes it"):
        Compared.read(tmp_path)
