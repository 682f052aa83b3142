"""data/prepare.py as a user runs it: from another directory, twice, with a plan, and with wrong input."""

import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
from tiny_models import random_lm, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a base model, its config and eight prompts."""
    folder = tmp_path_factory.mktemp("world")
    random_lm().save_pretrained(folder / "lm")
    tiny_tokenizer().save_pretrained(folder / "lm")
    (folder / "base").mkdir()
    (folder / "base" / "random.yaml").write_text(
        "_target_: ctcdraft.models.loading.load_base\nname: random\n"
        f"path: {folder / 'lm'}\ndtype: ${{dtype}}\ndevice: ${{device}}\n"
    )
    lines = [json.dumps({"id": n, "category": "test", "turns": [f"prompt {n}"]}) for n in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@dataclass(frozen=True)
class Ended:
    """How a call ended, as a shell would see it."""

    returncode: int
    stdout: str
    stderr: str


def command_line(world, arguments):
    given = [f"hydra.searchpath=[file://{world}]", "base=random", "corpus.path=prompts.jsonl", "device=cpu"]
    return [str(ROOT / "data" / "prepare.py"), *given, "answers.max_new_tokens=8", *arguments]


def run(world, *arguments, **more):
    """data/prepare.py with these arguments and this environment, in this process: importing torch takes seconds."""
    stdout, stderr, status = StringIO(), StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.chdir(world)
        patch.setattr(sys, "argv", command_line(world, arguments))
        for name, value in more.items():
            patch.setenv(name, value)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    return Ended(status, stdout.getvalue(), stderr.getvalue())


def test_in_a_process_of_its_own(world):
    command = [sys.executable, *command_line(world, ["out=own", "corpus.limit=1"])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=world, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "1 answers to 1 prompts in own" in done.stdout


def test_prepare_plans_prepares_resumes_and_overwrites(world):
    planned = run(world, "out=there", "corpus.limit=5", "plan_only=true")
    assert planned.returncode == 0, planned.stderr
    assert "random (float32, cpu) answers 5 prompts, 5 turns" in planned.stdout
    assert re.search(r"time      at most about [\d.e-]+ (seconds|minutes) \(a trial of", planned.stdout)
    assert not (world / "there").exists()

    first = run(world, "out=there", "corpus.limit=5", "answers.batch_size=2")
    assert first.returncode == 0, first.stderr
    assert "5 answers to 5 prompts in there" in first.stdout
    assert len(list((world / "there").glob("part-*.jsonl"))) == 3
    manifest = json.loads((world / "there" / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["settings"]["corpus"]["path"] == "prompts.jsonl"
    assert manifest["settings"]["corpus"]["seed"] == 0
    assert str(ROOT) not in json.dumps(manifest["settings"])  # no path of this machine
    assert manifest["plan"]["measured"] == "plan.json"
    measured = json.loads((world / "there" / "plan.json").read_text())
    assert measured["hours_at_most"] > 0
    assert measured["trial"]["rows"] in (1, 2)
    account = manifest["conversations"]
    assert (account["read"], account["kept"], account["not_asked"]) == (8, 5, 3)
    assert set(account["leaked"]) == {"tiny", "mt_bench", "gsm8k"}

    exported = run(world, "out=there", "export=exported")
    assert (exported.returncode, exported.stdout) == (0, "3 parts in exported\n"), exported.stderr
    for file in (world / "there").glob("part-*.jsonl"):
        assert (world / "exported" / file.name).read_bytes() == file.read_bytes()

    from_parts = run(world, "out=there", "corpus.limit=5", "show=3")
    assert from_parts.returncode == 0, from_parts.stderr
    assert from_parts.stdout.count("is trained on the labels") + from_parts.stdout.count("no anchor") == 3
    assert "\x1b[" in from_parts.stdout

    other = run(world, "out=there", "answers.batch_size=2")
    assert other.returncode == 1
    assert "holds a corpus that was made with 5 prompts (now 8)" in other.stderr
    assert "Traceback" not in other.stderr

    afresh = run(world, "out=there", "answers.batch_size=2", "overwrite=true")
    assert afresh.returncode == 0, afresh.stderr
    assert "8 answers to 8 prompts" in afresh.stdout
    assert not (world / ".hydra").exists()
    assert not (world / "outputs").exists()


def test_several_corpora_become_one(world):
    talk = {"conversations": [{"from": "human", "value": "Hi, how are you today?"}, {"from": "gpt", "value": "Well."}]}
    (world / "talks.jsonl").write_text(json.dumps(talk))
    (world / "problems.jsonl").write_text(json.dumps({"question": "What is 1 + 1?", "answer": "#### 2"}))
    files = ["corpus.parts.sharegpt.path=talks.jsonl", "corpus.parts.gsm8k.path=problems.jsonl"]
    prepared = run(world, "corpus=sharegpt_gsm8k", "corpus.path=null", *files, "out=both")
    assert prepared.returncode == 0, prepared.stderr
    assert json.loads((world / "both" / "manifest.json").read_text())["conversations"]["kept"] == 2
    refused = run(world, "corpus=sharegpt_gsm8k", *files, "out=never")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "corpus.path=prompts.jsonl, but corpus sharegpt_gsm8k has several" in refused.stderr


def test_two_chat_corpora_with_one_prompt_in_both_are_mixed_and_the_manifest_counts_it(world):
    for name, texts in (("one", ["Hi, how are you?", "Tell me more."]), ("two", ["Tell me more.", "Why is that so?"])):
        talks = [{"conversations": [{"from": "human", "value": value}]} for value in texts]
        (world / f"{name}.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    (world / "corpus").mkdir()
    (world / "corpus" / "chats.yaml").write_text(
        "defaults:\n  - sharegpt@parts.one\n  - sharegpt@parts.two\n_target_: ctcdraft.corpus.sources.mixture\n"
        "_convert_: all\nname: chats\npath: null\nparts:\n"
        "  one: {_partial_: true, path: one.jsonl}\n  two: {_partial_: true, path: two.jsonl}\n"
    )
    done = run(world, "corpus=chats", "corpus.path=null", "out=mixed")
    assert done.returncode == 0, done.stderr
    assert "3 prompts of 4 conversations (without 1 in an earlier part)" in done.stdout
    assert "3 answers to 3 prompts in mixed" in done.stdout
    account = json.loads((world / "mixed" / "manifest.json").read_text())["conversations"]
    assert (account["kept"], account["dropped"]["in an earlier part"]) == (3, 1)


def test_show_generates_where_nothing_is_prepared_and_writes_nothing(world):
    shown = run(world, "out=elsewhere", "show=2", "show_labels=2")
    assert shown.returncode == 0, shown.stderr
    assert "prompt 0" in shown.stdout or "prompt 1" in shown.stdout
    assert shown.stdout.count("tokens are answer") == 2
    assert not (world / "elsewhere").exists()


def test_two_shards_write_what_one_process_writes(world):
    size = "answers.batch_size=2"
    for shard in ("2/2", "1/2"):
        one = run(world, "out=pair", size, f"shard={shard}")
        assert one.returncode == 0, one.stderr
        assert ("shard 2 of 2 is finished in pair" in one.stdout) == (shard == "2/2")
    assert "8 answers to 8 prompts in pair" in one.stdout
    assert run(world, "out=alone", size).returncode == 0
    alone, pair = (
        {file.name: file.read_bytes() for file in (world / out).iterdir() if file.name != "plan.json"}
        for out in ("alone", "pair")
    )
    assert alone == pair


def test_a_corpus_of_another_base_is_kept_and_refused(world):
    assert run(world, "out=theirs", "corpus.limit=2").returncode == 0
    before = {file.name: file.read_bytes() for file in (world / "theirs").iterdir()}
    other = run(world, "out=theirs", "corpus.limit=2", "base=tiny")
    assert other.returncode == 1
    assert "holds answers of random, but this run's base is tiny (another weights, tokenizer" in other.stderr
    assert {file.name: file.read_bytes() for file in (world / "theirs").iterdir()} == before
