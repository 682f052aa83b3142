"""The dynamic tree is the n most probable texts: held to a best-first search, and to a pencil."""

from __future__ import annotations

import pytest
import torch
from truths_trees import slow_best_first, slow_eagle2, texts

from ctcdraft.drafters.trees.dynamic import DynamicTree, build_dynamic_tree
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.errors import InputError

ROOT = torch.tensor(99)


class TableLaws:
    """Laws from a function of the text; it keeps what it was asked."""

    def __init__(self, law):
        self.law = law
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
        return torch.tensor([self.law(text) for text in self.texts], dtype=torch.float64).log()


def random_law(seed, words=6, zeros=0):
    """A fixed random law for every text; some words are impossible."""

    def law(text):
        rng = torch.Generator().manual_seed(hash((seed, text)) % 2**31)
        weights = torch.rand(words, generator=rng, dtype=torch.float64) ** 3
        weights[torch.randperm(words, generator=rng)[:zeros]] = 0
        return (weights / weights.sum()).tolist()

    return law


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("count", "depth"), [(1, 4), (5, 3), (17, 4), (400, 3)])
def test_the_best_texts_are_those_of_a_best_first_search(seed, count, depth):
    law, stops = random_law(seed, zeros=seed % 3), (2,) if seed % 2 else ()
    tree = DynamicTree(None, None)(TableLaws(law), TreeRequest(ROOT, depth, count + 1, stops))
    truth = slow_best_first(law, depth, count, stops)
    assert texts(tree) == list(truth)  # probabilities are distinct, so the order is one too
    assert int(tree.depths_N.max()) <= tree.height


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("width", "words"), [(1, 1), (1, 3), (2, 2), (3, 10)])
def test_a_narrow_tree_is_that_of_eagle_2(seed, width, words):
    law, stops = random_law(seed, zeros=seed % 2), (1,) if seed % 2 else ()
    laws = TableLaws(law)
    tree = DynamicTree(width, words)(laws, TreeRequest(ROOT, 4, 12, stops))
    # A dead end keeps its rows (shapes are fixed), but never more than `width` of them are asked about.
    assert laws.rows <= 1 + 3 * width
    assert texts(tree) == list(slow_eagle2(law, 4, 11, width, words, stops))


def test_a_pencil_can_check_it():
    """Words a b c d e = 0 1 2 3 4. Widths 2: a and b go on; of level 2 only b-e (.36) and a-c (.30)."""
    table = {
        (): [0.6, 0.4, 0, 0, 0],
        (0,): [0, 0, 0.5, 0.45, 0.05],
        (1,): [0, 0, 0.1, 0, 0.9],
        (1, 4): [1.0, 0, 0, 0, 0],
        (0, 2): [0.2, 0.2, 0.2, 0.2, 0.2],
    }
    laws = TableLaws(lambda text: table[text])
    tree = build_dynamic_tree(laws, TreeRequest(ROOT, 3, 7), width=2, children=5)
    #                 a     b     b e     b e a    a c     a d   at  .6 .4 .36 .36 .30 .27
    assert texts(tree) == [(0,), (1,), (1, 4), (1, 4, 0), (0, 2), (0, 3)]
    assert tree.parents_N.tolist() == [-1, 0, 0, 2, 3, 1, 1]
    assert laws.rows == 1 + 2 + 2
    # The reranking of EAGLE-2: with 3 guesses the depth-3 node falls, with a stop at e it never was.
    assert texts(build_dynamic_tree(TableLaws(lambda text: table[text]), TreeRequest(ROOT, 3, 4), 2, 5)) == [
        (0,),
        (1,),
        (1, 4),
    ]
    stopped = texts(
        build_dynamic_tree(TableLaws(lambda text: table.get(text, [0.2] * 5)), TreeRequest(ROOT, 3, 7, (4,)), 2, 5)
    )
    assert (1, 4) in stopped
    assert not any(text[:2] == (1, 4) and len(text) > 2 for text in stopped)


def test_no_room_is_no_guess():
    for depth, nodes in ((0, 9), (3, 1)):
        tree = DynamicTree(None, None)(TableLaws(random_law(0)), TreeRequest(ROOT, depth, nodes))
        assert tree.tokens_N.tolist() == [99]


def test_a_law_that_rounds_above_one_keeps_parents_first():
    def laws(tokens_K, rows_K):
        return torch.tensor([[2e-7, -20.0, -30.0]]).expand(len(tokens_K), -1)

    tree = build_dynamic_tree(laws, TreeRequest(ROOT, 5, 6), width=2, children=3)
    assert texts(tree) == [(0,) * n for n in range(1, 6)]


def test_an_impossible_width_is_refused():
    with pytest.raises(InputError, match=r"tree\.width must be an integer >= 1, got -1"):
        DynamicTree(-1, None)
