"""`transformers serve` with the embedded base on loopback says what the base says here: a server that is not ours."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from asking import questions_of
from transformers.utils.import_utils import is_serve_available

from ctcdraft.base import load_base
from ctcdraft.corpus.answers import TransformersAnswers
from ctcdraft.corpus.answers_served import ServedAnswers
from ctcdraft.corpus.chat import answer_text, messages, prompt_tokens
from ctcdraft.corpus.questions import Reply
from ctcdraft.evaluation.benchmarks import project_prompts

TINY = Path(__file__).resolve().parents[2] / "data" / "tiny"
SERVE = "from transformers.cli.transformers import main; main()"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_serve_available(), reason="transformers serve needs fastapi, uvicorn and openai: transformers[serving]"
    ),
]


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = f"http://127.0.0.1:{port}"
    words = ["serve", str(TINY / "base"), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen([sys.executable, "-c", SERVE, *words, "--dtype", "float32"])
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended while it started"
            try:
                urllib.request.urlopen(f"{place}/health", timeout=5).close()
                break
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.5)
        yield f"{place}/v1"
    finally:
        process.kill()
        process.wait()


def test_a_real_server_says_the_same_text_and_the_same_ids(url):
    base = load_base(str(TINY / "base"), "float32", "cpu")
    prompts = project_prompts(str(TINY / "prompts" / "held_out.jsonl"), "tiny", 60).prompts
    asked = questions_of([prompt_tokens(base.tokenizer, messages(prompt.turns[:1], [])) for prompt in prompts])
    here = TransformersAnswers(60, 48, 0.0, 0, 1).start(base)(asked)
    settings = (60, 48, 0.0, 0, 1, url, str(TINY / "base"), 4, 100.0, 1, 0.5, None, 8)
    there = ServedAnswers(*settings).start(base)(asked)
    kept = [(mine, other) for mine, other in zip(here, there, strict=True) if isinstance(other, Reply)]
    same = [mine.tokens == other.tokens for mine, other in kept]
    texts = [
        answer_text(base.tokenizer, mine.tokens, base.stop_tokens)
        == answer_text(base.tokenizer, other.tokens, base.stop_tokens)
        for mine, other in kept
    ]
    print(f"{len(asked)} answers, {len(kept)} round-trip: {sum(texts)} texts and {sum(same)} rows of ids equal")
    assert len(kept) > 0.8 * len(asked)
    assert all(texts)
    assert all(same)
