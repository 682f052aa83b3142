"""A small world for the comparison: a random base, made-up prompts, two entrants, a few steps; rows and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.evaluation.bootstrap import QuestionSums

PASSES = [10, 20, 10]
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
        "measure.again=[ctc]", "ladder.again.ctc_ce=null", "counted.nodes=8",
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


def sums(tau, seconds=None):
    timed = ([tau * each for each in PASSES], [seconds or 0.0] * 3) if seconds else ((), ())
    return QuestionSums([tau * each for each in PASSES], PASSES, *timed)


def training(head, method, role, seed=0, steps=100, tau=2.0, levels=None, rate=0.004):
    factors = dict.fromkeys(("body", "objective", "correction")) | (levels or {})
    values = {"learning_rate": rate, "frames": 6, "parameters": 1000, "seconds": 36.0 * steps, "loss": 1.0}
    return {"job": f"tiny/{head}", "base": "tiny", "role": role, "method": method, "seed": seed, "steps": steps,
            "tau": tau, **values, **factors, "commit": "abc1234"}  # fmt: skip


def report(store, name, taus, wrong=(), unlike=(), timed=False, size=16):
    """Write an evaluation of these heads; `wrong` ones are not lossless, `unlike` ones decode another tau."""
    rows, counts = [], {}
    for drafter, tau in {"autoregressive": 1.0, **taus}.items():
        nodes = 1 if drafter == "autoregressive" and not timed else size
        speed = {"speedup": tau / 1.5, "speedup_ci": [tau / 2, tau], "c": 0.1 * tau, "v": 1.0, "o": 0.1}
        speed["predicted_speedup"] = tau / 1.4
        none = dict.fromkeys(speed)
        rows.append({
            "drafter": drafter, "benchmark": "gsm8k", "nodes": nodes, "mean_nodes": 9.0, "prompts": 3, "tau": tau,
            "tau_ci": [tau - 0.1, tau + 0.1], "tokens_per_second": None, **(speed if timed else none),
            "lossless": {"prompts": 3, "equal": 2 if drafter in wrong else 3, "owed": {"wrong": drafter in wrong}},
            **({} if timed else {"replay": {"answers": 3, "alike": 2 if drafter in unlike else 3}}),
        })  # fmt: skip
        plain = vars(sums(tau, seconds=2.0 / tau if timed else None))
        counts[drafter] = {nodes: {key: [*column] for key, column in plain.items() if column}}
    environment = {"git": {"commit": "f" * 40}, "command": "python evaluate.py out=/tmp/some/where/x"}
    kind = name.split("-")[1]
    store.append_evaluation(f"tiny/{name}", kind=kind, report={"rows": rows, "environment": environment}, counts=counts)
