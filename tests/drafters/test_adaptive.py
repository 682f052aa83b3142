"""Adaptive tree sizes: the best size, and the same tokens whatever is kept or skipped."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from sequential_parts import make_sequential_drafter
from simple_drafters import oracle_drafter, random_drafter
from test_training_equals_decoding import HOW, block_drafter
from tiny_models import random_base
from training_parts import block_heads
from truths_trees import slow_acceptance, slow_best_size, texts

from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters import adaptive
from ctcdraft.drafters.acceptance import AcceptanceModel, TreeNodes
from ctcdraft.drafters.adaptive import AdaptiveDrafter, keep_best_nodes, keep_nodes
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.merged import Merged
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.suffix import SuffixDecoding
from ctcdraft.drafters.tree_policy import AdaptivePolicy, StepCosts

SIZES = (1, 2, 4, 8, 12)
LOOP = torch.tensor([0, 7, 9, 30, 31, 32, 33, 7, 9])
ASIS = AcceptanceModel()


def policy(rest=(1.0, 1.02, 1.06, 1.15, 1.3), draft=0.05, tokens=(1.0, 1.3, 1.5, 1.6, 1.7), rate=1.2) -> AdaptivePolicy:
    costs = StepCosts(SIZES, (0.0,) + (draft,) * 4, tuple(rest))
    return AdaptivePolicy(costs, ASIS, tokens, costs.rest, rate)


def forced(index: int) -> AdaptivePolicy:
    """Return a policy for which trees up to this size cost nothing, and larger ones everything."""
    return policy([1.0] * (index + 1) + [1e3] * (4 - index), draft=0.0, rate=1.0)


@dataclass(frozen=True)
class Scripted(AdaptivePolicy):
    """A policy whose sizes before the draft follow from what was accepted, in a way without any sense."""

    def limit(self, recent: float) -> int:
        return (3 + int(abs(recent) * 1e5)) % 5


SCRIPTED = Scripted(**vars(policy()))


def random_tree(seed: int, nodes: int = 8) -> TokenTree:
    rng = np.random.default_rng(seed)
    parents, probs = [-1], [1.0]
    for node in range(1, nodes):
        parents.append(int(rng.integers(node)))
        probs.append(probs[parents[-1]] * float(rng.uniform()))
    return TokenTree(torch.arange(nodes), torch.tensor(parents), nodes - 1, path_probs_N=torch.tensor(probs).double())


@pytest.mark.parametrize("seed", range(12))
def test_the_size_is_the_best_of_all_subtrees(seed):
    tree, rng = random_tree(seed), np.random.default_rng(seed)
    rest, rate = np.cumsum([1.0, *rng.uniform(0, 0.4, 4)]), float(rng.uniform(0.5, 2))
    nodes, chosen = TreeNodes.of(tree, ASIS, 0.0), policy(rest)
    size = SIZES[chosen.size(nodes, rate, 4)]
    probs = dict(zip([0, *nodes.numbers], [1.0, *nodes.probs], strict=True))
    worth, truth = slow_best_size(tree, probs, SIZES, rest, rate)
    assert 1 + sum(nodes.probs[: size - 1]) - rate * rest[SIZES.index(size)] == pytest.approx(worth)
    assert size == truth


@pytest.mark.parametrize("seed", range(40))
def test_choices_are_those_of_the_slow_twin(seed):
    """Random regressions, some with which a child would be likelier than its parent; with and without draft's q."""
    rng = np.random.default_rng(seed)
    tree, model = (
        random_tree(seed, int(rng.integers(2, 64))),
        AcceptanceModel(tuple(rng.normal(0, (1, 1, 1, 0.5, 1, 0.7, 1)))),
    )
    tree = tree if seed % 4 else replace(tree, path_probs_N=None)
    recent, rate, rest = float(rng.normal()), float(rng.uniform(0.5, 2)), np.cumsum([1.0, *rng.uniform(0, 0.4, 4)])
    nodes, truth = TreeNodes.of(tree, model, recent), slow_acceptance(tree, model.weights, recent)
    usual = slow_acceptance(tree, model.weights, 0.0)
    assert nodes.numbers == sorted(truth, key=lambda node: -truth[node])
    assert nodes.probs == pytest.approx([truth[node] for node in nodes.numbers], rel=1e-12, abs=0)
    assert nodes.usual_probs == pytest.approx([usual[node] for node in nodes.numbers], rel=1e-12, abs=0)
    worth = [1 + sum(nodes.probs[: size - 1]) - rate * time for size, time in zip(SIZES, rest, strict=True)]
    assert policy(rest).size(nodes, rate, 4) == worth.index(max(worth))


