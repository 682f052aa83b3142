"""The dynamic tree holds the n most probable texts: compared with a best-first search and an example by hand."""

from __future__ import annotations

import pytest
import torch
from truths_trees import slow_best_first, slow_eagle2, texts

from ctcdraft.decoding.step_operations import PADDING
from ctcdraft.drafters.trees.dynamic import DynamicTree, build_dynamic_tree
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.errors import InputError

ROOT = torch.tensor(99)


class TableStepFunction:
    """A step function from a table of next-token probabilities by text; it counts the rows it was called with."""

    def __init__(self, distribution):
        self.distribution = distribution
        self.texts = [()]
        self.rows = 0

    def __call__(self, tokens_K, rows_K):
        if self.rows:
            self.texts = [
                (*self.texts[row], token) for token, row in zip(tokens_K.tolist(), rows_K.tolist(), strict=True)
            ]
        else:
            assert tokens_K.tolist() == [int(ROOT)]
        self.rows += len(tokens_K)
        return torch.tensor([self.distribution(text) for text in self.texts], dtype=torch.float64).log()


def random_distributions(seed, vocabulary=6, zeros=0):
    """Return fixed random next-token probabilities for every text; `zeros` tokens are impossible."""

    def distribution(text):
        rng = torch.Generator().manual_seed(hash((seed, text)) % 2**31)
        weights = torch.rand(vocabulary, generator=rng, dtype=torch.float64) ** 3
        weights[torch.randperm(vocabulary, generator=rng)[:zeros]] = 0
        return (weights / weights.sum()).tolist()

    return distribution


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("count", "depth"), [(1, 4), (5, 3), (17, 4), (400, 3)])
def test_the_best_texts_are_those_of_a_best_first_search(seed, count, depth):
    distribution, stops = random_distributions(seed, zeros=seed % 3), (2,) if seed % 2 else ()
    tree = DynamicTree(None, None)(TableStepFunction(distribution), TreeRequest(ROOT, depth, count + 1, stops))
    truth = slow_best_first(distribution, depth, count, stops)
    assert texts(tree) == list(truth)  # probabilities are distinct, so the order is one too
    assert tree.path_probs_N.tolist() == pytest.approx([1.0, *truth.values()])
    assert int(tree.depths_N.max()) <= tree.height


@pytest.mark.parametrize("padded", [False, True])
def test_texts_after_an_overflow_are_left_out(padded):
    """NaN sorts before every number, so that children would come before their parents."""
    after = {(): [0.6, 0.4, 0.0], (0,): [float("nan")] * 3}
    step_function = TableStepFunction(lambda text: after.get(text, [0.5, 0.5, 0.0]))
    tree = build_dynamic_tree(step_function, TreeRequest(ROOT, 2, 8, padded=padded), 7, 3)
    real_N = tree.tokens_N != PADDING
    assert tree.parents_N[real_N].tolist() == [-1, 0, 0, 2, 2]
    assert tree.tokens_N[real_N].tolist() == [int(ROOT), 0, 1, 0, 1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("width", "children"), [(1, 1), (1, 3), (2, 2), (3, 10)])
def test_a_limited_tree_equals_eagle_2(seed, width, children):
    distribution, stops = random_distributions(seed, zeros=seed % 2), (1,) if seed % 2 else ()
    step_function = TableStepFunction(distribution)
    tree = DynamicTree(width, children)(step_function, TreeRequest(ROOT, 4, 12, stops))
    # Nodes that end keep their rows, as shapes are fixed, but no level has more than `width` rows.
    assert step_function.rows <= 1 + 3 * width
    truth = slow_eagle2(distribution, 4, 11, width, children, stops)
    assert texts(tree) == list(truth)
    assert tree.path_probs_N.tolist() == pytest.approx([1.0, *truth.values()])


