"""A small world for the comparison: a random base, made-up prompts, two entrants, a few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.config.cli import REPOSITORY

TRAIN = [
    "prepared=corpus", "answers.max_new_tokens=20", "trainer.autocast=false",
    "trainer.num_threads=1", "trainer.probe_prompts=2", "trainer.checkpoint_every=2", "decoding.max_new_tokens=10",
    "decoding.nodes=8", "trainer.batch_size=4", "trainer.anchors_per_sequence=4",
]  # fmt: skip
BENCHMARK = ["benchmark=tiny", "benchmark.path=prompts.jsonl", "benchmark.limit=3", "decoding.max_new_tokens=12"]


def make_world(folder):
    """Write base and prompts; return the overrides of a comparison with a few steps there."""
    random_lm(context=128).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    prompts = [{"id": f"p{n}", "category": "chat", "turns": [f"say {n}"], "reference": None} for n in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    base = "{base:['base=local','base.path=base','device=cpu'],corpus:['corpus=tiny','corpus.path=prompts.jsonl']}"
    return [
        "out=out", "results=results", "bases.tiny=null", f"+bases.random={base}", f"train={quoted(TRAIN)}",
        "minutes=0.002", "pace=3",
        "seeds=[0]", "claim_seeds=[]", "learning_rates=[3e-3]",
        "ladder={extensions:0,budgets:[2,4],repeated:2,best:1,always:[ctc],converged:0.02}",
        "~entrants",
        "+entrants={ctc:['drafter=ctc','drafter.frames=4','objective=prefix_ctc'],medusa:['drafter=medusa']}",
        "crossed=null", "claims=[[ctc,medusa]]", "measure.benchmarks.tiny=null",
        f"+measure.benchmarks.small={quoted(BENCHMARK)}",
        "measure.evaluate=['warm_up_tokens=4','timing.questions=1','trace.questions=0']", "measure.nodes=[8,16]",
        "measure.checked=1", "measure.loops.adaptive=['decoding.nodes=8']", "measure.loops.fixed=null",
        "counted.nodes=8",
    ]  # fmt: skip


def quoted(arguments) -> str:
    return "[" + ",".join(f"'{argument}'" for argument in arguments) + "]"


def run_comparison(folder, *overrides, check=True):
    """Run the command in a folder; return the finished process."""
    command = [sys.executable, "-m", "studies.comparison", *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=290, env=environment())
    assert not check or done.returncode == 0, done.stderr
    return done


def environment():
    return os.environ | {"PYTHONPATH": str(REPOSITORY)}
