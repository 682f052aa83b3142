"""Compiled reads: equal to eager ones, compiled once per size, and one sentence where compiling is impossible."""

from __future__ import annotations

import pytest
import torch
from simple_drafters import oracle_drafter, random_drafter
from small_evaluations import NO_TRACE, make_evaluation, make_setup
from test_static_loop import HOW, PROMPTS
from tiny_models import random_base

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.static_cache import StaticCache
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.errors import InputError
from ctcdraft.evaluation.output_dir import OutputDir

pytestmark = pytest.mark.slow  # half a minute per test


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    """Compiled code is reused for another base of the same shapes."""
    torch._dynamo.reset()


BUSH = TokenTree.from_lists(torch.tensor(7), [5, 6, 8, 9], [-1, 0, -1, 2])


def read(base, tree, length):
    if base.static_shapes is None:
        cache = base.new_cache(length + 8)
        base.read(torch.arange(length) % 200, cache)
        return base.read_tree(tree, cache)
    static = StaticCache(base.layers, length + 8, base.context_length, base.device)
    base.read(torch.arange(length) % 200, static.exact)
    static.adopt_prompt()
    return base.read_tree(tree, static)


@pytest.mark.parametrize(("kind", "aux_layers"), [("llama", ["last"]), ("qwen3", ["last", 1]), ("gpt2", ["last"])])
def test_compiled_gives_what_eager_gives(kind, aux_layers):
    """Hidden states, logits and whole texts, for two tree sizes and three buffer capacities."""
    from torch._dynamo.utils import counters  # seconds

    base, expected = random_base(kind, context=900), {}
    base.aux_layers = aux_layers
    trees = (TokenTree.only_root(torch.tensor(3)), BUSH)
    for length in (5, 300, 600):
        expected |= {(tree, length): read(base, tree, length) for tree in trees}
    responses = [generate(base, Autoregressive(base), prompt, HOW, base.stop_token_ids, 3).tokens for prompt in PROMPTS]
    base.static_shapes = StaticShapes(compiled=True)
    assert base.execution_mode == "compiled, fixed shapes"
    before = counters["stats"]["unique_graphs"]
    for (tree, length), truth in expected.items():
        output = read(base, tree, length)
        torch.testing.assert_close(output.logits_NV, truth.logits_NV, rtol=0, atol=1e-4)
        torch.testing.assert_close(output.states_ND, truth.states_ND, rtol=0, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == before + 2
    for prompt, truth in zip(PROMPTS, responses, strict=True):
        for drafter in (
            Autoregressive(base),
            random_drafter(base.vocabulary, 8),
            oracle_drafter(torch.cat([prompt, torch.tensor(truth)]), 5),
        ):
            assert generate(base, drafter, prompt, HOW, base.stop_token_ids, 3).tokens == truth


def test_an_evaluation_is_lossless_and_reports_how_it_read(tmp_path):
    base = random_base()
    base.static_shapes = StaticShapes(compiled=True)
    one = make_evaluation(make_setup(base))
    report = one.run(OutputDir(tmp_path, one.shard), False, warm_up_tokens=4, timing_questions=1, trace=NO_TRACE)
    assert [row["lossless"]["equal"] for row in report["rows"]] == [4, 4]
    assert report["environment"]["reads"] == "compiled, fixed shapes"


def test_without_a_compiler_it_is_one_sentence():
    from torch._inductor import config

    base = random_base()
    base.static_shapes = StaticShapes(compiled=True)
    # Code cached by another run needs no compiler. (Their own patch: pytest's would lose a value that has two names.)
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}),
        pytest.raises(InputError, match=r"cannot be compiled here .*C\+\+ compiler"),
    ):
        read(base, BUSH, 5)
