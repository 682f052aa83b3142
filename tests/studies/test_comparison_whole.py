"""A whole comparison from the command line, at a small size: a random base, a few steps, two methods."""

import json
import subprocess
import sys

import pytest
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.config.cli import REPOSITORY

LEFT_OUT = ("ctc", "ctc_paper", "medusa_gru", "hydra", "eagle", "blockwise", "draft_model")


@pytest.mark.slow
def test_a_comparison_trains_measures_and_writes_its_page(tmp_path):
    random_lm(context=128).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    prompts = [{"id": f"p{n}", "category": "chat", "turns": [f"say {n}"], "reference": None} for n in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    train = [
        "prepared=corpus", "answers.max_new_tokens=20", "trainer.autocast=false",
        "trainer.warmup_steps=1", "trainer.num_threads=1", "decoding.max_new_tokens=10", "decoding.nodes=8",
    ]  # fmt: skip
    benchmark = ["benchmark=tiny", "benchmark.path=prompts.jsonl", "benchmark.limit=3", "decoding.max_new_tokens=12"]
    arguments = [
        "experiment=arena", "arena.out=out", "arena.base=['base=local','base.path=base','device=cpu']",
        "arena.corpus=['corpus.path=prompts.jsonl']", f"arena.train={quoted(train)}",
        "arena.evaluate=['timing.questions=1','warm_up_tokens=4']",
        "arena.steps=4", "arena.small=null", "arena.learning_rates={values:[0.003],share:0.25,prompts:2}",
        "arena.arms=[steps,parameters]", "arena.extra_seeds={seeds:[1],entrants:[medusa],best_rival:false}",
        f"arena.benchmarks.tiny={quoted(benchmark)}", "arena.replay={nodes:[4,8],temperatures:[0.0],checked:1}",
        "arena.timing={nodes:[8],arms:[steps],others:[oracle,junk],overrides:['decoding=greedy']}",
        "arena.pairs=[[ctc_gru,medusa]]", *(f"arena.entrants.{name}=null" for name in LEFT_OUT),
    ]  # fmt: skip
    finished = run_comparison(tmp_path, arguments)
    assert finished.returncode == 0, finished.stderr
    page = (tmp_path / "out" / "page.md").read_text()
    assert "ctc_gru minus medusa" in page
    assert "| oracle |" in page
    trained = json.loads((tmp_path / "out" / "training.json").read_text())
    reference, medusa = trained["ctc_gru"], trained["medusa.parameters"]
    assert abs(medusa["parameters"] / reference["parameters"] - 1) < 0.05
    assert reference["seconds"]["processor"] > 0
    assert trained["medusa.s1"]["tau"], "another seed trains on the same corpus"
    again = run_comparison(tmp_path, arguments)
    assert "python train.py" not in again.stdout
    assert "python evaluate.py" not in again.stdout
    assert (tmp_path / "out" / "page.md").read_text() == page


def run_comparison(folder, arguments):
    command = [sys.executable, str(REPOSITORY / "evaluate.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


def quoted(arguments) -> str:
    return "[" + ",".join(f"'{argument}'" for argument in arguments) + "]"
