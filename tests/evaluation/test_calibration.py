"""decoding.nodes=adaptive: calibrated probabilities, stored policies, and what a report says about them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from small_evaluations import PROMPTS, evaluate_to, interrupt_at, make_evaluation, make_setup
from tiny_models import random_base
from training_parts import block_head, ctc_head
from truths_trees import texts

from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import Rejection, multi_round
from ctcdraft.distributed import Shard
from ctcdraft.drafters.acceptance import AcceptanceModel, TreeNodes
from ctcdraft.drafters.adaptive import AdaptiveDrafter
from ctcdraft.drafters.controls import Oracle, RandomDrafter
from ctcdraft.drafters.tree_policy import AdaptivePolicy, StepCosts
from ctcdraft.drafters.trees.sampled import SampledLabels
from ctcdraft.errors import InputError
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.replay.calibration import (
    ReplayedStep,
    accepted_nodes,
    choose_adaptive,
    committed_share,
    fit_acceptance,
    recent_acceptance,
    reliability,
)
from ctcdraft.evaluation.replay.drafts import BaseAnswer
from ctcdraft.evaluation.replay.tree_size import TreeSizeSearch
from ctcdraft.nn.bodies import ResidualBody

COSTS = {"nodes": [1, 4, 8], "draft": [0.0, 0.05, 0.06], "rest": [1.0, 1.05, 1.1]}
SIZING = TreeSizeSearch([2, 4], "absent", 2, 1, 8, 1, adaptive_nodes=[4, 8], shown=2, costs=COSTS)
QUESTIONS = [Prompt(f"{n}", "talk", (f"{n} and {n} and {n}",), None) for n in range(4)]


def synthetic_steps(accept, count: int, seed: int = 0) -> list[ReplayedStep]:
    """Return steps of chains with path probabilities q; accept(q, depth) is the probability of each path."""
    rng, steps = np.random.default_rng(seed), []
    for number in range(count):
        path_probs = np.cumprod(rng.uniform(0.2, 1, 3))
        shares = np.asarray([accept(q, depth) for depth, q in enumerate(path_probs, 1)])
        tree = TokenTree.from_lists(torch.tensor(0), [1, 2, 3], [-1, 0, 1], path_probs.tolist())
        steps.append(ReplayedStep(tree, (rng.uniform() < shares).astype(float), number % 20 == 0))
    return steps


@pytest.mark.parametrize("weights", [(0.0, 1.0, 0.0), (0.6, 0.7, 0.0), (-0.5, 1.3, -0.4)])
def test_a_fit_recovers_the_acceptance_probabilities(weights):
    one, logit, log_depth = weights

    def accept(q, depth):
        return 1 / (1 + np.exp(-(one + logit * np.log(q / (1 - q)) + log_depth * np.log(depth))))

    model = fit_acceptance(synthetic_steps(accept, 2500))
    assert model.weights == pytest.approx((*weights, 0.0, 0.0, 0.0, 0.0), abs=0.4)
    grid, depths = np.asarray([0.05, 0.2, 0.5, 0.8]), np.asarray([3.0, 2.0, 1.0, 1.0])
    fitted = 1 / (1 + np.exp(-model.inputs(grid, depths, np.ones(4), 0.0) @ model.weights))
    assert fitted == pytest.approx([accept(q, d) for q, d in zip(grid, depths, strict=True)], abs=0.05)


def test_data_that_decide_nothing_leave_the_drafts_own_probabilities():
    assert fit_acceptance([]) == AcceptanceModel()
    for share in (0.0, 1.0):  # all wrong, or all right: separable
        model = fit_acceptance(synthetic_steps(lambda q, depth, share=share: share, 200))
        assert np.isfinite(model.weights).all()
        nodes = TreeNodes.of(TokenTree.from_lists(torch.tensor(0), [1], [-1], [0.5]), model, 0.0)
        assert abs(nodes.probs[0] - share) < 0.05


def test_a_calibrated_drafter_is_reliable_and_an_overconfident_one_is_not():
    bins = reliability(AcceptanceModel((0, 1, 0, 0, 0, 0, 0)), synthetic_steps(lambda q, depth: q, 1500))
    assert sum(row["nodes"] for row in bins) == 4500
    assert [row["from"] for row in bins] == [n / 10 for n in range(10)]
    for row in bins:
        tolerance = 4 * np.sqrt(row["probability"] * (1 - row["probability"]) / row["nodes"])
        assert abs(row["accepted"] - row["probability"]) < tolerance
        assert row["from"] <= row["probability"] <= row["from"] + 0.1
    bold = reliability(AcceptanceModel((0, 1, 0, 0, 0, 0, 0)), synthetic_steps(lambda q, depth: q**2, 1500))
    assert all(row["accepted"] < row["probability"] - 0.05 for row in bold[3:8])


def test_the_bonus_token_beyond_the_end_of_an_answer_does_not_count():
    def step(accepted, first):
        tree = TokenTree.from_lists(torch.tensor(0), [1, 2], [-1, 0], [0.5, 0.25])
        return ReplayedStep(tree, np.asarray(accepted), first)

    # 7 committed tokens behind the first one: 3, 1, 2 of the first answer, whose bonus token is beyond its end, and 2.
    answers = [BaseAnswer((9,) * 6, True, ()), BaseAnswer((9,) * 3, False, ())]
    steps = [step([1.0, 1.0], True), step([0.0, 0.0], False), step([1.0, 0.0], False), step([1.0, 0.0], True)]
    assert committed_share(steps, answers) == 7 / 8
    assert committed_share([], []) == 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossy_verifiers_are_refused_as_their_acceptance_is_not_calibrated(temperature):
    setup = make_setup(temperature=temperature)
    lossy = replace(setup, settings=replace(setup.settings, lossless=False, token_for_token=False, verify=relaxed))
    with pytest.raises(InputError, match=r"nodes=adaptive needs a verifier that accepts the base's own tokens"):
        choose_adaptive(lossy, SIZING, QUESTIONS, PROMPTS)


def relaxed(*arguments):
    raise AssertionError("nothing is decoded")


relaxed.exact_when_greedy = False


def test_recent_acceptance_starts_anew_with_every_answer():
    wrong, right = (synthetic_steps(lambda q, depth, share=share: share, 20) for share in (0.0, 1.0))
    recent = recent_acceptance(AcceptanceModel(), wrong + right)
    assert recent[0] == recent[20] == 0.0
    assert recent[19] < -0.5
    assert min(recent[21:]) > 0


def test_accepted_nodes_by_hand():
    """The answer goes on 6 7 8: 6, below it 7 and 9, below 9 an 8 at the right depth of a wrong path."""
    tree = TokenTree.from_lists(torch.tensor(5), [6, 7, 9, 8, 8], [-1, 0, 0, 2, 1])
    assert texts(tree) == [(6,), (6, 7), (6, 9), (6, 9, 8), (6, 7, 8)]
    assert accepted_nodes(tree, (4, 5, 6, 7, 8), 1).tolist() == [1, 1, 0, 0, 1]
    assert accepted_nodes(tree, (4, 5, 6), 1).tolist() == [1, 0, 0, 0, 0]


def contestants(base):
    return {"ctc": ctc_head(base), "junk": RandomDrafter(base, 12), "oracle": Oracle(base, 5)}


@pytest.fixture(scope="module")
def setup():
    setup = make_setup(random_base(), max_new_tokens=16)
    return replace(setup, contestants=dict(setup.contestants) | contestants(setup.base))


@pytest.fixture(scope="module")
def sizes(setup):
    chosen = choose_adaptive(setup, SIZING, QUESTIONS, PROMPTS)
    return {"of": {}, "sizes": json.loads(json.dumps(chosen))}


def test_policies_follow_from_the_texts_and_the_costs(setup, sizes):
    again = choose_adaptive(setup, SIZING, QUESTIONS, PROMPTS)
    assert json.loads(json.dumps(again)) == sizes["sizes"]
    policies = {name: AdaptivePolicy.from_json(choice["policy"]) for name, choice in sizes["sizes"].items()}
    assert list(policies) == ["prompt_lookup", "ctc", "junk", "oracle"]
    assert all(policy.costs == StepCosts.from_json(COSTS) for policy in policies.values())
    assert policies["junk"].limit(0.0) == 0
    assert policies["junk"].rate == pytest.approx(1.0)
    assert policies["oracle"].rate > 2.5
    assert policies["oracle"].limit(0.0) == 2
    for choice in sizes["sizes"].values():
        assert choice["chosen"] == 8
        assert choice["policy"]["rate"] >= max(1.0, *(size["predicted_speedup"] for size in choice["sizes"])) - 1e-9
        assert 1.0 <= choice["predicted"] <= choice["policy"]["rate"]


def test_a_drafter_that_samples_is_measured_at_every_size():
    base = random_base()
    sampled = block_head(base, partial(ResidualBody, blocks=1), SampledLabels(2))
    setup = make_setup(base, temperature=1.0, verify=Rejection(multi_round), token_for_token=False)
    setup = replace(setup, contestants={"autoregressive": setup.contestants["autoregressive"], "sampled": sampled})
    choice = choose_adaptive(setup, SIZING, QUESTIONS, PROMPTS)["sampled"]
    policy = AdaptivePolicy.from_json(json.loads(json.dumps(choice["policy"])))
    assert policy.limit_tokens == (1.0, *(size["tau"] for size in choice["sizes"]))
    assert choice["reliability"] == []


def test_texts_that_end_at_once_give_a_policy_that_drafts_nothing(setup):
    short = replace(setup, settings=replace(setup.settings, max_new_tokens=1))
    for choice in choose_adaptive(short, SIZING, QUESTIONS, PROMPTS).values():
        policy = AdaptivePolicy.from_json(choice["policy"])
        assert policy.limit(0.0) == 0


def passes(folder):
    turns = [turn.answers for record in OutputDir(folder, Shard(1, 1)).records(9) for turn in record.turns]
    return {name: [answers[name].passes for answers in turns] for name in turns[0]}


def test_a_resumed_evaluation_decodes_with_the_stored_policy(setup, sizes, tmp_path):
    whole, resumed = (make_evaluation(setup, PROMPTS[:3]).with_tree_sizes(sizes) for _ in range(2))
    content = evaluate_to(tmp_path / "whole", whole, profiled=1)
    with interrupt_at(1):
        evaluate_to(tmp_path / "again", resumed, profiled=0)
    stored = OutputDir(tmp_path / "again", Shard(1, 1)).sizes()
    other = replace(SIZING, costs={**COSTS, "draft": [0.0, 9.0, 9.0]})
    assert stored == sizes | {"prompts": []}
    dear = {"of": {}, "sizes": choose_adaptive(setup, other, QUESTIONS, PROMPTS)}
    with pytest.raises(InputError, match=r"decoding\.predicted\.oracle was"):
        evaluate_to(tmp_path / "again", make_evaluation(setup, PROMPTS[:3]).with_tree_sizes(dear))
    evaluate_to(tmp_path / "again", make_evaluation(setup, PROMPTS[:3]).with_tree_sizes(stored), profiled=0)
    assert passes(tmp_path / "again") == passes(tmp_path / "whole")
    oracle, junk = passes(tmp_path / "whole")["oracle"], passes(tmp_path / "whole")["junk"]
    assert max(step.committed for answer in oracle for step in answer) > 3  # it was given the text
    assert {step.nodes for answer in junk for step in answer} == {1}

    rows = {row["drafter"]: row for row in content["rows"]}
    assert all(row["lossless"]["equal"] == row["prompts"] == 3 for row in rows.values())
    assert rows["ctc"]["nodes"] == 8
    assert rows["junk"]["mean_nodes"] == rows["autoregressive"]["mean_nodes"] == 1.0
    assert rows["oracle"]["mean_nodes"] > 3
    report = (tmp_path / "whole" / "report.md").read_text()
    predicted = sizes["sizes"]["oracle"]["predicted"]
    assert f"oracle: adaptive, expected speed-up {predicted:.3f}" in report
    assert f"| adaptive ({rows['oracle']['mean_nodes']:.1f}) |" in report
    assert "| probability | accepted | nodes |" in report
    assert f"ctc {sizes['sizes']['ctc']['policy']['rate']:.2f}" in whole.describe()
    assert (tmp_path / "whole" / "report.html").read_text().count("Reliability") >= 1


def test_the_wrapped_drafter_declares_what_the_drafter_does(setup, sizes):
    wrapped = make_evaluation(setup, PROMPTS[:1]).with_tree_sizes(sizes).setup.contestants
    assert isinstance(wrapped["ctc"], AdaptiveDrafter)
    assert not isinstance(wrapped["autoregressive"], AdaptiveDrafter)
    assert (wrapped["ctc"].uses_hidden_states, wrapped["prompt_lookup"].uses_hidden_states) == (True, False)


def test_without_given_costs_they_are_measured(setup):
    search = replace(SIZING, costs=None, timed_steps=2)
    found = choose_adaptive(setup, search, QUESTIONS[:2], QUESTIONS[2:])
    costs = StepCosts.from_json(found["prompt_lookup"]["policy"]["costs"])
    assert costs.draft[0] == 0 < costs.draft[1] <= costs.draft[2]
    assert costs.rest[0] == 1.0 <= costs.rest[1] <= costs.rest[2]


def test_sizes_are_checked():
    with pytest.raises(InputError, match=r"sizing\.adaptive_nodes must be ascending"):
        replace(SIZING, adaptive_nodes=[8, 4])
