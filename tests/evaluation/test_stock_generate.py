"""Rows of transformers' `generate`: equal tokens, consistent counts, and the same drafts as ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sequential_parts import saved_lm
from small_evaluations import Corrupt, evaluate_to, make_evaluation, make_setup
from test_lossless import PROMPTS, settings
from tiny_models import random_base
from transformers import GenerationConfig

from ctcdraft.config.contestants import build_contestant, resolve
from ctcdraft.decoding import loop
from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.prompt_lookup import PromptLookup, find_continuation
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import StockGenerate, generate_answer
from ctcdraft.evaluation.losslessness import other_kernels_null
from ctcdraft.report.markdown import describe_divergence

REPEATS = torch.tensor([0, 7, 9, 30, 31, 32, 40, 7, 9, 30])
LOOKUP = {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 3}


@pytest.fixture(params=["llama", "gpt2"])
def base(request):
    return random_base(request.param, context=128)


def rows(base, folder):
    """Yield rows of transformers' `generate` with the drafter of ours that works alike."""
    path = saved_lm(folder / "other", seed=7)
    twin = saved_lm(folder / "twin", "llama", seed=0) if base.name == "random-llama" else path
    yield StockGenerate(base, {}, None, None), Autoregressive(base)
    yield StockGenerate(base, LOOKUP, None, None), PromptLookup(base, 3, 6)
    yield StockGenerate(base, {}, path, 5), DraftModel(base, path, None, 5, DynamicTree(1, 1)).eval()
    yield StockGenerate(base, {}, twin, 5), DraftModel(base, twin, None, 5, DynamicTree(1, 1)).eval()
    yield StockGenerate(base, {}, twin, 5), DraftModel(base, twin, None, 5, DynamicTree(4, 4)).eval()


@pytest.mark.parametrize("stops", [False, True])
def test_stock_generate_equals_our_loop_token_for_token(base, stops, tmp_path):
    decoding = settings(tokens=40)
    for prompt in (*PROMPTS[:2], REPEATS):
        truth = loop.generate(base, Autoregressive(base), prompt, decoding, frozenset(), 0).tokens
        ends = frozenset([truth[11]]) if stops else frozenset()
        truth = loop.generate(base, Autoregressive(base), prompt, decoding, ends, 0)
        for stock, ours in rows(base, tmp_path):
            theirs = generate_answer(base, stock, prompt, decoding, ends, 0)
            result = generate_answer(base, ours, prompt, decoding, ends, 0)
            assert theirs.tokens == result.tokens == truth.tokens
            assert theirs.ended == result.ended == stops


def test_forward_passes_of_stock_generate_are_counted(tmp_path):
    base = random_base(context=128)
    decoding = settings(tokens=41)
    plain, lookup, _, twin, _ = (stock for stock, _ in rows(base, tmp_path))
    generated = generate_answer(base, plain, REPEATS, decoding, frozenset(), 0)
    assert [step.committed for step in generated.passes] == [1] * 40  # the first token comes from the prefill
    assert {step.nodes for step in generated.passes} == {1}
    generated = generate_answer(base, twin, REPEATS, decoding, frozenset(), 0)
    assert [step.committed for step in generated.passes][:5] == [6] * 5  # 5 accepted draft tokens and the bonus token
    assert all(step.nodes == 6 and step.drafted == 5 and not step.rejected_child for step in generated.passes[:5])
    generated = generate_answer(base, lookup, REPEATS, decoding, frozenset(), 0)
    assert sum(step.committed for step in generated.passes) <= 40
    assert generated.seconds_prefill > 0
    assert generated.seconds_decode > 0


