"""measure=replay: replayed decoding steps along a known text equal those of the loop."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from sequential_parts import make_sequential_drafter
from simple_drafters import oracle_drafter, random_drafter
from small_evaluations import SETTINGS
from tiny_models import random_base
from training_parts import block_head, block_heads, ctc_head

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodeStep
from ctcdraft.decoding.verification import Rejection, multi_round
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.merged import Merged
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.suffix import SuffixDecoding
from ctcdraft.drafters.trees.ctc import Collapse
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.drafters.trees.per_frame import StaticPerFrameTree
from ctcdraft.errors import InputError
from ctcdraft.evaluation.replay.drafts import (
    DraftReplayer,
    DraftTree,
    record_base_answer,
    refuse_unreplayable,
    replay_drafts,
    replay_passes,
)
from ctcdraft.nn.bodies import AttentionBody

PROMPTS = [torch.tensor([0, 7, 9, 7, 9, 7]), torch.arange(40, 60)]
SIZES = (2, 5, 16)
FEW = (0, 3, 4, 9, 33, 62, 65)


@pytest.fixture(scope="module")
def base():
    """In float64: frames from one forward pass and from many differ by rounding, which could change a near tie."""
    return random_base(context=96, initializer_range=0.1).double()


def drafters(base, folder):
    """ctc by prefix search and collapsed, ctc_gru all other variants of the parallel drafter (medusa's among them),
    and those that draft one context after the other."""
    body = partial(AttentionBody, root_input=True, causal=False)
    heads = [ctc_head(base), block_head(base, body, Collapse(20, 5, 0.4)), *block_heads(base)]
    for value in (value for head in heads for value in head.trainable_parameters()):
        value.data += 0.2 * torch.randn_like(value)
    steps = [
        make_sequential_drafter(kind, base, folder, tree=DynamicTree(width, tokens)) for kind, width, tokens in GROWTHS
    ]
    merged = Merged(base, PromptLookup(base, 3, 4), PromptLookup(base, 1, 2))
    suffix = SuffixDecoding(base, 8, 2.0, 1.0, 0.1, lambda base: (), 99, remember=False)
    others = [
        PromptLookup(base, 2, 6),
        PromptLookup(base, 3, 6, prompt_only=True),
        suffix,
        random_drafter(base.vocabulary, 12),
        merged,
    ]
    return [one.double() for one in (*heads, *steps)] + others


@torch.inference_mode()
def draft_all(drafter, answer, nodes):
    """The slow way: a tree after every token, each by its own draft."""
    trees, memory = [], None
    for context in answer.contexts:
        tree, memory = drafter.draft(replace(context, nodes=nodes), memory, torch.Generator())
        trees.append(DraftTree.of(tree))
    return trees


GROWTHS = [("hydra", None, None), ("eagle", 10, 10), ("eagle", 3, 4), ("draft_model", 1, 1)]


def draft_tree(tokens, parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return DraftTree(tokens, parents, depths)


def test_replayed_steps_by_hand():
    trees = [draft_tree([5, 6, 7], [-1, 0, 1]), draft_tree([6], [-1]), draft_tree([7], [-1])]
    replayed = replay_passes([5, 6, 7, 8], [3, 2, 1], trees.__getitem__)
    assert replayed[3] == (DecodeStep(3, 2, False, 3, 2),)
    assert replayed[2] == (DecodeStep(2, 1, False, 2, 1), DecodeStep(1, 0, False, 1, 0))
    assert [step.committed for step in replayed[1]] == [1, 1, 1]
    assert replay_passes([5], [3], [].__getitem__) == {3: ()}
    # Of two draft tokens the second is right; its child is wrong, so acceptance ended at a rejected token.
    fork = [draft_tree([5, 9, 6, 9], [-1, 0, 0, 2]), None, draft_tree([7], [-1])]
    assert replay_passes([5, 6, 7, 8], [4], fork.__getitem__)[4][0] == DecodeStep(2, 1, True, 4, 2)
    # The last token was drafted: the answer ended, and nothing after it was rejected.
    assert replay_passes([5, 6], [3], [draft_tree([5, 6, 9], [-1, 0, 1])].__getitem__) == {
        3: (DecodeStep(1, 1, False, 3, 2),)
    }


def test_trees_are_drafted_once_in_order_and_only_where_a_step_begins():
    positions = []

    def one(at):
        positions.append(at)
        return draft_tree([at, at + 1, at + 2], [-1, 0, 1])

    replayed = replay_passes(range(8), [2, 3], one)  # two tokens per step from 0 on, and three
    assert positions == [0, 2, 3, 4, 6]
    assert {nodes: [step.committed for step in steps] for nodes, steps in replayed.items()} == {
        2: [2, 2, 2, 1],
        3: [3, 3, 1],
    }


def test_static_trees_are_not_nested_where_a_node_follows_a_stop_token():
    """Nodes after a stop token are left out and not replaced, so a larger tree has more of the first choices."""
    base = random_base(context=96, initializer_range=0.1).double()
    tree = StaticPerFrameTree([[0], [0, 0], [1], [1, 0], [2], [2, 0], [3], [4], [5]])
    answer = record_base_answer(base, PROMPTS[0], replace(SETTINGS, max_new_tokens=18), 0)
    base.stop_token_ids = frozenset(range(1, base.vocabulary, 2)) - set(answer.tokens)
    head = block_head(base, partial(AttentionBody, root_input=True, causal=False), tree).double()
    for nodes, passes in replay_drafts(head, answer, (4, 10), 0).items():
        assert passes == replay_passes(answer.tokens, [nodes], draft_all(head, answer, nodes).__getitem__)[nodes]
    assert [one.first_nodes(4) for one in draft_all(head, answer, 10)] != draft_all(head, answer, 4)


@pytest.mark.parametrize(("temperature", "seed", "sizes"), [(0.0, 0, SIZES), (0.7, 1, (5, 16))])
def test_replay_equals_the_loop_in_tokens_and_steps(base, temperature, seed, sizes, tmp_path):
    settings, prompt = replace(SETTINGS, temperature=temperature, max_new_tokens=18), PROMPTS[seed]
    answer = record_base_answer(base, prompt, settings, seed)
    accepted = 0
    for drafter in drafters(base, tmp_path):
        by_size = replay_drafts(drafter, answer, sizes, seed)
        for nodes in sizes:
            decoded = generate(base, drafter, prompt, replace(settings, nodes=nodes), base.stop_token_ids, seed)
            assert decoded.tokens == answer.tokens
            assert decoded.passes == by_size[nodes], (type(drafter).__name__, nodes)
            accepted += sum(step.accepted for step in decoded.passes)
    assert accepted  # the drafts were not empty


def test_replay_ends_where_the_answer_does(base):
    """A stop token that was drafted, with draft tokens after it, and one that was not."""
    settings = replace(SETTINGS, max_new_tokens=40, nodes=16)
    free = record_base_answer(base, PROMPTS[0], settings, 0).tokens
    for stop in dict.fromkeys(free[3:12]):
        index = free.index(stop)
        cut = type(base)(base.lm, base.tokenizer, base.name)
        cut.stop_token_ids = frozenset([stop])
        answer = record_base_answer(cut, PROMPTS[0], settings, 0)
        assert answer.ended
        assert answer.tokens == free[: index + 1]
        text = torch.cat([PROMPTS[0], torch.tensor(free)])
        for drafter in (OracleOf(text, 5), PromptLookup(base, 2, 6), Autoregressive(base)):
            decoded = generate(cut, drafter, PROMPTS[0], settings, cut.stop_token_ids, 0)
            assert replay_drafts(drafter, answer, [16], 0)[16] == decoded.passes


class OracleOf:
    """An oracle that continues after the end of the answer."""

    def __init__(self, text, depth):
        self.draft = oracle_drafter(text, depth).draft


def test_frames_of_many_anchors_make_the_trees_of_one(base, tmp_path):
    """All in one forward pass, one context after the other, or some with gaps between them: equal draft tokens."""
    answer = record_base_answer(base, torch.arange(40, 60), replace(SETTINGS, max_new_tokens=70), 3)
    assert len(answer.contexts) > 64  # more than one chunk of windows
    for drafter in drafters(base, tmp_path):
        at_once = DraftReplayer(drafter, answer, 8, 0)
        assert list(map(at_once, range(len(answer.contexts)))) == draft_all(drafter, answer, 8)
        steps = DraftReplayer(drafter, answer, 8, 0)
        assert list(map(steps, FEW)) == [draft_all(drafter, answer, 8)[at] for at in FEW]


def test_controls_bracket_all_drafters(base):
    answer = record_base_answer(base, PROMPTS[1], replace(SETTINGS, max_new_tokens=41), 0)
    passes = replay_drafts(oracle_drafter(torch.zeros(1), 4), answer, [16], 0)[16]
    assert [step.committed for step in passes] == [5] * 8
    passes = replay_drafts(random_drafter(base.vocabulary, 12), answer, [16], 0)[16]
    assert 1.0 <= 40 / len(passes) < 1.3


def test_texts_that_differ_are_not_replayed():
    sampled = replace(SETTINGS, temperature=1.0, verify=Rejection(multi_round), token_for_token=False)
    with pytest.raises(InputError, match="does not depend on the drafter"):
        refuse_unreplayable(sampled)
    refuse_unreplayable(replace(sampled, temperature=0.0))
