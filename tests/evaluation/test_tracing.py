"""Traces show the frames of heads inside adaptive and merged drafters."""

from __future__ import annotations

import pytest
from small_evaluations import PROMPTS, make_setup
from tiny_models import random_base
from training_parts import ctc_head

from ctcdraft.drafters.acceptance import AcceptanceModel
from ctcdraft.drafters.adaptive import AdaptiveDrafter
from ctcdraft.drafters.merged import Merged
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.tree_policy import AdaptivePolicy, StepCosts
from ctcdraft.evaluation.tracer import TraceSettings

FREE = StepCosts((1, 4, 8), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # drafting always pays
DRAFTERS = {
    "adaptive": lambda base, head: AdaptiveDrafter(
        head, AdaptivePolicy.uncut(FREE, (1.0, 2.0, 3.0), AcceptanceModel())
    ),
    "merged": lambda base, head: Merged(base, head, PromptLookup(base, 3, 6)),
}
DRAFTERS["both"] = lambda base, head: DRAFTERS["adaptive"](base, DRAFTERS["merged"](base, head))


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_frames_of_a_head_inside_are_recorded(name):
    setup = make_setup(base := random_base(), max_new_tokens=8)
    head = ctc_head(base)
    builder = head.frame_tree
    setup.contestants["outer"] = DRAFTERS[name](base, head)
    trace = TraceSettings(questions=1, tokens=8, tokens_per_frame=3).trace_answers(setup, {0: PROMPTS[0]})
    (answer,) = [one for one in trace.answers if one.contestant == "outer"]
    drafted = [step for step in answer.passes if len(step.tokens) > 1]
    assert drafted
    assert all(step.frames is not None and step.frames.reads == "alignments" for step in drafted)
    assert head.frame_tree is builder