def test_a_draft_model_and_an_assistant_take_the_same_steps(tmp_path):
    """Both draft the same chain of five; after the prefill of theirs both are in the same state."""
    base = random_base(context=128)
    path = saved_lm(tmp_path / "near", seed=0)
    lm = random_base(seed=0, context=128).lm
    torch.manual_seed(1)
    for value in lm.parameters():
        value.data += 0.02 * torch.randn_like(value)  # near enough that some draft tokens are accepted
    lm.save_pretrained(path)
    ours = DraftModel(base, path, None, 5, DynamicTree(1, 1)).eval()
    theirs = StockGenerate(base, {}, path, 5)
    decoding = settings(tokens=60)
    generated = generate_answer(base, theirs, REPEATS, decoding, frozenset(), 0)
    first = len(generated.tokens) - sum(step.committed for step in generated.passes)
    prompt = torch.cat([REPEATS, torch.tensor(generated.tokens[: first - 1], dtype=torch.int64)])
    result = generate_answer(base, ours, prompt, replace(decoding, max_new_tokens=60 - first + 1), frozenset(), 0)
    assert [step.committed for step in result.passes] == [step.committed for step in generated.passes]
    assert 1 < sum(step.accepted for step in result.passes) < sum(step.drafted for step in result.passes)


def test_both_prompt_lookups_agree_on_a_single_match():
    """Theirs takes the first of several matches, ours the latest; with one match they agree."""
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    theirs = PromptLookupCandidateGenerator(num_output_tokens=6, max_matching_ngram_size=3, max_length=999)
    rng, agreed = torch.Generator().manual_seed(0), 0
    for _ in range(50):
        text = torch.randperm(60, generator=rng)[:30]
        text = torch.cat([text, text[10:12]])  # one match of two tokens
        draft = theirs.get_candidates(text[None])[0][0, len(text) :]
        assert torch.equal(draft, find_continuation(text, 3)[0][:6])
        agreed += 1
    assert agreed == 50
    twice = torch.tensor([1, 2, 3, 8, 1, 2, 4, 9, 1, 2])
    assert theirs.get_candidates(twice[None])[0][0, len(twice) :].tolist()[:2] == [3, 8]
    assert find_continuation(twice, 3)[0][:2].tolist() == [4, 9]


def test_unsupported_settings_are_one_sentence(tmp_path):
    base = random_base(context=128)
    with pytest.raises(InputError, match="must be 0 for rows of transformers' generate"):
        generate_answer(base, StockGenerate(base, {}, None, None), REPEATS, settings(1.0), frozenset(), 0)
    with pytest.raises(InputError, match="assistant must be"):
        StockGenerate(base, {}, None, 5)


def test_a_draft_model_drafts_nothing_near_the_end_of_its_context(tmp_path):
    base = random_base(context=128)
    short = DraftModel(base, saved_lm(tmp_path / "short", context=24), None, 4, DynamicTree(3, 3)).eval()
    decoding = settings(tokens=40)
    truth = loop.generate(base, Autoregressive(base), REPEATS, decoding, frozenset(), 0).tokens
    result = generate_answer(base, short, REPEATS, decoding, frozenset(), 0)
    assert result.tokens == truth
    depths = [step.drafted for step in result.passes]
    assert depths[0] > 0
    assert depths[-1] == 0
    with torch.inference_mode():
        for size, depth in ((21, 4), (22, 0), (24, 0)):
            tree, _ = short.draft(Context(torch.arange(size) + 9, torch.zeros(0, 32), 40, 12), None, torch.Generator())
            assert len(tree) == 1 if depth == 0 else int(tree.depths_N.max()) >= 1, size


def test_a_report_holds_a_stock_row_and_its_losslessness_check(tmp_path):
    setup = make_setup()
    setup.contestants["transformers_prompt_lookup"] = StockGenerate(setup.base, LOOKUP, None, None)
    report = evaluate_to(tmp_path, make_evaluation(setup))
    row = report["rows"][-1]
    assert row["drafter"] == "transformers_prompt_lookup"
    assert row["lossless"]["equal"] == row["prompts"] == 4
    assert row["tau"] >= 1
    assert row["tokens_per_second"] > 0
    assert row["c"] is row["v"] is row["o"] is row["time"]["read"] is None
    assert report["rows"][1]["c"] is not None


