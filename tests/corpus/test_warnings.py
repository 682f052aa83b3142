"""Warnings about a corpus: a base model without chat template, very short responses, and a prompt preview."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from entry_parts import run_script, train_args
from tiny_models import random_base, tiny_tokenizer

from ctcdraft.corpus import chat_template, prepared
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.hardware import HardwareSpec
from ctcdraft.models.meta import meta_base_if_absent
from ctcdraft.planning import corpus

GREEDY = TransformersAnswers(3, 12, 0.0, 0, 1)
CORPUS = Corpus.from_prompts([Prompt("p1", "test", ("Say it.", "And again."), None)])
RAW = "HAS NO CHAT TEMPLATE"


def raw_base():
    base = random_base()
    base.tokenizer.chat_template = None
    return base


def test_a_plan_shows_the_first_prompt_as_the_base_reads_it(tmp_path):
    output = corpus.plan_corpus(random_base(), CORPUS, GREEDY, tmp_path, prepared.SINGLE_SHARD).lines
    assert output[-1] == "prompt    '<bos><|user|>Say it.<|end|><|assistant|>'"
    assert not [line for line in output if RAW in line]


def test_a_plan_warns_of_raw_prompts_and_names_the_ways_out(tmp_path):
    base = raw_base()
    output = corpus.plan_corpus(base, CORPUS, GREEDY, tmp_path, prepared.SINGLE_SHARD).lines
    assert output[-5] == "prompt    'Say it.'"
    assert all(line.startswith("WARNING   ") for line in output[-4:])
    assert "random-llama HAS NO CHAT TEMPLATE" in output[-4]
    warned = " ".join(output[-4:])
    for way in ("base.chat_template_file=vicuna_v1_1, llama2_chat, chatml or FILE", "instruct version", "show=3"):
        assert way in warned
    manifest = prepared.prepare(base, CORPUS, GREEDY, tmp_path, {})
    assert RAW in chat_template.corpus_warnings(manifest)[0]
    done = str(corpus.plan_corpus(base, CORPUS, GREEDY, tmp_path, prepared.SINGLE_SHARD))
    assert RAW not in done  # nothing is left to generate; training warns by `corpus_warnings`


def test_a_dry_run_warns_where_a_tokenizer_is_available():
    dry_run = meta_base_if_absent("owner/name", "float32", "cpu", config=random_base().lm.config.to_dict())
    dry_run.base.tokenizer = tiny_tokenizer()
    output = corpus.plan_corpus_dry_run(dry_run, CORPUS, GREEDY, HardwareSpec(None, None), prepared.SINGLE_SHARD).lines
    assert output[-1] == "prompt    '<bos><|user|>Say it.<|end|><|assistant|>'"
    dry_run.base.tokenizer.chat_template = None
    assert RAW in str(
        corpus.plan_corpus_dry_run(dry_run, CORPUS, GREEDY, HardwareSpec(None, None), prepared.SINGLE_SHARD)
    )


def test_a_long_prompt_is_shown_by_both_ends():
    tokenizer = tiny_tokenizer()
    text = "a" * 150 + "\n" + "b" * 200 + "z" * 79
    (shown,) = chat_template.prompt_preview_and_warnings("b", tokenizer, tokenizer(text)["input_ids"])
    assert shown == f"prompt    '{'a' * 150}\\n{'b' * 9}' ... 'b{'z' * 79}' (430 characters)"
    short = "a" * 240
    (shown,) = chat_template.prompt_preview_and_warnings("b", tokenizer, tokenizer(short)["input_ids"])
    assert shown == f"prompt    '{short}'"


@pytest.mark.parametrize(
    ("tokens", "ended", "doubtful"), [(2, 1.0, True), (79, 0.6, True), (80, 1.0, False), (79, 0.5, False)]
)
def test_very_short_responses_are_warned_of_unless_truncated(tokens, ended, doubtful):
    counts = {"answers": 10, "answer_tokens": tokens, "ended_share": ended}
    warned = chat_template.corpus_warnings({"base": {"base": "b", "chat_template": "c2ab"}, "counts": counts})
    assert len(warned) == doubtful
    if doubtful:
        assert f"ANSWERS HAVE {tokens / 10:.1f} TOKENS on average" in warned[0]
        assert f"{ended:.1%} of them ended by themselves" in warned[0]


def test_both_entry_points_warn_before_generation_and_before_training(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    Path("raw").mkdir()
    for file in Path("base").iterdir():
        if file.name != "chat_template.jinja":
            (Path("raw") / file.name).write_bytes(file.read_bytes())
    tokenizer_config = json.loads(Path("raw/tokenizer_config.json").read_text())
    tokenizer_config.pop("chat_template", None)
    Path("raw/tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    arguments = ["base=local", "base.path=raw", "corpus.path=prompts.jsonl", "answers.max_new_tokens=20"]
    run_script(monkeypatch, "data/prepare.py", *arguments, "out=asked_raw")
    output = capsys.readouterr().out
    before, after = output.split("24 answers to 24 prompts")
    assert (before.count(f"raw {RAW}"), after.count(f"raw {RAW}")) == (1, 1)
    assert "prompt    'say 0'" in before
    more = ["trainer.steps=1", "run=learned_raw", "prepared=asked_raw"]
    run_script(monkeypatch, "train.py", *train_args(*arguments, *more))
    assert capsys.readouterr().out.count(f"raw {RAW}") == 1
    run_script(monkeypatch, "data/prepare.py", *arguments, "out=asked_chatml", "base.chat_template_file=chatml")
    output = capsys.readouterr().out
    assert RAW not in output
    assert r"prompt    '<|im_start|>user\nsay 0<|im_end|>\n<|im_start|>assistant\n'" in output
