"""measure=replay: what is walked over guesses along a known text is what the loop does, pass for pass."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from drafters import oracle_drafter, random_drafter
from sessions import SETTINGS
from stepwise_parts import make_sequential_drafter
from tiny_models import random_base
from training_parts import block_head, block_heads, ctc_head

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.rejection import Rejection, multi_round
from ctcdraft.decoding.settings import DecodeStep
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.cascade import Cascade
from ctcdraft.drafters.prompt_lookup import PromptLookup
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
    """Float64: the same frames from one pass and from many differ by rounding, which could turn a close call."""
    return random_base(context=96, initializer_range=0.1).double()


def drafters(base, folder):
    """ctc by prefix search and collapsed, ctc_gru and every other corner of the block drafter (medusa's among them),
    and those that are asked one context after the other."""
    body = partial(AttentionBody, root_input=True, causal=False)
    heads = [ctc_head(base), block_head(base, body, Collapse(20, 5, 0.4)), *block_heads(base)]
    for value in (value for head in heads for value in head.trainable_parameters()):
        value.data += 0.2 * torch.randn_like(value)
    steps = [
        make_sequential_drafter(kind, base, folder, tree=DynamicTree(width, words)) for kind, width, words in GROWTHS
    ]
    cascade = Cascade(base, PromptLookup(base, 3, 4), PromptLookup(base, 1, 2), 4)
    others = [PromptLookup(base, 2, 6), random_drafter(base.vocabulary, 12), cascade]
    return [one.double() for one in (*heads, *steps)] + others


@torch.inference_mode()
def one_by_one(drafter, said, nodes):
    """The slow way: a tree behind every token, each by its own draft."""
    trees, memory = [], None
    for context in said.contexts:
        tree, memory = drafter.draft(replace(context, nodes=nodes), memory, torch.Generator())
        trees.append(DraftTree.of(tree))
    return trees


GROWTHS = [("hydra", None, None), ("eagle", 10, 10), ("eagle", 3, 4), ("draft_model", 1, 1)]


def guesses(words, parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return DraftTree(words, parents, depths)


def test_a_walk_by_pencil():
    trees = [guesses([5, 6, 7], [-1, 0, 1]), guesses([6], [-1]), guesses([7], [-1])]
    made = replay_passes([5, 6, 7, 8], [3, 2, 1], trees.__getitem__)
    assert made[3] == (DecodeStep(3, 2, False, 3, 2),)
    assert made[2] == (DecodeStep(2, 1, False, 2, 1), DecodeStep(1, 0, False, 1, 0))
    assert [step.committed for step in made[1]] == [1, 1, 1]
    assert replay_passes([5], [3], [].__getitem__) == {3: ()}
    # Of two guesses the second is right; below it hangs a wrong one, so acceptance ended there for a wrong word.
    fork = [guesses([5, 9, 6, 9], [-1, 0, 0, 2]), None, guesses([7], [-1])]
    assert replay_passes([5, 6, 7, 8], [4], fork.__getitem__)[4][0] == DecodeStep(2, 1, True, 4, 2)
    # The last token was guessed: the answer is over, and nothing behind it was refused.
    assert replay_passes([5, 6], [3], [guesses([5, 6, 9], [-1, 0, 1])].__getitem__) == {
        3: (DecodeStep(1, 1, False, 3, 2),)
    }


def test_trees_are_asked_for_once_each_in_order_and_only_where_a_pass_begins():
    asked = []

    def one(at):
        asked.append(at)
        return guesses([at, at + 1, at + 2], [-1, 0, 1])

    made = replay_passes(range(8), [2, 3], one)  # two tokens a pass from 0 on, and three
    assert asked == [0, 2, 3, 4, 6]
    assert {nodes: [step.committed for step in some] for nodes, some in made.items()} == {2: [2, 2, 2, 1], 3: [3, 3, 1]}


def test_fixed_choices_are_not_nested_where_some_hang_below_a_stop():
    """What a stop leaves out is not made up for: a larger tree has more of the same first choices."""
    base = random_base(context=96, initializer_range=0.1).double()
    tree = StaticPerFrameTree([[0], [0, 0], [1], [1, 0], [2], [2, 0], [3], [4], [5]])
    said = record_base_answer(base, PROMPTS[0], replace(SETTINGS, max_new_tokens=18), 0)
    base.stop_token_ids = frozenset(range(1, base.vocabulary, 2)) - set(said.tokens)
    head = block_head(base, partial(AttentionBody, root_input=True, causal=False), tree).double()
    for nodes, passes in replay_drafts(head, said, (4, 10), 0).items():
        assert passes == replay_passes(said.tokens, [nodes], one_by_one(head, said, nodes).__getitem__)[nodes]
    assert [one.first_nodes(4) for one in one_by_one(head, said, 10)] != one_by_one(head, said, 4)


@pytest.mark.parametrize(("temperature", "seed", "sizes"), [(0.0, 0, SIZES), (0.7, 1, (5, 16))])
def test_replay_is_the_loop_token_for_token_and_pass_for_pass(base, temperature, seed, sizes, tmp_path):
    how, prompt = replace(SETTINGS, temperature=temperature, max_new_tokens=18), PROMPTS[seed]
    said = record_base_answer(base, prompt, how, seed)
    accepted = 0
    for drafter in drafters(base, tmp_path):
        walked = replay_drafts(drafter, said, sizes, seed)
        for nodes in sizes:
            made = generate(base, drafter, prompt, replace(how, nodes=nodes), base.stop_token_ids, seed)
            assert made.tokens == said.tokens
            assert made.passes == walked[nodes], (type(drafter).__name__, nodes)
            accepted += sum(step.accepted for step in made.passes)
    assert accepted  # it is no comparison of empty drafts


def test_replay_ends_where_the_answer_does(base):
    """An end of text that was guessed, with guesses below it, and one that was not."""
    how = replace(SETTINGS, max_new_tokens=40, nodes=16)
    free = record_base_answer(base, PROMPTS[0], how, 0).tokens
    for stop in dict.fromkeys(free[3:12]):
        place = free.index(stop)
        cut = type(base)(base.lm, base.tokenizer, base.name)
        cut.stop_token_ids = frozenset([stop])
        said = record_base_answer(cut, PROMPTS[0], how, 0)
        assert said.ended
        assert said.tokens == free[: place + 1]
        text = torch.cat([PROMPTS[0], torch.tensor(free)])
        for drafter in (Told(text, 5), PromptLookup(base, 2, 6), Autoregressive(base)):
            made = generate(cut, drafter, PROMPTS[0], how, cut.stop_token_ids, 0)
            assert replay_drafts(drafter, said, [16], 0)[16] == made.passes


class Told:
    """An oracle that goes on behind the end of the answer."""

    def __init__(self, text, depth):
        self.draft = oracle_drafter(text, depth).draft


def test_frames_of_many_anchors_make_the_trees_of_one(base, tmp_path):
    """All at once in one pass, one context after the other through the memory, or a few with what lies between them
    heard at once: the same guesses."""
    said = record_base_answer(base, torch.arange(40, 60), replace(SETTINGS, max_new_tokens=70), 3)
    assert len(said.contexts) > 64  # more than one chunk of windows
    for drafter in drafters(base, tmp_path):
        at_once = DraftReplayer(drafter, said, 8, 0)
        assert list(map(at_once, range(len(said.contexts)))) == one_by_one(drafter, said, 8)
        some = DraftReplayer(drafter, said, 8, 0)
        assert list(map(some, FEW)) == [one_by_one(drafter, said, 8)[at] for at in FEW]


def test_controls_bracket_everyone(base):
    said = record_base_answer(base, PROMPTS[1], replace(SETTINGS, max_new_tokens=41), 0)
    passes = replay_drafts(oracle_drafter(torch.zeros(1), 4), said, [16], 0)[16]  # it hears the text before it is asked
    assert [step.committed for step in passes] == [5] * 8
    passes = replay_drafts(random_drafter(base.vocabulary, 12), said, [16], 0)[16]
    assert 1.0 <= 40 / len(passes) < 1.3


def test_texts_that_differ_are_not_replayed():
    drawn = replace(SETTINGS, temperature=1.0, verify=Rejection(multi_round), token_for_token=False)
    with pytest.raises(InputError, match="everyone says alike"):
        refuse_unreplayable(drawn)
    refuse_unreplayable(replace(drawn, temperature=0.0))