def test_the_generation_config_of_a_model_is_ignored(tmp_path):
    """A repetition penalty in the generation config of base or assistant would change the tokens."""
    base = random_base(context=128)
    decoding = settings(tokens=40)
    truth = loop.generate(base, Autoregressive(base), REPEATS, decoding, frozenset(), 0).tokens
    base.lm.generation_config.repetition_penalty = 1.8
    path = saved_lm(tmp_path / "twin", "llama", seed=0)
    config = GenerationConfig.from_pretrained(path)
    config.repetition_penalty = 1.8
    config.save_pretrained(path)
    assisted = StockGenerate(base, {}, path, 5)
    for stock in (StockGenerate(base, {}, None, None), assisted):
        assert generate_answer(base, stock, REPEATS, decoding, frozenset(), 0).tokens == truth
    assert [step.committed for step in generate_answer(base, assisted, REPEATS, decoding, frozenset(), 0).passes][
        :3
    ] == [6] * 3
    assert base.lm.generation_config.repetition_penalty == 1.8  # the base model is unchanged


def test_parameters_of_the_assistant_are_counted(tmp_path):
    base = random_base(context=128)
    path = saved_lm(tmp_path / "small")
    alone, assisted = (
        build_contestant(resolve({name: values}), base)
        for name, values in (("transformers_greedy", {}), ("transformers_assisted", {"assistant": path}))
    )
    assert alone.parameters == 0
    assert assisted.parameters == sum(weight.numel() for weight in assisted.drafter.assistant.parameters()) > 0


def test_other_kernels_are_the_null_in_half_precision(tmp_path):
    """It must run another attention implementation, and leave the base model unchanged."""
    base = random_base().to(torch.bfloat16)
    setup = make_setup(base, corrupt=Corrupt())
    setup.contestants["transformers_eager"] = other = StockGenerate(base, {}, None, None, "eager")
    heads = []
    handle = base.lm.register_forward_pre_hook(lambda lm, _: heads.append(lm.config._attn_implementation))
    generate_answer(base, other, REPEATS, settings(tokens=3), frozenset(), 0)
    handle.remove()
    assert set(heads) == {"eager"}
    assert base.lm.config._attn_implementation == "sdpa"
    rows = evaluate_to(tmp_path, make_evaluation(setup))["rows"]
    lossless = {row["drafter"]: row["lossless"] for row in rows}
    theirs = lossless["transformers_eager"]
    expected = {
        "drafter": "transformers_eager",
        "different": theirs["prompts"] - theirs["equal"],
        "margins": theirs["first_divergence_margins"],
    }
    assert lossless["prompt_lookup"]["null"] == lossless["corrupt"]["null"] == expected
    assert lossless["autoregressive"]["null"] is theirs["null"] is None


def test_a_statement_names_the_null():
    """A row that cannot be decided names the null; in float32, and for the null itself, there is none."""
    close = {"wrong": 0, "undecided": 2, "explained": 0}
    lossless = {"owed": close, "owes": "words", "prompts": 9, "first_divergence_margins": [0.1, 0.02], "null": None}
    row = {"drafter": "ctc", "dtype": "bfloat16", "other_kernels": False, "lossless": lossless}
    other = {**row, "drafter": "transformers_eager", "other_kernels": True}
    assert describe_divergence(row).startswith("ctc differs on 2 of 9 questions (margins 2.0e-02 to 1.0e-01)")
    assert "add transformers_eager to contestants=" in describe_divergence(row)
    assert "add transformers_eager" not in describe_divergence(other)
    lossless["null"] = other_kernels_null([row, other], row)
    assert describe_divergence(row).endswith(
        "autoregression by other kernels (transformers_eager) differs from itself on 2"
    )
    assert other_kernels_null([row, other], other) is other_kernels_null([row], row) is None
    assert other_kernels_null([{**row, "dtype": "float32"}, other], {**row, "dtype": "float32"}) is None


def test_the_attention_of_the_base_is_no_other_kernel():
    base = random_base()
    assert not StockGenerate(base, {}, None, None, "sdpa").uses_other_kernels
    assert not StockGenerate(base, LOOKUP, None, None, "eager").uses_other_kernels
    with pytest.raises(InputError, match="attention=triangles is not available"):
        StockGenerate(base, {}, None, None, "triangles")
