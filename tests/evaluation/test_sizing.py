"""decoding.nodes=auto: passes counted by replay are those of real runs, and the best size is the best."""

import json
from dataclasses import replace

import pytest
import torch
from sessions import PROMPTS, SETTINGS, arena, session
from tiny_models import random_base

from ctcdraft.corpus.conversations import Prompt
from ctcdraft.decoding.rejection import Rejection, multi_round
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.errors import InputError
from ctcdraft.evaluation.report import markdown
from ctcdraft.evaluation.sizing import Choice, Size, Sizing, choose, found_or_chosen, rising


def sizing(path="absent", **changes) -> Sizing:
    values = {"nodes": [2, 4, 8], "prompts": 2, "timed": 1, "timed_tokens": 8, "repeats": 1, **changes}
    return Sizing(path=str(path), **values)


def test_costs_never_fall():
    assert rising([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert rising([]) == []


def test_the_best_size_promises_most():
    choice = Choice((Size(2, 1.5, 1.2), Size(4, 2.0, 1.25), Size(8, 2.2, 1.6)))
    assert choice.best.nodes == choice.to_json()["chosen"] == 4
    assert [row["predicted_speedup"] for row in choice.to_json()["sizes"]] == [1.25, 1.6, pytest.approx(1.375)]


def test_a_choice_is_kept_and_reported(tmp_path):
    lines = [{"id": str(n), "category": "talk", "turns": [f"say {n}"], "reference": None} for n in range(5)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [Prompt("q", "talk", ("say 3",), None)]
    how, here = sizing(prompts), arena()
    assert {one.turns for one in how.apart_from(asked)} <= {(f"say {n}",) for n in (0, 1, 2, 4)}
    found = found_or_chosen(tmp_path / "sizes.json", here, how, asked, overwrite=False)
    assert list(found) == ["prompt_lookup"]
    assert [size["nodes"] for size in found["prompt_lookup"]["sizes"]] == [2, 4, 8]
    assert all(1 <= size["tau"] <= size["nodes"] for size in found["prompt_lookup"]["sizes"])
    prompts.unlink()  # whoever goes on, measures nothing again
    assert found_or_chosen(tmp_path / "sizes.json", here, how, asked, overwrite=False) == found

    chosen = replace(here, nodes={"prompt_lookup": 2})
    rows, circumstances = replace(session(chosen, PROMPTS[:0]), sizes=found).rows([], None)
    assert [row["nodes"] for row in rows] == [SETTINGS.nodes, 2]
    assert f"prompt_lookup: {found['prompt_lookup']['chosen']} nodes" in markdown(rows, circumstances)


def test_a_size_of_ones_own_is_kept_to():
    here = replace(arena(), nodes={"prompt_lookup": 3})
    prompt = torch.tensor([0, 7, 9, 7, 9, 7])
    assert {step.nodes for step in here.answer("prompt_lookup", prompt, 0).passes} <= {1, 2, 3}
    assert here.settings_of("autoregressive") == here.settings


def test_refusals_are_one_sentence(tmp_path):
    for wrong in ({"nodes": []}, {"nodes": [4, 2]}, {"nodes": [1, 2]}, {"prompts": 0}, {"repeats": 0}):
        with pytest.raises(InputError, match=r"sizing\."):
            sizing(**wrong)
    (tmp_path / "one.jsonl").write_text('{"id": "a", "category": "c", "turns": ["x"], "reference": null}\n')
    with pytest.raises(InputError, match="are questions of the benchmark"):
        sizing(tmp_path / "one.jsonl").apart_from([Prompt("b", "c", ("x",), None)])
    base = random_base()
    drawn = replace(SETTINGS, temperature=1.0, verify=Rejection(multi_round), token_for_token=False)
    with pytest.raises(InputError, match="which this decoding does not promise"):
        choose(base, {"prompt_lookup": PromptLookup(base, 2, 4)}, drawn, sizing(), [], 0)
