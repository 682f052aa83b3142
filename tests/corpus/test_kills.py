"""SIGKILL at twenty random moments leaves no trace in the corpus. The process is data/prepare.py itself, forked from
one that has imported its packages already: twenty starts from nothing would take minutes."""

import json
import multiprocessing
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.corpus.prepared import is_complete

REPOSITORY = Path(__file__).resolve().parents[2]
KILLS = 20
PACKAGES = ["hydra", "tqdm", "ctcdraft.corpus.prepared", "ctcdraft.corpus.answers", "transformers.models.llama"]


def life(folder: str) -> None:
    """data/prepare.py as a user starts it, in `folder`, writing into `out` there."""
    os.chdir(Path(folder).parent)
    sys.argv = [
        "prepare.py", "base=local", "base.path=base", "corpus.path=prompts.jsonl", f"out={folder}", "device=cpu",
        "answers.max_new_tokens=40", "answers.batch_size=3", "answers.temperature=1", "answers.samples=2",
    ]  # fmt: skip
    runpy.run_path(str(REPOSITORY / "data" / "prepare.py"), run_name="__main__")


def test_a_corpus_killed_at_twenty_random_moments_is_the_same_byte_for_byte(tmp_path):
    random_lm().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    prompts = [
        {"id": n, "category": "test", "turns": [f"prompt {turn} {n}" + "!" * (n % 30) for turn in range(1 + n % 2)]}
        for n in range(150)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PACKAGES)

    def started(name: str):
        process = processes.Process(target=life, args=(str(tmp_path / name),))
        process.start()
        while not (tmp_path / name / "writer.lock").exists() and process.is_alive():
            time.sleep(0.005)
        return process, time.monotonic()

    whole, since = started("whole")
    whole.join()
    seconds = time.monotonic() - since
    assert whole.exitcode == 0
    parts = len(list(tmp_path.glob("whole/part-*")))

    rng = random.Random(0)
    finished = [0]
    for _ in range(KILLS):
        process, _ = started("killed")
        time.sleep(rng.uniform(0, seconds / KILLS))  # all of them together: about half of the work
        assert process.is_alive()
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL  # alive until then, and not done:
        assert not is_complete(tmp_path / "killed")
        finished.append(len(list(tmp_path.glob("killed/part-*.jsonl"))))
    print(f"{KILLS} kills in {seconds:.1f} s of work; parts after each of them: {finished[1:]} of {parts}")
    assert finished == sorted(finished)  # nothing that was finished is lost
    assert len(set(finished)) > KILLS // 2
    assert finished[-1] < parts

    last, _ = started("killed")
    last.join()
    assert last.exitcode == 0
    assert {file.name: file.read_bytes() for file in tmp_path.glob("killed/*")} == {
        file.name: file.read_bytes() for file in tmp_path.glob("whole/*")
    }
