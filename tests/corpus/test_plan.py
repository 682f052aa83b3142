"""The plan of a corpus: its bounds hold for the corpus that is then made, and its clock is read as it should be."""

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
from ctcdraft.planning.workload import CorpusTokenCounts, count_prompt_tokens

PROMPTS = [
    Prompt(f"p{n}", "test", tuple(f"turn {turn}" + "!" * n for turn in range(1, 2 + n % 4)), None) for n in range(1, 12)
]
TURNS = sum(len(prompt.turns) for prompt in PROMPTS)
GREEDY = TransformersAnswers(3, 12, 0.0, 0, 1)


@dataclass(frozen=True)
class Elsewhere(ResponseGenerator):
    """Of somebody else's machine, which cannot be tried."""

    def start(self, base):
        raise AssertionError("nobody asks here")


ELSEWHERE = Elsewhere(3, 12, 0.0, 0, 1)
SHAPE = random_lm().config.to_dict()


@pytest.fixture(scope="module")
def base():
    return random_base()


@pytest.mark.parametrize("samples", [1, 2])
def test_prompts_are_what_was_planned_and_answers_never_more(base, tmp_path, samples):
    """One turn each: what a random base says in a history is other bytes when it is read again."""
    answers = TransformersAnswers(4, 12, float(samples - 1), 0, samples)
    corpus = Corpus.from_prompts(replace(prompt, turns=prompt.turns[:1]) for prompt in PROMPTS)
    said = planning_corpus.plan_corpus(base, corpus, answers, tmp_path, prepared.SINGLE_SHARD)
    made, work = prepared.prepare(base, corpus, answers, tmp_path, {}, planned=said)["counts"], said.work
    assert made["tokens"] - made["answer_tokens"] == work.asked
    assert 0 < made["answer_tokens"] <= work.said == len(PROMPTS) * samples * 12
    rows = prepared.read_corpus(tmp_path, base.fingerprint()).rows
    assert max(len(row.tokens_L) for row in rows) <= work.longest
    assert max(int((~row.mask_L).sum()) for row in rows) <= work.longest_prompt


def test_the_manifest_holds_what_is_planned_and_a_file_beside_it_what_was_measured(base, tmp_path):
    first, again = (
        planning_corpus.plan_corpus(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path, prepared.SINGLE_SHARD)
        for _ in range(2)
    )
    assert first.manifest_entry == again.manifest_entry
    assert first.measured["hours_at_most"] != again.measured["hours_at_most"]
    prepared.prepare(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path, {}, Shard(2, 2), first)
    prepared.prepare(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path, {}, Shard(1, 2), again)
    there = json.loads((tmp_path / "manifest.json").read_text())
    assert there["plan"] == first.manifest_entry | {"measured": "plan.json"}
    assert json.loads((tmp_path / "plan.json").read_text()) == first.measured
    finished = planning_corpus.plan_corpus(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path, prepared.SINGLE_SHARD)
    assert "time      none: every batch is there" in str(finished)
    assert finished.measured["trial"] is None
    part_files.delete_corpus(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_plan_says_how_much_and_where(base, tmp_path):
    said = str(planning_corpus.plan_corpus(base, Corpus.from_prompts(PROMPTS), GREEDY, tmp_path / "out", Shard(1, 4)))
    assert f"answers 11 prompts, {TURNS} turns" in said
    assert f"at most {TURNS * 12} of answers (12 each)" in said
    assert f"MB into {tmp_path / 'out'}" in said.replace("kB into", "MB into")
    assert "seconds for each of 4 shards (a trial of" in said
    assert not (tmp_path / "out").exists()


def test_stored_states_are_planned_for_every_precision_and_tap():
    size = planning_corpus.ModelStats.of(random_base())
    assert planning_corpus.hidden_state_bytes(10, size) == {"float32": 1280, "bfloat16": 640, "int8": 360}
    taps = planning_corpus.ModelStats.of(prepared_base(taps=["last", 1]))
    assert planning_corpus.hidden_state_bytes(10, taps) == {"float32": 2560, "bfloat16": 1280, "int8": 680}


def prepared_base(taps):
    return meta_base_if_absent("owner/name", "float32", "cpu", taps=taps, config=SHAPE).base


def test_memory_is_the_weights_alone_where_others_answer(base):
    work = CorpusTokenCounts.from_prompts(PROMPTS, GREEDY, base.tokenizer, base.context_length)
    size = planning_corpus.ModelStats.of(base)
    here = planning_corpus.memory_parts(work, size, GREEDY)
    assert here["cache"] == 3 * 256 * size.kv_bytes * 11 / 8
    assert here["logits"] == 3 * base.vocabulary * 4
    assert planning_corpus.memory_parts(work, size, ELSEWHERE) == {"weights": here["weights"]}
    assert planning_corpus.describe_time(
        None, ELSEWHERE.benchmark_speed(base, [[1]]), 1.0, prepared.SINGLE_SHARD
    ).startswith("not known")


def test_histories_are_counted_and_cut_where_prompts_are():
    assert count_prompt_tokens([3, 4], most=5, limit=10) == (3 + 7, 3)
    assert count_prompt_tokens([3, 4, 2], most=5, limit=100) == (3 + 7 + 9, 5 + 10)
    assert count_prompt_tokens([30], most=5, limit=10) == (10, 0)


def test_on_paper_the_work_is_the_same_and_tokens_are_characters_without_a_tokenizer(base):
    sheet = meta_base_if_absent("owner/name", "float32", "cpu", config=SHAPE)
    said = planning_corpus.plan_corpus_dry_run(
        sheet, Corpus.from_prompts(PROMPTS), GREEDY, HardwareSpec(None, None), prepared.SINGLE_SHARD
    )
    assert said.work.asked == sum(count_prompt_tokens([-(-len(t) // 4) for t in p.turns], 12, 192)[0] for p in PROMPTS)
    assert said.work.said == TURNS * 12
    assert "ON PAPER: name is not loaded" in str(said)
    assert "time      not known without a rate" in str(said)
    assert said.measured["hours_at_most"] is None
    reading, saying = (said.manifest_entry["flops_at_most"][key] for key in ("prompts", "answers"))
    timed = planning_corpus.plan_corpus_dry_run(
        sheet, Corpus.from_prompts(PROMPTS), GREEDY, HardwareSpec(1e6, None), prepared.SINGLE_SHARD
    )
    assert timed.measured["hours_at_most"] * 3600 == pytest.approx((reading + saying) / 1e6)
    shared = planning_corpus.plan_corpus_dry_run(
        sheet, Corpus.from_prompts(PROMPTS), GREEDY, HardwareSpec(1e6, None), Shard(1, 4)
    )
    assert shared.measured["hours_at_most"] * 4 == pytest.approx(timed.measured["hours_at_most"])
    assert "for each of 4 shards at 1e+06 operations a second" in str(shared)
    sheet.base.tokenizer = base.tokenizer
    whole = planning_corpus.plan_corpus_dry_run(
        sheet, Corpus.from_prompts(PROMPTS), GREEDY, HardwareSpec(None, None), prepared.SINGLE_SHARD
    )
    assert whole.work == CorpusTokenCounts.from_prompts(PROMPTS, GREEDY, base.tokenizer, base.context_length)
