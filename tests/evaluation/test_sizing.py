"""decoding.nodes=auto: passes counted by replay are those of real runs, and the best size is the best."""

import json
from dataclasses import replace

import pytest
import torch
from sessions import PROMPTS, SETTINGS, arena, session
from stepwise_parts import stepwise
from tiny_models import random_base
from training_parts import block_heads, ctc_head

from ctcdraft.corpus.conversations import Prompt
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.rejection import Rejection, multi_round
from ctcdraft.drafters.grow import Grow
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.errors import InputError
from ctcdraft.evaluation.report import markdown
from ctcdraft.evaluation.sizing import Choice, Size, Sizing, choose, drafted, found_or_chosen, replay, rising


def sizing(path="absent", **changes) -> Sizing:
    values = {"nodes": [2, 4, 8], "prompts": 2, "timed": 1, "timed_tokens": 8, "repeats": 1, **changes}
    return Sizing(path=str(path), **values)


def test_replay_by_pencil():
    trees = [([5, 6, 7], [-1, 0, 1]), ([6], [-1]), ([7], [-1])]
    assert replay([5, 6, 7, 8], trees, nodes=3) == (3, 1)
    assert replay([5, 6, 7, 8], trees, nodes=2) == (3, 2)
    assert replay([5, 6, 7, 8], trees, nodes=1) == (3, 3)
    assert replay([5], [], nodes=4) == (0, 0)
    # The last token was guessed, and nothing comes behind it: the pass commits what there is.
    assert replay([5, 6], [([5, 6, 9], [-1, 0, 1])], nodes=3) == (1, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_replay_counts_the_passes_of_real_runs(temperature, tmp_path):
    """One run at the largest size tells what every size takes, token for token and pass for pass."""
    base = random_base(context=96, initializer_range=0.1)
    drafters = [PromptLookup(base, 2, 6), ctc_head(base), *block_heads(base)[:3]]
    drafters.append(stepwise("hydra", base, tmp_path, growth=Grow(None, None)))
    for seed, prompt in enumerate([torch.tensor([0, 7, 9, 7, 9, 7]), torch.arange(40, 60)]):
        for drafter in drafters:
            how = replace(SETTINGS, temperature=temperature, max_new_tokens=30, nodes=16)
            answer, trees = drafted(base, drafter, prompt, how, seed)
            for nodes in (2, 5, 16):
                made = generate(base, drafter, prompt, replace(how, nodes=nodes), base.stop_tokens, seed)
                assert made.tokens == answer
                counted = sum(step.committed for step in made.passes), len(made.passes)
                assert replay(answer, trees, nodes) == counted, type(drafter).__name__


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
    with pytest.raises(InputError, match="nodes=auto replays"):
        choose(base, {"prompt_lookup": PromptLookup(base, 2, 4)}, drawn, sizing(), [], 0)
