"""The parts of a step of fixed shapes: what belongs to which."""

import torch
from test_static_loop import HOW, PROMPTS, all_drafters
from tiny_models import random_base

from ctcdraft.decoding.loop import why_not_captured
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.drafters.controls import FullTree


@torch.inference_mode()
def test_the_arrays_of_a_tree_are_computed_with_its_draft(tmp_path):
    """Where the parts of a step are captured one by one, those of a later text read what the draft's graph writes."""
    base = random_base(context=64)
    base.static_shapes = StaticShapes()
    for drafter in [FullTree(), *all_drafters(base, tmp_path)]:
        if not why_not_captured(drafter):
            decoder = base.static_shapes.decoder(base, drafter, HOW, 60)
            _, first = decoder.start(PROMPTS[0], 0)
            decoder.draft(first)
            assert {"depths_N", "ancestors_NN"} <= vars(decoder.drafted).keys(), type(drafter).__name__
