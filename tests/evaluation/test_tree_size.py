"""decoding.nodes=auto: the choice of a tree size, how it is stored, and trees that cannot be replayed."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from small_evaluations import NO_TRACE, PROMPTS, SETTINGS, make_evaluation, make_setup
from tiny_models import random_base
from training_parts import block_head, block_heads, ctc_head

from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import Rejection, multi_round
from ctcdraft.distributed import Shard
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.trees.sampled import SampledLabels
from ctcdraft.errors import InputError
from ctcdraft.evaluation.benchmarks import Benchmark, project_prompts
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.replay.tree_size import (
    TreeSizeSearch,
    best_size,
    choose_fixed,
    load_or_choose_sizes,
    refuse_unnested_trees,
    size_rows,
)
from ctcdraft.nn.bodies import ResidualBody
from ctcdraft.report.markdown import markdown


def sizing(path="absent", **changes) -> TreeSizeSearch:
    values = {"nodes": [2, 4, 8], "prompts": 2, "timed": 1, "timed_steps": 3, "repeats": 1, **changes}
    return TreeSizeSearch(path=str(path), **values)


def test_the_best_size_has_the_greatest_predicted_speedup():
    sizes = size_rows([2, 4, 8], [1.5, 2.0, 2.2], [1.2, 1.25, 1.6])
    assert best_size(sizes) == 4
    assert [row["predicted_speedup"] for row in sizes] == [1.25, 1.6, pytest.approx(1.375)]


def test_without_a_file_the_questions_beyond_the_limit_are_used(tmp_path):
    lines = [{"id": str(n), "category": "talk", "turns": [f"say {n % 4}"], "reference": None} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    benchmark = project_prompts(str(tmp_path / "prompts.jsonl"), "made_up", 3)
    search = replace(sizing("absent"), path=None, prompts=9)
    # The last two are questions of the evaluation once more.
    assert [prompt.turns for prompt in search.calibration_prompts(benchmark)] == [("say 3",)]
    # Only the first turn is calibrated on.
    first = replace(benchmark, prompts=(Prompt("q", "talk", ("say 3", "and then?"), None), *benchmark.prompts[:1]))
    assert {prompt.turns for prompt in search.calibration_prompts(replace(first, rest=benchmark.rest))} == {("say 1",)}


def test_a_higher_limit_must_not_reach_what_sizes_were_chosen_on(tmp_path):
    lines = [{"id": str(n), "category": "talk", "turns": [f"say {n}"], "reference": None} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, more = (project_prompts(str(tmp_path / "prompts.jsonl"), "made_up", limit) for limit in (2, 3))
    search, setup = replace(sizing("absent"), path=None), make_setup()
    stored = load_or_choose_sizes(None, setup, search, first, {})
    assert load_or_choose_sizes(stored, setup, search, first, {}) == stored
    with pytest.raises(InputError, match=r"1 questions of this evaluation are prompts that its tree sizes"):
        load_or_choose_sizes(stored, setup, search, more, {})


def test_a_choice_is_kept_and_reported(tmp_path):
    lines = [{"id": str(n), "category": "talk", "turns": [f"say {n}"], "reference": None} for n in range(5)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    questions = Benchmark("made_up", (Prompt("q", "talk", ("say 3",), None),), "hash")
    search, setup = sizing(prompts), make_setup()
    assert {one.turns for one in search.calibration_prompts(questions)} <= {(f"say {n}",) for n in (0, 1, 2, 4)}
    sizes_json = load_or_choose_sizes(None, setup, search, questions, {"seed": 0})
    by_name = sizes_json["sizes"]
    assert list(by_name) == ["prompt_lookup"]
    assert [size["nodes"] for size in by_name["prompt_lookup"]["sizes"]] == [2, 4, 8]
    assert all(1 <= size["tau"] <= size["nodes"] for size in by_name["prompt_lookup"]["sizes"])
    prompts.unlink()  # resuming measures nothing again
    assert load_or_choose_sizes(json.loads(json.dumps(sizes_json)), setup, search, questions, {"seed": 0}) == sizes_json
    folder = OutputDir(tmp_path, Shard(1, 1))  # as another shard, or the next start, reads them
    folder.write_sizes(sizes_json)
    assert load_or_choose_sizes(folder.sizes(), setup, search, questions, {"seed": 0}) == sizes_json
    folder.write_sizes({key: value for key, value in sizes_json.items() if key != "prompts"})  # of an older version
    older = load_or_choose_sizes(folder.sizes(), setup, search, questions, {"seed": 0})
    assert older == sizes_json | {"prompts": []}
    with pytest.raises(InputError, match=r"chosen where seed was 0 \(now 1\)"):
        load_or_choose_sizes(sizes_json, setup, search, questions, {"seed": 1})
    with pytest.raises(InputError, match=r"chosen where sizing\.repeats was 1"):
        load_or_choose_sizes(sizes_json, setup, replace(search, repeats=2), questions, {"seed": 0})

    chosen = make_evaluation(setup, PROMPTS[:0]).with_tree_sizes(
        sizes_json | {"sizes": {"prompt_lookup": by_name["prompt_lookup"] | {"chosen": 2}}}
    )
    rows, circumstances = chosen.rows([], None, 0)
    assert [row["nodes"] for row in rows] == [SETTINGS.nodes, 2]
    assert chosen.setup.tree_limits("autoregressive", "prompt_lookup") == f"{SETTINGS.nodes}/2"
    assert chosen.setup.tree_limits("prompt_lookup", "prompt_lookup") == 2
    assert "prompt_lookup: 2 nodes" in markdown(rows, circumstances)


def test_a_refused_evaluation_does_not_change_the_stored_sizes(tmp_path):
    def sizes(nodes):
        return {"of": {}, "prompts": ["hash"], "sizes": {"prompt_lookup": {"chosen": nodes, "sizes": []}}}

    folder, one = OutputDir(tmp_path, Shard(1, 1)), make_evaluation(make_setup(), PROMPTS[:1])
    one.with_tree_sizes(sizes(2)).run(folder, overwrite=False, warm_up_tokens=1, timing_questions=0, trace=NO_TRACE)
    with pytest.raises(InputError, match=r"nodes\.prompt_lookup was 2"):
        one.with_tree_sizes(sizes(4)).run(folder, overwrite=False, warm_up_tokens=1, timing_questions=0, trace=NO_TRACE)
    assert folder.sizes() == sizes(2)
    one.with_tree_sizes(sizes(4)).run(folder, overwrite=True, warm_up_tokens=1, timing_questions=0, trace=NO_TRACE)
    assert folder.sizes() == sizes(4)
    (tmp_path / "sizes.json").write_text("{}")
    with pytest.raises(InputError, match="holds no tree sizes"):
        folder.sizes()


@pytest.mark.parametrize(
    ("costs", "reason"),
    [
        ({"nodes": [1, 4]}, "has no 'draft'; it needs nodes from 1"),
        ({"nodes": [1, 4], "draft": [0.0], "rest": [1.0, 1.1]}, "is wrong: 2 numbers are needed, got 1; it needs"),
        ({"nodes": [4, 8], "draft": [0, 0], "rest": [1, 1]}, "is wrong: nodes must be ascending sizes from 1"),
        ({"nodes": 4, "draft": [0], "rest": [1]}, "is wrong: "),
    ],
)
def test_wrong_costs_are_refused_before_anything_is_loaded(costs, reason):
    with pytest.raises(InputError, match=rf"sizing\.costs {re.escape(reason)}"):
        sizing(costs=costs)


class NamesItsLimit:
    """The only draft token is the number of nodes that were allowed."""

    def draft(self, context, memory, rng):
        return TokenTree.chain(context.root, torch.tensor([context.nodes])), None


def test_trees_that_are_not_nested_are_refused():
    base = random_base(context=96, initializer_range=0.1)
    one, three = (block_head(base, partial(ResidualBody, blocks=1), SampledLabels(chains)) for chains in (1, 3))
    text = torch.tensor([0, 7, 9, 7, 9, 7])

    def refuse(drafter, temperature=0.0):
        search = replace(SETTINGS, temperature=temperature)
        refuse_unnested_trees(EvaluationSetup(base, {"x": drafter}, search, 0), "x", text, [2, 5, 8, 16])

    for drafter in (PromptLookup(base, 2, 6), ctc_head(base), *block_heads(base)):
        refuse(drafter)
    refuse(one, temperature=1.0)
    refuse(three)  # at temperature 0 all chains are equal
    for drafter, temperature in ((three, 1.0), (NamesItsLimit(), 0.0)):
        with pytest.raises(InputError, match="is not part of its tree of 16"):
            refuse(drafter, temperature)


def test_a_contestant_keeps_to_its_own_size():
    setup = replace(make_setup(), nodes={"prompt_lookup": 3})
    prompt = torch.tensor([0, 7, 9, 7, 9, 7])
    assert {step.nodes for step in setup.answer("prompt_lookup", prompt, 0).passes} <= {1, 2, 3}
    assert setup.settings_of("autoregressive") == setup.settings


def test_refusals_are_one_sentence(tmp_path):
    for wrong in ({"nodes": []}, {"nodes": [4, 2]}, {"nodes": [1, 2]}):
        with pytest.raises(InputError, match=r"sizing\."):
            sizing(**wrong)
    (tmp_path / "one.jsonl").write_text('{"id": "a", "category": "c", "turns": ["x"], "reference": null}\n')
    with pytest.raises(InputError, match="are questions of the evaluation"):
        sizing(tmp_path / "one.jsonl").calibration_prompts(Benchmark("b", (Prompt("b", "c", ("x",), None),), "hash"))
    with pytest.raises(InputError, match="all prompts of benchmark b are questions of the evaluation; lower benchmark"):
        replace(sizing("absent"), path=None).calibration_prompts(Benchmark("b", (), "hash"))
    base = random_base()
    sampled = replace(SETTINGS, temperature=1.0, verify=Rejection(multi_round), token_for_token=False)
    with pytest.raises(InputError, match="which this decoding does not promise"):
        choose_fixed(EvaluationSetup(base, {"prompt_lookup": PromptLookup(base, 2, 4)}, sampled, 0), sizing(), [])
