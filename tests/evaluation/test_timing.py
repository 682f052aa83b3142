"""The instrumented pass: parts that add up, the same text as without clocks, and a roof by pencil."""

from dataclasses import replace

import pytest
import torch
from drafters import oracle_drafter, random_drafter
from sessions import PROMPTS, SETTINGS, make_setup
from tiny_models import random_base

from ctcdraft.decoding import loop
from ctcdraft.decoding.settings import DecodeStep, GenerationResult
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.verification import match
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
    """A clock that only work moves: every part takes whole seconds, whatever else the machine does."""

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
    """Drafts in 2 seconds without the tree, which takes 1 more."""

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
    a_pass = {part: seconds / spent.passes for part, seconds in spent.seconds.items() if part != "prefill"}
    assert a_pass == {"draft": 2.0, "tree": 1.0, "read": 4.0, "verify": 0.5, "keep": 0.0, "other": 0.0}
    assert spent.seconds["prefill"] == 100.5  # its verify included
    assert spent.seconds_per_pass == 7.5


def test_a_drafter_that_is_a_module_keeps_its_own_paths():
    drafter = torch.nn.Module()
    drafter.frame_tree = torch.nn.Identity()
    drafter.draft = lambda *args: None
    TimedDrafter(drafter, Stopwatch(torch.device("cpu")))
    assert isinstance(drafter.frame_tree, torch.nn.Identity)


def test_clocks_do_not_change_the_text(monkeypatch):
    here = make_setup()
    prompt_L, _ = turn_prompt(here.base, PROMPTS[0], [])
    plain = here.answer("prompt_lookup", prompt_L, 0)
    made = []
    generate = profiling.generate
    monkeypatch.setattr(profiling, "generate", lambda *args: made.append(generate(*args)) or made[-1])
    profile_answer(here.base, here.contestants["prompt_lookup"], prompt_L, here.settings, 0)
    assert (made[0].tokens, made[0].passes) == (plain.tokens, plain.passes)


def test_nothing_counts_before_the_first_draft():
    watch = Stopwatch(torch.device("cpu"))
    verify, draft = watch.timed("verify", lambda: None), watch.timed("draft", lambda: None, starts=True)
    verify()
    assert not watch.seconds
    draft()
    verify()
    assert set(watch.seconds) == {"draft", "verify"}


def spent(read, draft=0.0, passes=10):
    seconds = dict.fromkeys(profiling.PASS_PARTS, 0.0) | {"read": read, "draft": draft, "prefill": 1.0}
    return PhaseTimes(seconds, passes, answers=1, kv_bytes=100)


def test_costs_are_in_autoregressive_passes():
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


def test_rows_read():
    passes = (DecodeStep(1, 0, False, 1, 0), DecodeStep(2, 1, True, 4, 3), DecodeStep(1, 0, False, 1, 0))
    said = GenerationResult((0,) * 5, passes, False, 0.0, 0.0)
    assert kv_rows_read(3, said) == (3 + 1) + (4 + 4) + (6 + 1)


def test_kv_bytes_are_those_of_the_rows_read():
    base = random_base()  # 2 layers, 2 heads of 8 wide, keys and values, 4 bytes
    here = make_setup(base)
    prompt_L, _ = turn_prompt(base, PROMPTS[0], [])
    said = here.answer("prompt_lookup", prompt_L, 0)
    measured = profile_answer(base, here.contestants["prompt_lookup"], prompt_L, here.settings, 0)
    assert measured.kv_bytes == kv_rows_read(len(prompt_L), said) * 2 * 2 * 8 * 2 * 4


@pytest.mark.parametrize("tied", [True, False])
def test_weights_a_pass_reads(tied):
    base = random_base(tie_word_embeddings=tied)
    every = sum(weight.numel() for weight in base.lm.parameters()) * 4
    embeddings = 261 * 32 * 4
    assert weight_bytes(base) == (every if tied else every - embeddings)
    assert count_matmul_weights(base) == weight_bytes(base) // 4  # float32, and every layer a plain product


def test_the_roof():
    # 10 passes of 50 bytes and 100 bytes of KV, at 60 bytes/s, cannot take less than 10 s; they took 20.
    assert bandwidth_utilization(spent(20.0), weight_bytes=50, bandwidth=60.0) == 0.5
    assert copy_bandwidth(torch.device("cpu"), rounds=1) > 1e8


def test_controls_are_clocked_like_everyone():
    """One that guesses what it was told, and one whose values must not be taken for ways to read frames."""
    here = make_setup()
    prompt, how = torch.arange(40, 50), replace(SETTINGS, max_new_tokens=8)
    for drafter in (oracle_drafter(torch.arange(40, 90), 4), random_drafter(here.base.vocabulary, 12)):
        spent = profile_answer(here.base, drafter, prompt, how, 0, frozenset())
        assert 0 < spent.passes <= 7
        assert spent.seconds["draft"] > 0
        assert spent.seconds["tree"] == 0
