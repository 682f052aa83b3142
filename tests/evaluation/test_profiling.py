"""Profiling: parts that add up, the same tokens as without timing, and bandwidth utilization by hand."""

from dataclasses import replace

import pytest
import torch
from simple_drafters import oracle_drafter, random_drafter
from small_evaluations import PROMPTS, SETTINGS, make_setup
from tiny_models import random_base

from ctcdraft.decoding import loop
from ctcdraft.decoding.settings import DecodeStep
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.evaluation import profiling
from ctcdraft.evaluation.environment import bandwidth_utilization, copy_bandwidth, count_matmul_weights, weight_bytes
from ctcdraft.evaluation.profiling import (
    PhaseTimes,
    Profile,
    Stopwatch,
    TimedDrafter,
    kv_rows_read,
    profile_answer,
    relative_costs,
)
from ctcdraft.evaluation.runner import turn_prompt


class Work:
    """A clock that only advances with the work: all_bytes part takes a fixed number of seconds."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, seconds, function):
        def working(*args):
            self.now += seconds
            return function(*args)

        return working


class WithPaths:
    """A drafter that takes 2 seconds, and 1 more for building the tree."""

    def __init__(self, work):
        self.work = work
        self.frame_tree = work.takes(1.0, TokenTree.only_root)

    def draft(self, context, memory, rng):
        self.work.now += 2.0
        return self.frame_tree(context.root), None


def test_parts_are_exclusive_and_add_up(monkeypatch):
    work = Work()
    monkeypatch.setattr(profiling, "perf_counter", work)
    monkeypatch.setattr(loop, "perf_counter", work)
    base = random_base()
    prompt_L, _ = turn_prompt(base, PROMPTS[0], [])
    base.read = work.takes(100.0, base.read)
    base.read_tree = work.takes(4.0, base.read_tree)
    settings = replace(SETTINGS, verify=work.takes(0.5, match))
    drafter = WithPaths(work)
    frame_tree = drafter.frame_tree
    spent = profile_answer(base, drafter, prompt_L, settings, seed=0)
    assert drafter.frame_tree is frame_tree
    per_step = {part: seconds / spent.passes for part, seconds in spent.seconds.items() if part != "prefill"}
    assert per_step == {"draft": 2.0, "tree": 1.0, "read": 4.0, "verify": 0.5, "keep": 0.0, "other": 0.0}
    assert spent.seconds["prefill"] == 100.5  # with its verification
    assert spent.seconds_per_pass == 7.5


def test_a_module_drafter_keeps_its_tree_builder():
    drafter = torch.nn.Module()
    drafter.frame_tree = torch.nn.Identity()
    drafter.draft = lambda *args: None
    TimedDrafter(drafter, Stopwatch(torch.device("cpu")))
    assert isinstance(drafter.frame_tree, torch.nn.Identity)


def test_profiling_does_not_change_the_tokens(monkeypatch):
    setup = make_setup()
    prompt_L, _ = turn_prompt(setup.base, PROMPTS[0], [])
    plain = setup.answer("prompt_lookup", prompt_L, 0)
    generations = []
    generate = profiling.generate
    monkeypatch.setattr(profiling, "generate", lambda *args: generations.append(generate(*args)) or generations[-1])
    profile_answer(setup.base, setup.contestants["prompt_lookup"], prompt_L, setup.settings, 0)
    assert (generations[0].tokens, generations[0].passes) == (plain.tokens, plain.passes)


def test_nothing_counts_before_the_second_draft():
    watch = Stopwatch(torch.device("cpu"))
    verify, draft = watch.timed("verify", lambda: None), watch.timed("draft", lambda: None, is_first=True)
    verify()
    draft()
    verify()
    assert not watch.seconds
    assert (watch.steps, sum(watch.stop().values())) == (0, 0)
    draft()
    verify()
    assert watch.steps == 1
    assert {part for part, seconds in watch.seconds.items() if seconds} == {"draft", "verify"}


@pytest.mark.parametrize("static", [False, True])
def test_the_first_step_is_left_out_and_every_other_one_counted(static, monkeypatch):
    """Its draft reads the prompt. Of fixed shapes the surplus step is timed, and counted."""
    work, drafts = Work(), []
    monkeypatch.setattr(profiling, "perf_counter", work)
    base = random_base()
    base.static_shapes = StaticShapes() if static else None
    base.read_tree = work.takes(4.0, base.read_tree)
    drafter = Autoregressive(base)
    draft = drafter.draft

    def counted(context, *rest):
        drafts.append(context)
        work.now += 100.0 if len(drafts) == 1 else 2.0
        return draft(context, *rest)

    drafter.draft = counted
    spent = profile_answer(base, drafter, torch.arange(40, 50), SETTINGS, 0, steps=5)
    assert (spent.passes, len(drafts)) == (5, 6)
    assert (spent.seconds["draft"], spent.seconds["read"], spent.seconds_per_pass) == (10.0, 20.0, 6.0)
    first = 10 + 1  # rows that the first step reads, which is not counted
    assert spent.kv_bytes == sum(range(first + 1, first + 6)) * 2 * 2 * 8 * 2 * 4


def spent(read, draft=0.0, passes=10):
    seconds = dict.fromkeys(profiling.PASS_PARTS, 0.0) | {"read": read, "draft": draft, "prefill": 1.0}
    return PhaseTimes(seconds, passes, answers=1, kv_bytes=100)


def test_costs_are_in_autoregressive_steps():
    sides = {"autoregressive": spent(10.0), "ctc": spent(read=7.5, draft=2.5, passes=5)}
    assert relative_costs(sides, "autoregressive") == {"c": 0, "v": 1, "o": 0}
    assert relative_costs(sides, "ctc") == {"c": 0.5, "v": 1.5, "o": 0}
    assert relative_costs(sides | {"ctc": spent(0.0, passes=0)}, "ctc") is None


def test_shards_add_up():
    merged = Profile.merge_shards([Profile({"a": spent(1.0)}, 8, 100.0), Profile({"a": spent(2.0)}, 8, 300.0)])
    assert merged.spent["a"].seconds["read"] == 3
    assert (merged.spent["a"].passes, merged.spent["a"].answers, merged.bandwidth) == (20, 2, 200)
    assert Profile.merge_shards([]) is None
    assert Profile.from_json(merged.to_json()) == merged


def test_kv_rows_read_by_hand():
    passes = (DecodeStep(1, 0, False, 1, 0), DecodeStep(2, 1, True, 4, 3), DecodeStep(1, 0, False, 1, 0))
    assert kv_rows_read(3, passes) == [3 + 1, 4 + 4, 6 + 1]


def test_kv_bytes_are_those_of_the_rows_read():
    base = random_base()  # 2 layers, 2 heads of 8 wide, keys and values, 4 bytes
    setup = make_setup(base)
    prompt_L, _ = turn_prompt(base, PROMPTS[0], [])
    answer = setup.answer("prompt_lookup", prompt_L, 0)
    measured = profile_answer(base, setup.contestants["prompt_lookup"], prompt_L, setup.settings, 0)
    assert measured.passes == len(answer.passes) - 1
    assert measured.kv_bytes == sum(kv_rows_read(len(prompt_L), answer.passes)[1:]) * 2 * 2 * 8 * 2 * 4


@pytest.mark.parametrize("tied", [True, False])
def test_weights_read_per_forward_pass(tied):
    base = random_base(tie_word_embeddings=tied)
    all_bytes = sum(weight.numel() for weight in base.lm.parameters()) * 4
    embeddings = 261 * 32 * 4
    assert weight_bytes(base) == (all_bytes if tied else all_bytes - embeddings)
    assert count_matmul_weights(base) == weight_bytes(base) // 4  # float32, and all_bytes layer is a matrix product


def test_bandwidth_utilization():
    # 10 passes of 50 bytes and 100 bytes of KV, at 60 bytes/s, cannot take less than 10 s; they took 20.
    assert bandwidth_utilization(spent(20.0), weight_bytes=50, bandwidth=60.0) == 0.5
    assert copy_bandwidth(torch.device("cpu"), rounds=1) > 1e8


def test_controls_are_profiled_like_other_drafters():
    """The oracle drafter, and the random one, which has no tree builder."""
    setup = make_setup()
    prompt, how = torch.arange(40, 50), replace(SETTINGS, max_new_tokens=8)
    for drafter in (oracle_drafter(torch.arange(40, 90), 4), random_drafter(setup.base.vocabulary, 12)):
        spent = profile_answer(setup.base, drafter, prompt, how, 0, steps=7)
        assert 0 < spent.passes <= 7
        assert spent.seconds["draft"] > 0
        assert spent.seconds["tree"] == 0
