"""Steps of fixed shapes with trees of few nodes, of which a level may have one: the tokens of exact shapes."""

from dataclasses import replace

import pytest
from test_static_loop import HOW, PROMPTS, all_drafters
from tiny_models import random_base

from ctcdraft.decoding.loop import generate, why_not_captured
from ctcdraft.decoding.static_loop import StaticShapes


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_small_trees_of_fixed_shapes(nodes, tmp_path):
    base, how = random_base(context=128), replace(HOW, nodes=nodes, max_new_tokens=12)
    for drafter in [one for one in all_drafters(base, tmp_path) if not why_not_captured(one)]:
        expected = generate(base, drafter, PROMPTS[0], how, frozenset([3]), 5).tokens
        base.static_shapes = StaticShapes()
        assert generate(base, drafter, PROMPTS[0], how, frozenset([3]), 5).tokens == expected, type(drafter).__name__
        base.static_shapes = None
