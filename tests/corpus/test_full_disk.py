"""A disk that is really full: a tmpfs of a few kilobytes, in a mount namespace of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import random_lm, tiny_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
PROBE = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]


def may_mount() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(PROBE, capture_output=True).returncode == 0


SCRIPT = """
mkdir small && mount -t tmpfs -o size=32k none small || exit 9
"$@" out=small; echo "first $?"
ls small; test ! -e small/writer.lock && test -z "$(ls small | grep partial)" && echo tidy
mount -o remount,size=4m small
"$@" out=small; echo "second $?"
"$@" out=whole; echo "whole $?"
diff -r -x plan.json small whole && echo equal
"""


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="may not mount a small disk here")
def test_a_full_disk_is_one_sentence_and_the_run_can_be_resumed(tmp_path):
    random_lm().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    prompts = [{"id": n, "category": "test", "turns": [f"prompt {n}"]} for n in range(60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    command = [
        sys.executable, str(REPOSITORY / "data" / "prepare.py"), "base=local", "base.path=base",
        "corpus.path=prompts.jsonl", "device=cpu", "answers.max_new_tokens=20", "answers.batch_size=4",
    ]  # fmt: skip
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", SCRIPT, "sh", *command],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    printed = done.stdout.split()
    assert "first 1" in done.stdout, done.stderr
    assert "part-00000.jsonl" in printed
    assert "part-00014.jsonl" not in printed
    for line in ("tidy", "equal"):
        assert line in printed
    assert "second 0" in done.stdout
    sentence = [line for line in done.stderr.splitlines() if "cannot write" in line]
    assert len(sentence) == 1
    assert "No space left on device" in sentence[0]
    assert sentence[0].endswith("then run again: what was finished is kept")
    assert "Traceback" not in done.stderr
