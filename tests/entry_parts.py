"""A workspace in which tests call the entry points as a user does."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from tiny_models import random_lm, tiny_tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent


def make_workspace(home: Path) -> Path:
    """Write a random base model and prompts to `home`, and train a run on its responses by the command line."""
    random_lm(context=128).save_pretrained(home / "base")
    tiny_tokenizer().save_pretrained(home / "base")
    prompts = [{"id": f"p{n}", "category": "chat", "turns": [f"say {n}"]} for n in range(24)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run_script(patch, "train.py", *train_args("run=run"))
    return home


def train_args(*more: str) -> list[str]:
    """Return the overrides of a short training; the default head would make every such test slower."""
    drafter = [] if any(one.startswith("drafter=") for one in more) else ["drafter=ctc"]
    return [
        *drafter,
        "base=local", "base.path=base", "corpus.path=prompts.jsonl", "prepared=prepared", "answers.max_new_tokens=20",
        "trainer.steps=4", "trainer.probe_prompts=2", "trainer.probe_every=4", "trainer.checkpoint_every=2",
        "trainer.autocast=false", "trainer.warmup_steps=1", "drafter.frames=5", "objective.labels=3",
        "decoding.max_new_tokens=10", *more,
    ]  # fmt: skip


def run_script(patch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    patch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(REPOSITORY / script), run_name="__main__")


def expect_error(patch, capsys, script: str, *arguments: str) -> str:
    """Run a command that must fail with exit status 1 and without a traceback; return its stderr."""
    with pytest.raises(SystemExit) as exit_:
        run_script(patch, script, *arguments)
    assert exit_.value.code == 1
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    return stderr
