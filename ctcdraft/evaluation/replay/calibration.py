"""Calibration of adaptive tree sizes (decoding.nodes=adaptive): acceptance probabilities, step times, reliability.

Acceptance: the base decodes calibration prompts once, each drafter drafts its largest tree at the steps of the loop,
and a logistic regression of acceptance is fitted. Times: the profiled loop, sizes in turn. The reliability that a
report shows is measured on questions of the benchmark, which are used for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.acceptance import AcceptanceModel, TreeNodes, draft_path_probs, path_prob_ranks
from ctcdraft.drafters.adaptive import RECENT_DECAY, cuts_trees, recent_ratio
from ctcdraft.drafters.base import samples_drafts
from ctcdraft.drafters.tree_policy import AdaptivePolicy, StepCosts
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.replay.drafts import (
    BaseAnswer,
    DraftReplayer,
    DraftTree,
    TokenIds,
    record_base_answer,
    refuse_replaying,
    replay_pass,
)
from ctcdraft.evaluation.replay.step_costs import measure_step_costs
from ctcdraft.evaluation.replay.tree_size import TreeSizeSearch, size_rows
from ctcdraft.evaluation.runner import sample_evenly, turn_prompt
from ctcdraft.progress import Progress

STEP_NODES = 16  # of the trees whose steps are replayed
BINS = 10


@dataclass(frozen=True)
class ReplayedStep:
    """The largest tree of one decoding step, and which of its nodes are accepted."""

    tree: TokenTree
    accepted_N: np.ndarray  # 1 or 0, without the root
    is_first: bool  # of its answer

    def inputs(self, recent: float) -> np.ndarray:
        probs_N, depths_N = np.asarray(draft_path_probs(self.tree)), np.asarray(self.tree.host_depths[1:])
        return AcceptanceModel.inputs(probs_N, depths_N, path_prob_ranks(probs_N), recent)

    def accepted_of(self, nodes: TreeNodes) -> np.ndarray:
        """Return accepted_N in the order of the nodes."""
        return self.accepted_N[np.asarray(nodes.numbers, dtype=int) - 1]


@torch.inference_mode()
def replay_steps(
    drafter: Any, answers: Sequence[BaseAnswer], nodes: int, seed: int, progress: Progress
) -> list[ReplayedStep]:
    """Return the steps that the loop would take with trees of STEP_NODES nodes, each with its tree of `nodes`."""
    steps: list[ReplayedStep] = []
    for number, answer in enumerate(answers):
        progress.advance()
        if not answer.contexts:
            continue
        replayer, at = DraftReplayer(drafter, answer, nodes, seed + number), 0
        while at < len(answer.tokens) - 1:
            tree = replayer.draft(at)
            steps.append(ReplayedStep(tree, accepted_nodes(tree, answer.tokens, at), at == 0))
            at += replay_pass(answer.tokens, at, DraftTree.of(tree).first_nodes(STEP_NODES)).committed
    return steps


def accepted_nodes(tree: TokenTree, answer: TokenIds, at: int) -> np.ndarray:
    """Return accepted_N, without the root, of the tree after token `at` of the answer."""
    tokens, parents = tree.tokens_N.tolist(), tree.parents_N.tolist()
    depths, accepted = tree.depths_N.tolist(), [True] * len(tokens)
    for node in range(1, len(tokens)):
        position = at + depths[node]
        follows = position < len(answer) and tokens[node] == answer[position]
        accepted[node] = accepted[parents[node]] and follows
    return np.asarray(accepted[1:], dtype=np.float64)


def recent_acceptance(model: AcceptanceModel, steps: Sequence[ReplayedStep]) -> list[float]:
    """Return `recent` before every step, as AdaptiveDrafter computes it."""
    recent, accepted_sum, expected_sum = [], 0.0, 0.0
    for step in steps:
        if step.is_first:
            accepted_sum = expected_sum = 0.0
        recent.append(recent_ratio(accepted_sum, expected_sum))
        nodes = TreeNodes.of(step.tree, model, recent[-1])
        accepted_sum = RECENT_DECAY * accepted_sum + float(step.accepted_of(nodes)[: STEP_NODES - 1].sum())
        expected_sum = RECENT_DECAY * expected_sum + sum(nodes.usual_probs[: STEP_NODES - 1])
    return recent


def fit_acceptance(steps: Sequence[ReplayedStep]) -> AcceptanceModel:
    """Return the regression fitted to these steps: first without the recent acceptance, which needs a model itself."""
    model = AcceptanceModel()
    accepted_R = np.concatenate([step.accepted_N for step in steps] or [np.zeros(0)])
    if len(accepted_R) == 0:
        return model
    for recent in ([0.0] * len(steps), None):
        known = recent_acceptance(model, steps) if recent is None else recent
        inputs = [step.inputs(one) for step, one in zip(steps, known, strict=True)]
        model = AcceptanceModel.fit(np.concatenate(inputs), accepted_R)
    return model


def reliability(model: AcceptanceModel, steps: Sequence[ReplayedStep]) -> list[dict[str, float]]:
    """Return, per bin of the calibrated probability, the nodes in it, their mean probability and accepted share."""
    probs, accepted = [np.zeros(0)], [np.zeros(0)]
    for step, recent in zip(steps, recent_acceptance(model, steps), strict=True):
        nodes = TreeNodes.of(step.tree, model, recent)
        probs.append(np.asarray(nodes.probs))
        accepted.append(step.accepted_of(nodes))
    probs_R, accepted_R = np.concatenate(probs), np.concatenate(accepted)
    bin_R, rows = np.minimum((probs_R * BINS).astype(int), BINS - 1), []
    for number in range(BINS):
        if (chosen := bin_R == number).any():
            means = {"probability": float(probs_R[chosen].mean()), "accepted": float(accepted_R[chosen].mean())}
            rows.append({"from": number / BINS, "nodes": int(chosen.sum()), **means})
    return rows


def committed_share(steps: Sequence[ReplayedStep], answers: Sequence[BaseAnswer]) -> float:
    """Return the share of accepted and bonus tokens that are committed: the last bonus token is beyond the end."""
    found = sum(1 + float(step.accepted_N[: STEP_NODES - 1].sum()) for step in steps)
    return sum(len(answer.tokens) - 1 for answer in answers) / found if found else 1.0


def calibrate(
    setup: EvaluationSetup,
    name: str,
    costs: StepCosts,
    answers: Sequence[BaseAnswer],
    shown: Sequence[BaseAnswer],
    progress: Progress,
) -> dict[str, Any]:
    """Return the policy of a drafter without sampled draft tokens, and its reliability on answers `shown`, as JSON."""
    drafter, largest = setup.contestants[name], costs.nodes[-1]
    steps = replay_steps(drafter, answers, largest, setup.seed, progress)
    model = fit_acceptance(steps)
    recent = recent_acceptance(model, steps)
    trees = [TreeNodes.of(step.tree, model, one) for step, one in zip(steps, recent, strict=True)]
    expected = [tree.expected_tokens(costs.nodes) for tree in trees] or [[1.0] * len(costs.nodes)]
    fixed = np.asarray(expected).mean(0)
    policy = AdaptivePolicy.of(costs, model, trees)
    if not cuts_trees(samples_drafts(drafter), setup.base.device.type == "cpu"):
        policy = AdaptivePolicy.uncut(costs, fixed, model)
    shown_steps = replay_steps(drafter, shown, largest, setup.seed, progress)
    share = committed_share(steps, answers)
    # Where drafting does not pay, nothing is beyond the end.
    predicted = max(share * policy.rate, min(1.0, policy.rate))
    return describe_policy(policy, predicted, share * fixed, reliability(model, shown_steps))


def calibrate_sampled(
    setup: EvaluationSetup, name: str, costs: StepCosts, texts: Sequence[Tensor], progress: Progress
) -> dict[str, Any]:
    """Return the policy of a drafter whose draft tokens are sampled: every size decodes the calibration prompts."""
    drafter, base, taus = setup.contestants[name], setup.base, [1.0]
    for nodes in costs.nodes[1:]:
        settings = replace(setup.settings, nodes=nodes)
        steps = [
            step
            for number, prompt_L in enumerate(texts)
            for step in generate(base, drafter, prompt_L, settings, base.stop_token_ids, setup.seed + number).passes
        ]
        taus.append(sum(step.committed for step in steps) / len(steps) if steps else 1.0)
    progress.advance(len(texts))
    policy = AdaptivePolicy.uncut(costs, taus, AcceptanceModel())
    return describe_policy(policy, policy.rate, taus, [])


def describe_policy(
    policy: AdaptivePolicy, predicted: float, fixed_taus: Sequence[float], reliability: list[dict[str, float]]
) -> dict[str, Any]:
    """Return the policy as JSON, with the speed-up that it and trees of fixed sizes are expected to reach."""
    costs = policy.costs
    sizes = size_rows(costs.nodes, fixed_taus, list(map(add, costs.draft, costs.rest)))
    choice = {"chosen": costs.nodes[-1], "sizes": sizes[1:], "predicted": predicted}
    return {**choice, "policy": policy.to_json(), "reliability": reliability}


def choose_adaptive(
    setup: EvaluationSetup, sizing: TreeSizeSearch, prompts: Sequence[Prompt], questions: Sequence[Prompt]
) -> dict[str, Any]:
    """Return the policy of every drafter.

    prompts: to calibrate on. questions: of the evaluation, of which a few show how reliable the probabilities are.
    """
    if not setup.settings.owes_token_identity(sampled=False):
        raise InputError(
            "decoding.nodes=adaptive needs a verifier that accepts the base's own tokens, which this decoding does not "
            "promise; use decoding=greedy, sampling or rejection, or give a number as decoding.nodes="
        )
    for name in setup.drafter_names:
        refuse_replaying(setup.contestants[name])
    texts, shown_texts = (
        [turn_prompt(setup.base, prompt, [])[0] for prompt in some]
        for some in (prompts, sample_evenly(questions, sizing.shown))
    )
    names = setup.drafter_names
    arms = 0 if sizing.costs is not None else (1 + len(names)) * (1 + len(sizing.adaptive_nodes))
    progress = sizing.progress(len(texts), len(names), arms, len(shown_texts))
    answers: list[BaseAnswer] = []
    shown: list[BaseAnswer] = []
    for some, found in ((texts, answers), (shown_texts, shown)):
        for number, prompt_L in enumerate(some):
            found.append(record_base_answer(setup.base, prompt_L, setup.settings, setup.seed + number))
            progress.advance()
    if sizing.costs is None:
        costs = measure_step_costs(sizing.steps_to_time(setup, texts, progress), sizing.adaptive_nodes, names)
    else:
        costs = dict.fromkeys(names, StepCosts.from_json(sizing.costs))
    return {
        name: calibrate_sampled(setup, name, costs[name], texts, progress)
        if samples_drafts(setup.contestants[name])
        else calibrate(setup, name, costs[name], answers, shown, progress)
        for name in names
    }
