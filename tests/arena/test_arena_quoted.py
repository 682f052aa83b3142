"""What READMEs quote of a whole comparison, by pencil: who is named, in which arm, by which measurement."""

import json

import pytest

from ctcdraft.arena.quotations import Compared, against_rivals, contributions, timed, timed_heads
from ctcdraft.errors import InputError


def difference(more, less, arm, kind, **changes):
    return {"more": more, "less": less, "arm": arm, "kind": kind, "nodes": 16, "temperature": 0.0} | changes


def head(entrant, arm, same_as=None, readings=(None,)):
    return {"entrant": entrant, "arm": arm, "same_as": same_as, "readings": list(readings)}


@pytest.fixture
def found():
    entrants = {"ctc_gru": {}, "ctc": {}, "ctc_paper": {}, "medusa": {"rival": True}, "hydra": {"rival": True}}
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
    loops = {asked: {name: {"speedup": speed} for name, speed in speeds.items()} for asked in ("gsm8k", "mt_bench")}
    del loops["mt_bench"]["transformers_greedy"]  # not certified there
    told = [
        difference("ctc_gru", "medusa", "latency", "replay"),
        difference("ctc_gru", "medusa", "latency", "replay", nodes=64),
        difference("ctc_gru", "medusa", "latency", "replay", temperature=1.0),
        difference("ctc_gru", "medusa@direct", "latency", "replay"),
        difference("ctc_gru", "hydra", "time", "replay"),
        difference("ctc_gru", "hydra", "time", "loop"),
        difference("ctc_gru", "medusa@direct", "time", "loop"),
        difference("ctc_gru", "ctc_paper", "latency", "replay"),
        difference("ctc_gru", "ctc", "steps", "replay"),
        difference("ctc_gru", "ctc", "parameters", "replay"),
        difference("ctc", "ctc_paper", "time", "replay"),
        difference("ctc", "ctc_paper", "time", "loop"),
    ]
    return Compared("a base", entrants, training, {"medusa": {"ratio": 1.1}}, loops, {"differences": told})


def test_the_arm_of_equal_training_time_is_timed_and_everyone_has_the_name_of_the_entrant(found):
    said = [(row["drafter"], row["gsm8k"]["speedup"]) for row in timed(found)]
    assert said == [
        ("oracle", 4.0), ("ctc_gru", 1.5), ("prompt_lookup", 1.4), ("medusa@direct", 1.3), ("medusa", 1.2),
        ("blockwise@direct", 1.1),
    ]  # fmt: skip
    assert [row["drafter"] for row in timed_heads(found)] == ["ctc_gru", "prompt_lookup", "medusa", "blockwise@direct"]


def test_rivals_are_those_of_the_rules_and_only_a_matched_reading_has_equal_draft_time(found):
    said = [(row["less"], row["arm"], row["kind"], row["taken"]) for row in against_rivals(found)]
    assert said == [
        ("medusa", "latency", "replay", {"ratio": 1.1}),
        ("hydra", "time", "loop", None),
        ("medusa@direct", "time", "loop", None),
    ]


def test_parts_are_told_where_steps_or_training_time_are_equal(found):
    said = [(row["more"], row["less"], row["arm"], row["kind"]) for row in contributions(found)]
    assert said == [("ctc_gru", "ctc", "steps", "replay"), ("ctc", "ctc_paper", "time", "replay")]


def test_a_comparison_that_was_not_timed_is_refused(tmp_path):
    (tmp_path / "rules.json").write_text(json.dumps({"group": "all", "entrants": {}}))
    (tmp_path / "verdict.json").write_text(json.dumps({"differences": []}))
    with pytest.raises(InputError, match="holds no finished comparison with clocks, but a README quotes it"):
        Compared.read(tmp_path)
