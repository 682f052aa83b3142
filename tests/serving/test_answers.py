"""answers=vllm with a real vLLM: the responses of answers=transformers, also after a SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; run `make test-vllm`")

from engine_runs import ENVIRONMENT, HERE, TINY, near_ties

from ctcdraft.corpus.part_files import list_parts, read_part
from ctcdraft.models.loading import load_base

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]
ROOT, PROMPTS, BATCH = HERE.parents[1], 12, 4


def prepare(folder, engine, *settings):
    arguments = [
        "base=tiny", "corpus=tiny", f"corpus.path={folder}/prompts.jsonl", f"out={folder}/{engine}",
        f"answers={engine}", f"answers.batch_size={BATCH}", "answers.max_new_tokens=48", *settings,
        *(["answers.enforce_eager=true"] if engine == "vllm" else []),
    ]  # fmt: skip
    command = [sys.executable, str(ROOT / "data" / "prepare.py"), *arguments]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)


def finish(folder, process):
    assert process.wait() == 0, (folder / "log").read_text()[-3000:]


def rows(folder):
    return [line for part in list_parts(folder) for line in read_part(part)]


@pytest.fixture
def folder(tmp_path):
    lines = (TINY / "prompts" / "train.jsonl").read_text().splitlines()[: 100 * PROMPTS : 100]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_responses_are_those_of_transformers_and_a_killed_corpus_is_continued(folder):
    finish(folder, prepare(folder, "transformers"))
    killed = prepare(folder, "vllm")
    while not list_parts(folder / "vllm") and killed.poll() is None:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, (folder / "log").read_text()[-3000:]
    written = {part: part.read_bytes() for part in list_parts(folder / "vllm")}
    finish(folder, prepare(folder, "vllm"))
    assert 0 < len(written) < PROMPTS // BATCH
    assert all(part.read_bytes() == content for part, content in written.items())
    ours, theirs = rows(folder / "vllm"), rows(folder / "transformers")
    assert [row["id"] for row in ours] == [row["id"] for row in theirs]
    assert len(ours) == PROMPTS
    prompts = [row["tokens"][: row["spans"][0][0]] for row in ours]
    answers = [[row["tokens"][row["spans"][0][0] :] for row in side] for side in (ours, theirs)]
    ties = near_ties(TINY / "base", zip(prompts, *answers, strict=True))
    print(f"{len(ours)} responses, {sum(map(len, answers[0]))} tokens, {ties} near ties")
    assert ties <= 1


@pytest.mark.slow
def test_sampled_responses_to_more_prompt_tokens_than_one_step_reads(folder):
    texts = [json.loads(line)["turns"][0] for line in (TINY / "prompts" / "train.jsonl").read_text().splitlines()]
    prompts = [{"id": n, "category": "long", "turns": [" ".join(texts[n : n + 400 : 50])]} for n in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    finish(folder, prepare(folder, "vllm", "answers.temperature=0.9", "answers.samples=8", "answers.batch_size=96"))
    stops = load_base(str(TINY / "base"), "float32", "cpu").stop_token_ids
    found = rows(folder / "vllm")
    assert len(found) == 8 * PROMPTS
    assert sum(row["spans"][0][0] for row in found) > 8192
    assert all(row["spans"][0][2] == (row["tokens"][-1] in stops) for row in found)
    assert all(ended or end - start == 48 for row in found for start, end, ended in row["spans"])
    assert len({json.dumps(row["tokens"]) for row in found}) > 4 * PROMPTS