def test_an_example_by_hand():
    """Tokens a b c d e = 0 1 2 3 4, width 2: a and b are continued; of level 2 only b e (.36) and a c (.30)."""
    table = {
        (): [0.6, 0.4, 0, 0, 0],
        (0,): [0, 0, 0.5, 0.45, 0.05],
        (1,): [0, 0, 0.1, 0, 0.9],
        (1, 4): [1.0, 0, 0, 0, 0],
        (0, 2): [0.2, 0.2, 0.2, 0.2, 0.2],
    }
    step_function = TableStepFunction(lambda text: table[text])
    tree = build_dynamic_tree(step_function, TreeRequest(ROOT, 3, 7), width=2, children=5)
    #                 a     b     b e     b e a    a c     a d   at  .6 .4 .36 .36 .30 .27
    assert texts(tree) == [(0,), (1,), (1, 4), (1, 4, 0), (0, 2), (0, 3)]
    assert tree.parents_N.tolist() == [-1, 0, 0, 2, 3, 1, 1]
    assert step_function.rows == 1 + 2 + 2
    # The reranking of EAGLE-2: 3 draft tokens leave out the node of depth 3; with e as stop token it never exists.
    step_function = TableStepFunction(lambda text: table[text])
    assert texts(build_dynamic_tree(step_function, TreeRequest(ROOT, 3, 4), 2, 5)) == [(0,), (1,), (1, 4)]
    assert step_function.rows == 1 + 2  # b e is third, so that nothing after it is better than the three
    stopped = texts(
        build_dynamic_tree(
            TableStepFunction(lambda text: table.get(text, [0.2] * 5)), TreeRequest(ROOT, 3, 7, (4,)), 2, 5
        )
    )
    assert (1, 4) in stopped
    assert not any(text[:2] == (1, 4) and len(text) > 2 for text in stopped)


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_are_not_continued_change_nothing(seed):
    """Padded trees continue all. Quarters, so that many probabilities are equal."""
    draws = random_distributions(seed, vocabulary=4)

    def distribution(text):
        return [round(4 * prob) / 4 for prob in draws(text)]

    rows = []
    for width, children, nodes in [(9, 9, 6), (2, 3, 7), (1, 1, 5), (3, 2, 20)]:
        found = []
        for padded in (False, True):
            step_function = TableStepFunction(distribution)
            tree = build_dynamic_tree(step_function, TreeRequest(ROOT, 5, nodes, (1,), padded=padded), width, children)
            real_N = tree.tokens_N != PADDING
            found.append((tree.tokens_N[real_N].tolist(), tree.parents_N[real_N].tolist()))
            rows.append(step_function.rows)
        assert found[0] == found[1]
    assert sum(rows[::2]) < sum(rows[1::2])


def test_a_chain_ends_at_a_stop_token():
    step_function = TableStepFunction(lambda text: [0.7, 0.2, 0.1])
    assert DynamicTree(1, 1)(step_function, TreeRequest(ROOT, 7, 12, (0,))).tokens_N.tolist() == [99, 0]
    assert step_function.rows == 1


def test_without_room_the_tree_is_the_root():
    for depth, nodes in ((0, 9), (3, 1)):
        tree = DynamicTree(None, None)(TableStepFunction(random_distributions(0)), TreeRequest(ROOT, depth, nodes))
        assert tree.tokens_N.tolist() == [99]


def test_a_probability_that_rounds_above_one_keeps_parents_first():
    def step_function(tokens_K, rows_K):
        return torch.tensor([[2e-7, -20.0, -30.0]]).expand(len(tokens_K), -1)

    tree = build_dynamic_tree(step_function, TreeRequest(ROOT, 5, 6), width=2, children=3)
    assert texts(tree) == [(0,) * n for n in range(1, 6)]


def test_an_impossible_width_is_refused():
    with pytest.raises(InputError, match=r"tree\.width must be an integer >= 1 or null, got -1"):
        DynamicTree(-1, None)