@pytest.mark.parametrize("seed", range(40))
def test_machine_code_keeps_the_nodes_of_the_slow_twin(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    tree = random_tree(seed, int(rng.integers(2, 64)))
    model = AcceptanceModel(tuple(rng.normal(0, (1, 1, 1, 0.5, 1, 0.7, 1))))
    chosen = replace(policy(np.cumsum([1.0, *rng.uniform(0, 0.4, 4)])), model=model)
    inputs = chosen, tree, float(rng.normal()), float(rng.uniform(0.5, 2)), int(rng.integers(1, 5))
    ours, size, expected = keep_best_nodes(*inputs)
    monkeypatch.setattr(adaptive, "load_kernels", lambda module: None)
    truth, true_size, true_expected = keep_best_nodes(*inputs)
    assert texts(ours) == texts(truth)
    assert (ours.height, size) == (truth.height, true_size)
    assert expected == pytest.approx(true_expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_in_half_precision_choose_as_their_float32_values(dtype):
    tree = random_tree(3, 40)
    half_N = tree.path_probs_N.to(dtype)
    inputs = 0.0, 0.5, 4
    ours, size, expected = keep_best_nodes(policy(), replace(tree, path_probs_N=half_N), *inputs)
    truth, true_size, true_expected = keep_best_nodes(policy(), replace(tree, path_probs_N=half_N.float()), *inputs)
    assert texts(ours) == texts(truth)
    assert 1 < len(ours) < 40
    assert (size, expected) == (true_size, true_expected)


def test_probabilities_of_no_use_are_no_error():
    tree = replace(random_tree(0, 5), path_probs_N=torch.tensor([1.0, 1.0, 0.0, torch.nan, torch.inf]))
    nodes = TreeNodes.of(tree, AcceptanceModel((0.0, 90.0, 0.0, 0.0, 0.0, 0.0, 1.0)), 0.0)
    assert all(0 <= prob <= 1 for prob in nodes.probs)
    keep_nodes(tree, nodes.numbers[:2])
    assert 1 <= len(keep_best_nodes(policy(), tree, 0.0, 1.2, 4)[0]) <= 5


@pytest.mark.parametrize("seed", range(6))
def test_kept_nodes_are_a_tree_of_the_same_texts(seed):
    tree = random_tree(seed, 10)
    by_node = dict(enumerate(texts(tree), 1))
    nodes = TreeNodes.of(tree, ASIS, 0.3)
    assert (np.diff(nodes.probs) <= 0).all()
    for kept in range(10):
        numbers = nodes.numbers[:kept]
        smaller = keep_nodes(tree, numbers)
        assert texts(smaller) == [by_node[node] for node in sorted(numbers)]
        assert smaller.height == (max([0, *map(len, texts(smaller))]) if kept < 9 else tree.height)


PLAIN, STEEPER = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0), (-3.0, 1.0, -0.4, 0.3, 2.0, 0.3, 0.9)  # above 1/2


@pytest.mark.parametrize(
    "weights", [PLAIN, (0.7, 0.8, -0.4, 0.3, 0.0, -0.8, 0.9), (-1.0, 1.5, 0.5, -0.4, -0.7, 0.0, 1.0), STEEPER]
)
def test_no_node_that_pays_is_below_the_least_path_probability(weights):
    model, grid = AcceptanceModel(weights), np.geomspace(1e-6, 0.999, 400)
    for prob, recent in itertools.product((0.01, 0.1, 0.4), (-1.0, 0.0, 0.8)):
        least = model.least_path_prob(prob, recent, depth=6, nodes=12)
        places = itertools.product(range(1, 7), (np.full_like(grid, rank) for rank in range(1, 12)))
        inputs = [model.inputs(grid, np.full_like(grid, depth), ranks_N, recent) for depth, ranks_N in places]
        reached = [1 / (1 + np.exp(-inputs_NX @ weights)) for inputs_NX in inputs]
        truth = min(grid[accepted >= prob].min(initial=1.0) for accepted in reached)
        assert truth / 1.04 < least <= truth * (1 + 1e-9)
    assert AcceptanceModel((0.0, -0.1, 0.0, 0.0, 0.0, 0.0, 1.0)).least_path_prob(0.1, 0.0, 6, 12) == 0.0
    assert model.least_path_prob(0.0, 0.0, 6, 12) == 0.0


def test_equal_times_do_not_make_a_search_endless():
    assert policy((1.0, 1.1, 1.1, 1.2, 1.4)).costs.least_useful_prob(2.0) == pytest.approx(2 * 0.2 / 7)


def drafters(base, folder, text):
    head = block_drafter(base)
    yield from (head, block_heads(base)[0], block_heads(base)[3])  # ctc, ctc_gru, and frames as medusa's
    yield make_sequential_drafter("eagle", base, folder)
    yield make_sequential_drafter("draft_model", base, folder)
    yield PromptLookup(base, 3, 6)
    yield PromptLookup(base, 3, 6, [0.3, 0.6])
    yield SuffixDecoding(base, 8, 2.0, 1.0, 0.05, lambda base: (), 99, remember=False)
    yield Merged(base, head, PromptLookup(base, 3, 6, [0.3, 0.6]))
    yield random_drafter(base.vocabulary, 12)
    yield oracle_drafter(text, 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_are_those_of_autoregression(temperature, tmp_path):
    base = random_base(context=32)
    how, seen = replace(HOW, temperature=temperature, max_new_tokens=99), set()  # the text fills the context
    truth = generate(base, Autoregressive(base), LOOP, how, frozenset(), 3).tokens
    for number, drafter in enumerate(drafters(base, tmp_path, torch.cat([LOOP, torch.tensor(truth)]))):
        for chosen in (forced(1 + number % 4), policy(), SCRIPTED):
            generation = generate(base, AdaptiveDrafter(drafter, chosen), LOOP, how, frozenset(), 3)
            assert generation.tokens == truth, type(drafter).__name__
            seen |= {step.nodes for step in generation.passes if chosen is SCRIPTED}
    assert len(seen) > 4


def test_a_forced_size_is_the_size():
    base = random_base(context=48)
    for index, size in enumerate(SIZES):
        head = AdaptiveDrafter(block_drafter(base), forced(index))
        assert max(step.nodes for step in generate(base, head, LOOP, HOW, frozenset(), 0).passes) == size


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["ctc", "eagle", "eagle3", "hydra_own", "draft_model", "merged"])
def test_drafts_after_skips_equal_drafts_without_skips(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(adaptive, "SKIPPED_STEPS", 1)
    base = random_base()
    head = block_drafter(base)
    drafter = {"ctc": head, "merged": Merged(base, head, PromptLookup(base, 2, 5))}.get(kind)
    drafter = drafter or make_sequential_drafter(kind, base, tmp_path)
    tokens = torch.randint(5, 200, (40,), generator=torch.Generator().manual_seed(1))
    states = base.hidden_states(tokens[None], torch.ones(1, 40, dtype=torch.int64))[0]
    whole = forced(4)
    skipping, rng = AdaptiveDrafter(drafter, whole), torch.Generator()
    memory = alone = None
    for number, (start, end) in enumerate(itertools.pairwise((0, 6, 7, 9, 10, 11, 15, 16, 17, 18, 21, 22))):
        context = Context(tokens[: end + 1], states[start:end], 30, 12)
        skipping.policy = forced(0) if number % 4 in (0, 2, 3) else whole
        tree, memory = skipping.draft(context, memory, rng)
        truth, alone = drafter.draft(context, alone, rng)
        if number % 4 in (0, 2, 3):
            assert len(tree) == 1
        else:
            assert texts(tree) == texts(truth)
            assert tree.path_probs_N.tolist() == pytest.approx(truth.path_probs_N.tolist(), rel=1e-3)


@torch.inference_mode()
def test_nothing_is_drafted_for_the_last_token_and_tokens_alone_need_no_states():
    lookup, rng = AdaptiveDrafter(PromptLookup(None, 3, 6), forced(4)), torch.Generator()
    tree, memory = lookup.draft(Context(LOOP, torch.zeros(8, 4), 1, 12), None, rng)
    assert (len(tree), memory.limit, memory.pending) == (1, 0, [])
    tree, memory = lookup.draft(Context(LOOP, torch.zeros(8, 4), 9, 12), None, rng)
    assert len(tree) == 7


def context_of(length: int) -> Context:
    return Context(torch.arange(length), torch.zeros(1, 4), 50, 12)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_search_is_told_what_cannot_pay_unless_it_samples(sampled):
    seen = []

    class Recorder:
        samples_drafts = sampled

        def draft(self, context, memory, rng):
            seen.append(context.min_path_prob)
            return TokenTree.chain(context.root, torch.tensor([3])), None

    AdaptiveDrafter(Recorder(), policy()).draft(context_of(9), None, torch.Generator())
    assert len(seen) == 1
    assert seen[0] == 0 if sampled else 0 < seen[0] < 0.5
