"""The plan of a corpus: its bounds hold for the prepared corpus, and its measurements are kept apart."""

import json
from dataclasses import dataclass, replace

import pytest
from tiny_models import random_base, random_lm

from ctcdraft.corpus import part_files, prepared
from ctcdraft.corpus.generation.requests import ResponseGenerator
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.distributed import Shard
from ctcdraft.hardware import HardwareSpec
from ctcdraft.models.meta import meta_base_if_absent
from ctcdraft.planning import corpus as planning_corpus
from ctcdraft.planning.workload import CorpusTokenCounts, count_prompt_tokens, count_rows, least_row_tokens

PROMPTS = [
    Prompt(f"p{n}", "test", tuple(f"turn {turn}" + "!" * n for turn in range(1, 2 + n % 4)), None) for n in range(1, 12)
]
TURNS = sum(len(prompt.turns) for prompt in PROMPTS)
GREEDY = TransformersAnswers(3, 12, 0.0, 0, 1)


@dataclass(frozen=True)
class Elsewhere(ResponseGenerator):
    """An engine on another machine, whose speed cannot be measured."""

    def start(self, base):
        raise AssertionError("nothing is generated here")


ELSEWHERE = Elsewhere(3, 12, 0.0, 0, 1)
SHAPE = random_lm().config.to_dict()


@pytest.fixture(scope="module")
def base():
    return random_base()


@pytest.mark.parametrize("samples", [1, 2])
def test_prompt_tokens_are_as_planned_and_responses_at_most(base, tmp_path, samples):
    """One turn each: the bytes of a random base model change when its text is encoded again in a history."""
    answers = TransformersAnswers(4, 12, float(samples - 1), 0, samples)
    corpus = Corpus.from_prompts(replace(prompt, turns=prompt.turns[:1]) for prompt in PROMPTS)
    plan = planning_corpus.plan_corpus(base, corpus, answers, tmp_path, prepared.SINGLE_SHARD)
    counts, work = prepared.prepare(base, corpus, answers, tmp_path, {}, planned=plan)["counts"], plan.work
    assert counts["tokens"] - counts["answer_tokens"] == work.user_tokens
    assert 0 < counts["answer_tokens"] <= work.response_tokens == len(PROMPTS) * samples * 12
    rows = prepared.read_corpus(tmp_path, base.fingerprint()).rows
    assert max(len(row.tokens_L) for row in rows) <= work.longest
    assert max(int((~row.mask_L).sum()) for row in rows) <= work.longest_prompt


