"""Static trees: ranks behind a node's own text or along one greedy path; impossible and ended texts have no nodes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from omegaconf import OmegaConf
from test_dynamic_trees import ROOT, TableStepFunction, random_distributions
from truths_trees import texts

from ctcdraft.config.cli import CONFIGS
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.drafters.trees.static import GreedyPathTree, StaticTree
from ctcdraft.errors import InputError

MEDUSA63 = OmegaConf.to_container(OmegaConf.load(CONFIGS / "drafter" / "tree" / "medusa63.yaml"))["choices"]


def slow_choices(distribution, choices, depth, stops, along_greedy_path):
    """Return the texts and path probabilities (from the root's) of all choices that are possible, walking every choice
    from the root, rank by rank."""
    texts_by_choice, path_probs = {(): ()}, {(): 1.0}
    greedy = {0: ()}
    for level in range(depth):
        p = distribution(greedy[level])
        greedy[level + 1] = (*greedy[level], max(range(len(p)), key=p.__getitem__))
    for choice in map(tuple, choices):
        above = texts_by_choice.get(choice[:-1])
        if above is None or len(choice) > depth or (above and above[-1] in stops):
            continue
        p = distribution(greedy[len(choice) - 1] if along_greedy_path else above)
        ranked = sorted(range(len(p)), key=lambda token: -p[token])
        if choice[-1] < len(p) and p[ranked[choice[-1]]] > 0:
            texts_by_choice[choice] = (*above, ranked[choice[-1]])
            path_probs[choice] = path_probs[choice[:-1]] * p[ranked[choice[-1]]]
    return list(texts_by_choice.values())[1:], list(path_probs.values())


@pytest.mark.parametrize("kind", [StaticTree, GreedyPathTree])
@pytest.mark.parametrize("nodes", [2, 7, 20, 64])
@pytest.mark.parametrize("seed", range(4))
def test_every_choice_has_its_token(kind, nodes, seed):
    distribution, stops = random_distributions(seed, vocabulary=12, zeros=4 * (seed % 2)), (3,) if seed > 1 else ()
    for depth in (1, 3, 6):
        step_function = TableStepFunction(distribution)
        tree = kind(MEDUSA63)(step_function, TreeRequest(ROOT, depth, nodes, stops))
        fitting = [choice for choice in MEDUSA63 if len(choice) <= depth]  # deeper ones leave room for others
        truth, path_probs = slow_choices(distribution, fitting[: nodes - 1], depth, stops, kind is GreedyPathTree)
        assert texts(tree) == truth
        assert tree.path_probs_N.tolist() == pytest.approx(path_probs, rel=1e-5)
        if kind is GreedyPathTree:
            assert step_function.rows <= 4  # one row per level


def test_medusas_63_choices():
    """Nodes of each depth, and buffers of the first few by hand."""
    assert Counter(map(len, MEDUSA63)) == {1: 10, 2: 28, 3: 23, 4: 2}
    assert len({tuple(choice) for choice in MEDUSA63}) == 63
    parents = {tuple(choice[:-1]) for choice in MEDUSA63}
    assert sum(tuple(choice) not in parents for choice in MEDUSA63) == 42  # leaves: the rows of Medusa's buffers
    distribution = torch.arange(20, 0, -1.0).log_softmax(dim=0)  # token w has rank w behind every text
    tree = StaticTree(MEDUSA63)(
        lambda tokens_K, rows_K: distribution.expand(len(tokens_K), -1), TreeRequest(ROOT, 4, 64)
    )
    #                    root  0  0-0  1  0-1  2  0-0-0  1-0  0-2
    assert tree.tokens_N[:9].tolist() == [99, 0, 0, 1, 1, 2, 0, 0, 2]
    assert tree.parents_N[:9].tolist() == [-1, 0, 1, 0, 1, 0, 2, 3, 1]
    assert tree.depths_N.bincount().tolist() == [1, 10, 28, 23, 2]


def test_without_room_the_tree_is_the_root():
    for depth, nodes in ((0, 9), (3, 1)):
        assert StaticTree(MEDUSA63)(
            TableStepFunction(random_distributions(0)), TreeRequest(ROOT, depth, nodes)
        ).tokens_N.tolist() == [99]


def test_a_choice_without_its_parent_is_refused():
    with pytest.raises(InputError, match=r"\[1, 0\] before the choice that it continues"):
        StaticTree([[0], [1, 0]])
    with pytest.raises(InputError, match=r"\[1, 0\] before the choice that it continues"):
        GreedyPathTree([[1], [1, 0]])  # the greedy path itself must be in the tree
