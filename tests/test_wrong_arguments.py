"""Every wrong command line ends with one sentence and exit status 1, and creates no files."""

from __future__ import annotations

import pytest
import transformers
from entry_parts import expect_error, train_args
from tiny_models import random_lm, tiny_tokenizer

NO_SIZE = "decoding.nodes must be an integer >= 1 (in evaluate.py also auto or adaptive), got abc"


@pytest.mark.parametrize(
    ("script", "arguments", "sentence"),
    [
        ("train.py", train_args("run=run"), "run holds a run already; continue it with resume=run"),
        ("train.py", train_args("drafter.framse=8"), "framse"),
        ("train.py", ["base=local", "base.path=nowhere"], "no base LLM at nowhere"),
        ("train.py", ["base=local", "base.path=nowhere", "plan_only=true"], "no base LLM at nowhere"),
        ("train.py", train_args("run=x", "base.path=paper"), "cannot load the base paper"),
        (
            "train.py",
            train_args("run=x", "base.path=paper", "plan_only=true", "plan.flops=0"),
            "plan.flops must be a number > 0 or null, got 0",
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
        ("train.py", train_args("run=x", "objective.labels=0"), "objective.labels must be an integer >= 1, got 0"),
        ("train.py", train_args("run=x", "drafter.frames=0"), "drafter.frames must be an integer >= 1, got 0"),
        ("train.py", train_args("run=x", "objective=cross_entropy"), "drafter/tree=per_frame"),
        ("train.py", train_args("run=x", "objective=cross_entropy", "drafter/tree=per_frame"), "objective.labels=5"),
        ("train.py", train_args("run=x", "drafter=transducer", "objective=ctc"), "objective=transducer or prefix_tr"),
        ("train.py", ["base=local"], "base.path= is missing"),
        ("train.py", ["drafter/tree=colapse"], "did you mean drafter/tree/collapse"),
        (
            "train.py",
            train_args("run=x", "objective=prefix_ctc", "objective.decay=2"),
            "objective.decay must be a number > 0 and <= 1",
        ),
        (
            "train.py",
            train_args("run=x", "drafter/correction=gru", "drafter.correction.rank=0"),
            "rank must be an integer >= 1, got 0",
        ),
        ("train.py", train_args("run=x", "base.aux_layers=[last,2]"), "layers from 0 to 1"),
        ("train.py", train_args("run=x", "base.aux_layers=4"), 'base.aux_layers must be "last" and then'),
        (
            "train.py",
            train_args("run=x", "objective=distill", "drafter/tree=per_frame", "objective.distance.path=kl"),
            "Error loading 'kl'; check the name of the function in path=",
        ),
        (
            "train.py",
            train_args("run=x", "prepared=never", "logger=wandb", "logger.wandb.mode=onlin"),
            "logger.wandb.mode must be null or one of online, offline, shared, disabled, got onlin",
        ),
        (
            "train.py",
            train_args("run=x", "prepared=other", "base.context_length=100000"),
            "base.context_length must be an integer from 5 to 128, the context of base base, got 100000",
        ),
        ("train.py", train_args("run=x", "prepared=other", "base.context_length=4"), "from 5 to 128"),
        ("train.py", train_args("run=x", "prepared=five", "base.context_length=5"), "at most 5 tokens; raise base.con"),
        ("train.py", train_args("run=x", "trainer.max_length=9"), "within 9 tokens; raise trainer.max_length"),
        ("train.py", train_args("run=x", "trainer.max_length=12"), "in at most 12 tokens; raise trainer.max_length"),
        (
            "train.py",
            train_args("run=x", "trainer.anchors_per_sequence=0"),
            "trainer.anchors_per_sequence must be an integer >= 1 or null, got 0",
        ),
        (
            "train.py",
            train_args("run=x", "trainer.batch_size=99"),
            "trainer.batch_size=99 is more than the 22 rows",
        ),
        (
            "train.py",
            train_args("run=x", "trainer.probe_every=0"),
            "trainer.probe_every must be an integer >= 1, got 0",
        ),
        (
            "train.py",
            train_args("run=x", "decoding.temperature=-1"),
            "decoding.temperature must be a number >= 0, got -1",
        ),
        (
            "train.py",
            train_args("run=x", "trainer.probe_prompts=-3"),
            "trainer.probe_prompts must be an integer >= 0, got -3",
        ),
        (
            "train.py",
            train_args("run=x", "trainer.max_nonfinite_steps=0"),
            "trainer.max_nonfinite_steps must be an integer >= 1, got 0",
        ),
        (
            "train.py",
            train_args("run=x", "trainer.gradient_accumulation_steps=0"),
            "trainer.gradient_accumulation_steps must be an integer >= 1, got 0",
        ),
        (
            "train.py",
            train_args("run=x", "trainer.checkpoint_minutes=0"),
            "trainer.checkpoint_minutes must be a number > 0 or null, got 0",
        ),
        (
            "train.py",
            train_args("run=x", "trainer.learning_rate=0"),
            "trainer.learning_rate must be a number > 0, got 0",
        ),
        (
            "train.py",
            train_args("run=x", "trainer.learning_rate=nan"),
            "trainer.learning_rate must be a number > 0, got nan",
        ),
        ("train.py", train_args("run=x", "drafter.frames=abc"), "drafter.frames must be an integer >= 1, got abc"),
        ("train.py", train_args("run=x", "decoding.nodes=abc"), NO_SIZE),
        ("train.py", train_args("run=x", "objective=eagle"), "are for drafter=eagle"),
        ("train.py", train_args("run=x", "prepared=never", "objective.labels=9"), "5 frames cannot emit 9 labels"),
        (
            "train.py",
            train_args("run=x", "prepared=never", "plan_only=true", "objective=cross_entropy"),
            "tree=per_frame",
        ),
        ("train.py", train_args("run=x", "prepared=never", "drafter=eagle", "objective=ctc"), "have no blank"),
        (
            "train.py",
            train_args("run=x", "prepared=never", "decoding.nodes=0"),
            "decoding.nodes must be an integer >= 1, got 0",
        ),
        ("evaluate.py", ["checkpoint=run", "timing.questions=-1"], "timing.questions must be an integer >= 0, got -1"),
        ("evaluate.py", ["checkpoint=run", "decoding.nodes=abc"], NO_SIZE),
        (
            "evaluate.py",
            ["base=tiny", "contestants=[{prompt_lookup:{span:abc}}]"],
            "prompt_lookup.span must be an integer >= 1, got abc",
        ),
        ("evaluate.py", ["checkpoint=run", "decoding.temperature=1e-40"], "must be 0 or at least 1e-6, got 1e-40"),
        (
            "evaluate.py",
            ["checkpoint=run", "differences=3"],
            "differences must be a list, as in differences=[A,B], got 3",
        ),
        ("evaluate.py", ["checkpoint=run", "measure=replay", "measure.nodes=16"], "measure.nodes must be a list"),
        ("evaluate.py", ["checkpoint=run", "benchmark=latency", "benchmark.contexts=9"], "contexts must be a list"),
        (
            "evaluate.py",
            ["base=tiny", "contestants=[{suffix:{remember:no}}]"],
            "drafter.remember must be true or false, got no",
        ),
        (
            "evaluate.py",
            ["base=tiny", "contestants=[{prompt_lookup:{span:0}}]"],
            "prompt_lookup.span must be an integer >= 1, got 0",
        ),
        (
            "evaluate.py",
            ["base=tiny", "contestants=[{merged:{parts:{first:prompt_lookup,third:prompt_lookup}}}]"],
            "drafter merged has no part third; it has first, second",
        ),
        ("train.py", train_args("run=x", "corpus.limit=5"), "24 prompts (now 5)"),
        ("train.py", train_args("run=x", "answers.temperature=1.0"), "answers.temperature=0.0 (now 1.0)"),
        ("train.py", train_args("run=x", "prepared=other", "corpus.path=gone.jsonl"), "gone.jsonl"),
        ("train.py", train_args("run=x", "prepared=other", "corpus.path=mistyped"), "mistyped is not there"),
        ("train.py", train_args("run=x", "prepared=other", "corpus.path=empty.jsonl"), "empty.jsonl"),
        ("train.py", ["resume=nowhere"], "nowhere holds no run"),
        ("train.py", train_args("run=x", "base.path=mamba"), "no attention heads"),
        (
            "evaluate.py",
            ["checkpoint=run", "base=local", "base.path=nowhere", "trace._target_=ctcdraft.Absent"],
            "check the name in _target_",
        ),
        ("evaluate.py", ["checkpoint=nowhere"], "contestant nowhere is neither a run directory"),
        ("evaluate.py", ["checkpoint=run", "benchmark.path=gone.jsonl"], "gone.jsonl"),
        ("evaluate.py", ["checkpoint=run", "base=local", "base.path=other_base"], "other_base (they differ in weights"),
        ("data/prepare.py", ["base=local", "base.path=base", "corpus.path=empty.jsonl", "out=o"], "empty.jsonl"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(world, monkeypatch, capsys, script, arguments, sentence):
    monkeypatch.chdir(world)
    (world / "empty.jsonl").touch()
    if not (world / "mamba").exists():
        transformers.MambaConfig(num_hidden_layers=1).save_pretrained(world / "mamba")
        random_lm(seed=1, context=128).save_pretrained(world / "other_base")
        tiny_tokenizer().save_pretrained(world / "other_base")
        random_lm().config.save_pretrained(world / "paper")
    message = expect_error(monkeypatch, capsys, script, *arguments)
    assert sentence in message
    assert not (world / "x").exists()
    assert not (world / "never").exists()