def test_the_manifest_holds_the_plan_and_plan_json_the_measurements(base, tmp_path):
    first, again = (
        planning_corpus.plan_corpus(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path, prepared.SINGLE_SHARD)
        for _ in range(2)
    )
    assert first.manifest_entry == again.manifest_entry
    assert first.measured["hours_at_most"] != again.measured["hours_at_most"]
    prepared.prepare(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path, {}, Shard(2, 2), first)
    prepared.prepare(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path, {}, Shard(1, 2), again)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["plan"] == first.manifest_entry | {"measured": "plan.json"}
    assert json.loads((tmp_path / "plan.json").read_text()) == first.measured
    finished = planning_corpus.plan_corpus(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path, prepared.SINGLE_SHARD)
    assert "time      none: every batch is finished" in str(finished)
    assert finished.measured["trial"] is None
    part_files.delete_corpus(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_plan_prints_amounts_and_folder(base, tmp_path):
    plan = str(planning_corpus.plan_corpus(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path / "out", Shard(1, 4)))
    assert f"answers 11 prompts, {TURNS} turns" in plan
    assert f"at most {TURNS * 12} of responses (12 each)" in plan
    assert f"MB into {tmp_path / 'out'}" in plan.replace("kB into", "MB into")
    assert "seconds, shared by 4 processes (a trial of" in plan
    assert not (tmp_path / "out").exists()


def test_stored_hidden_states_are_planned_for_every_precision_and_layer():
    size = planning_corpus.ModelStats.of(random_base())
    assert planning_corpus.hidden_state_bytes(10, size) == {"float32": 1280, "bfloat16": 640, "int8": 360}
    aux_layers = planning_corpus.ModelStats.of(prepared_base(aux_layers=["last", 1]))
    assert planning_corpus.hidden_state_bytes(10, aux_layers) == {"float32": 2560, "bfloat16": 1280, "int8": 680}


def prepared_base(aux_layers):
    return meta_base_if_absent("owner/name", "float32", "cpu", aux_layers=aux_layers, config=SHAPE).base


def test_memory_is_the_weights_alone_with_another_engine(base):
    work = CorpusTokenCounts.from_prompts(PROMPTS, GREEDY, base)
    size = planning_corpus.ModelStats.of(base)
    here = planning_corpus.memory_parts(work, size, GREEDY)
    assert here["cache"] == 3 * 256 * size.kv_bytes * 11 / 8
    assert here["logits"] == 3 * base.vocabulary * 4
    assert planning_corpus.memory_parts(work, size, ELSEWHERE) == {"weights": here["weights"]}
    assert planning_corpus.describe_time(
        None, ELSEWHERE.benchmark_speed(base, [[1]]), 1.0, prepared.SINGLE_SHARD
    ).startswith("not known")


def test_histories_are_counted_and_cut_to_the_prompt_limit():
    assert count_prompt_tokens([3, 4], most=5, limit=10) == (3 + 7, 3)
    assert count_prompt_tokens([3, 4, 2], most=5, limit=100) == (3 + 7 + 9, 5 + 10)
    assert count_prompt_tokens([30], most=5, limit=10) == (10, 0)


def test_rows_are_conversations_as_long_as_prompts_keep_what_came_before():
    assert count_rows([3, 4], most=5, limit=20, kept=20) == (1, 3 + 5 + 4 + 5)
    assert count_rows([3, 4], most=5, limit=20, kept=0) == (2, 3 + 5 + 3 + 5 + 4 + 5)
    # The second prompt of 12 tokens is cut to 10, so it and the third begin rows of their own.
    assert count_rows([3, 4, 2], most=5, limit=10, kept=10) == (3, 3 + 5 + 10 + 5 + 10 + 5)
    assert count_rows([30], most=5, limit=10, kept=10) == (1, 15)


def test_rows_are_planned_by_what_the_template_keeps(base, tmp_path):
    work = CorpusTokenCounts.from_prompts(PROMPTS, GREEDY, base)
    assert (work.rows, work.turns) == (len(PROMPTS), TURNS)
    assert work.row_tokens < work.tokens_by_turn
    counts = prepared.prepare(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path, {})["counts"]
    assert work.rows < counts["rows"] <= TURNS  # its bytes change when its text is encoded again
    raw = random_base()
    raw.tokenizer.chat_template = None  # no end token in a history
    work = CorpusTokenCounts.from_prompts(PROMPTS, GREEDY, raw)
    assert (work.rows, work.row_tokens) == (TURNS, work.tokens_by_turn)


def test_the_tokens_of_rows_are_at_least_those_of_the_prompts(base):
    """Each turn once where it joins the row before it; each row as far as training reads it."""
    dry_run = meta_base_if_absent("owner/name", "float32", "cpu", config=SHAPE).base  # tokens as characters / 4
    prompts = [Prompt("a", "test", ("x" * 40, "x" * 80), None), Prompt("b", "test", ("x" * 20,), None)]
    assert least_row_tokens(prompts, dry_run, 100) == 10 + 20 + 5
    assert least_row_tokens(prompts, dry_run, 12) == 12 + 5
    assert least_row_tokens(PROMPTS, base, 256) < CorpusTokenCounts.from_prompts(PROMPTS, GREEDY, base).row_tokens
    raw = random_base()
    raw.tokenizer.chat_template = None
    turns = [len(raw.tokenizer(text)["input_ids"]) for text in prompts[0].turns]
    assert least_row_tokens(prompts[:1], raw, 256) == turns[0] + sum(turns)


def test_a_dry_run_counts_the_same_and_estimates_tokens_without_a_tokenizer(base):
    dry_run = meta_base_if_absent("owner/name", "float32", "cpu", config=SHAPE)
    plan = planning_corpus.plan_corpus_dry_run(
        dry_run, Corpus.from_prompts(PROMPTS), GREEDY, HardwareSpec(None, None), prepared.SINGLE_SHARD
    )
    counts = (count_prompt_tokens([-(-len(turn) // 4) for turn in one.turns], 12, 192) for one in PROMPTS)
    assert plan.work.user_tokens == sum(user for user, _ in counts)
    assert plan.work.response_tokens == TURNS * 12
    assert "DRY RUN: name is not loaded" in str(plan)
    assert "time      not known without a rate" in str(plan)
    assert plan.measured["hours_at_most"] is None
    prefill, decoding = (plan.manifest_entry["flops_at_most"][key] for key in ("prompts", "answers"))
    timed = planning_corpus.plan_corpus_dry_run(
        dry_run, Corpus.from_prompts(PROMPTS), GREEDY, HardwareSpec(1e6, None), prepared.SINGLE_SHARD
    )
    assert timed.measured["hours_at_most"] * 3600 == pytest.approx((prefill + decoding) / 1e6)
    shared = planning_corpus.plan_corpus_dry_run(
        dry_run, Corpus.from_prompts(PROMPTS), GREEDY, HardwareSpec(1e6, None), Shard(1, 4)
    )
    assert shared.measured["hours_at_most"] * 4 == pytest.approx(timed.measured["hours_at_most"])
    assert ", shared by 4 processes at 1e+06 FLOP/s" in str(shared)
    dry_run.base.tokenizer = base.tokenizer
    whole = planning_corpus.plan_corpus_dry_run(
        dry_run, Corpus.from_prompts(PROMPTS), GREEDY, HardwareSpec(None, None), prepared.SINGLE_SHARD
    )
    assert whole.work == CorpusTokenCounts.from_prompts(PROMPTS, GREEDY, base)
