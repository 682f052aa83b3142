"""Every wrong word on the command line is answered by one sentence and status 1, and leaves nothing behind."""

from __future__ import annotations

import pytest
import transformers
from entry_parts import expect_error, train_args
from tiny_models import random_lm, tiny_tokenizer


@pytest.mark.parametrize(
    ("script", "words", "sentence"),
    [
        ("train.py", train_args("run=run"), "run holds a run already; continue it with resume=run"),
        ("train.py", train_args("drafter.framse=8"), "framse"),
        ("train.py", ["base=local", "base.path=nowhere"], "no base LLM at nowhere"),
        ("train.py", ["base=local", "base.path=nowhere", "plan_only=true"], "no base LLM at nowhere"),
        ("train.py", train_args("run=x", "base.path=paper"), "cannot load the base paper"),
        (
            "train.py",
            train_args("run=x", "base.path=paper", "plan_only=true", "plan.flops=0"),
            "plan.flops=0 is no speed",
        ),
        (
            "train.py",
            train_args("run=x", "base.path=paper", "plan_only=true", "drafter=draft_model", "drafter.path=base"),
            "drafter=draft_model brings weights of its own",
        ),
        (
            "data/prepare.py",
            ["base=vicuna_7b", "base.config=gone.json", "corpus.path=prompts.jsonl", "plan_only=true", "out=never"],
            "no base LLM at gone.json",
        ),
        ("train.py", train_args("run=x", "objective.labels=9"), "5 frames cannot emit 9 labels"),
        ("train.py", train_args("run=x", "objective.labels=0"), "objective.labels=0"),
        ("train.py", train_args("run=x", "drafter.frames=0"), "drafter.frames=0"),
        ("train.py", train_args("run=x", "objective=cross_entropy"), "drafter/tree=per_frame"),
        ("train.py", train_args("run=x", "objective=cross_entropy", "drafter/tree=per_frame"), "objective.labels=5"),
        ("train.py", train_args("run=x", "drafter=transducer", "objective=ctc"), "objective=transducer or prefix_tr"),
        ("train.py", ["base=local"], "base.path= is missing"),
        ("train.py", ["drafter/tree=colapse"], "did you mean drafter/tree/collapse"),
        ("evaluate.py", ["experiment=arena_real", "real.dat=x"], "did you mean real.data"),
        (
            "train.py",
            train_args("run=x", "objective=prefix_ctc", "objective.decay=2"),
            "objective.decay must be > 0 and <= 1, got 2",
        ),
        ("train.py", train_args("run=x", "drafter/correction=gru", "drafter.correction.rank=0"), "rank=0"),
        ("train.py", train_args("run=x", "base.taps=[last,2]"), "layers from 0 to 1"),
        (
            "train.py",
            train_args("run=x", "prepared=other", "base.context_length=100000"),
            "base.context_length must be an integer from 5 to 128, the context of base base, got 100000",
        ),
        ("train.py", train_args("run=x", "prepared=other", "base.context_length=4"), "from 5 to 128"),
        ("train.py", train_args("run=x", "prepared=five", "base.context_length=5"), "at most 5 tokens; raise base.con"),
        ("train.py", train_args("run=x", "trainer.max_length=9"), "within 9 tokens; raise trainer.max_length"),
        ("train.py", train_args("run=x", "trainer.max_length=12"), "of at most 12 tokens; raise trainer.max_length"),
        ("train.py", train_args("run=x", "trainer.anchors=0"), "trainer.anchors=0 is impossible"),
        ("train.py", train_args("run=x", "trainer.rows=99"), "trainer.rows=99 is more than the 22 answers"),
        ("train.py", train_args("run=x", "trainer.probe_every=0"), "trainer.probe_every=0 is impossible"),
        ("train.py", train_args("run=x", "decoding.temperature=-1"), "decoding.temperature=-1"),
        ("train.py", train_args("run=x", "trainer.probe_prompts=-3"), "trainer.probe_prompts=-3 is impossible"),
        ("train.py", train_args("run=x", "trainer.patience=0"), "trainer.patience=0 is impossible"),
        ("train.py", train_args("run=x", "trainer.accumulate=0"), "trainer.accumulate=0 is impossible"),
        ("train.py", train_args("run=x", "trainer.checkpoint_minutes=0"), "trainer.checkpoint_minutes=0 is impossible"),
        ("train.py", train_args("run=x", "trainer.learning_rate=0"), "trainer.learning_rate=0"),
        ("train.py", train_args("run=x", "trainer.learning_rate=nan"), "trainer.learning_rate=nan"),
        ("train.py", train_args("run=x", "drafter.frames=abc"), "drafter.frames=abc is impossible"),
        ("train.py", train_args("run=x", "decoding.nodes=abc"), "decoding.nodes=abc is impossible"),
        ("train.py", train_args("run=x", "objective=eagle"), "are for drafter=eagle"),
        ("train.py", train_args("run=x", "prepared=never", "objective.labels=9"), "5 frames cannot emit 9 labels"),
        (
            "train.py",
            train_args("run=x", "prepared=never", "plan_only=true", "objective=cross_entropy"),
            "tree=per_frame",
        ),
        ("train.py", train_args("run=x", "prepared=never", "drafter=eagle", "objective=ctc"), "has no blank"),
        ("train.py", train_args("run=x", "prepared=never", "decoding.nodes=0"), "decoding.nodes=0"),
        ("evaluate.py", ["checkpoint=run", "timing.questions=-1"], "timing.questions=-1 is impossible"),
        ("evaluate.py", ["checkpoint=run", "decoding.nodes=abc"], "decoding.nodes=abc"),
        ("evaluate.py", ["base=tiny", "contestants=[{prompt_lookup:{span:abc}}]"], "prompt_lookup.span=abc"),
        ("evaluate.py", ["base=tiny", "contestants=[{prompt_lookup:{span:0}}]"], "prompt_lookup.span=0"),
        (
            "evaluate.py",
            ["base=tiny", "contestants=[{cascade:{parts:{second:prompt_lookup,third:prompt_lookup}}}]"],
            "drafter cascade has no part third; it has first, second",
        ),
        ("train.py", train_args("run=x", "corpus.limit=5"), "24 prompts (now 5)"),
        ("train.py", train_args("run=x", "answers.temperature=1.0"), "answers.temperature=0.0 (now 1.0)"),
        ("train.py", train_args("run=x", "prepared=other", "corpus.path=gone.jsonl"), "gone.jsonl"),
        ("train.py", train_args("run=x", "prepared=other", "corpus.path=mistyped"), "mistyped is not there"),
        ("train.py", train_args("run=x", "prepared=other", "corpus.path=empty.jsonl"), "empty.jsonl"),
        ("train.py", ["resume=nowhere"], "nowhere holds no run"),
        ("train.py", train_args("run=x", "base.path=mamba"), "no attention heads"),
        ("evaluate.py", ["checkpoint=nowhere"], "contestant nowhere is neither a run directory"),
        ("evaluate.py", ["checkpoint=run", "benchmark.path=gone.jsonl"], "gone.jsonl"),
        ("evaluate.py", ["checkpoint=run", "base=local", "base.path=other_base"], "other_base (they differ in weights"),
        ("data/prepare.py", ["base=local", "base.path=base", "corpus.path=empty.jsonl", "out=o"], "empty.jsonl"),
    ],
)
def test_a_wrong_word_is_one_sentence(world, monkeypatch, capsys, script, words, sentence):
    monkeypatch.chdir(world)
    (world / "empty.jsonl").touch()
    if not (world / "mamba").exists():
        transformers.MambaConfig(num_hidden_layers=1).save_pretrained(world / "mamba")
        random_lm(seed=1, context=128).save_pretrained(world / "other_base")
        tiny_tokenizer().save_pretrained(world / "other_base")
        random_lm().config.save_pretrained(world / "paper")
    said = expect_error(monkeypatch, capsys, script, *words)
    assert sentence in said
    assert not (world / "x").exists()
    assert not (world / "never").exists()
