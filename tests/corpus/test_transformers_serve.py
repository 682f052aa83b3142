"""`transformers serve` with the bundled base model on loopback, a server that is not ours, gives the same responses."""

import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prompts import make_requests
from transformers.utils.import_utils import is_serve_available

from ctcdraft.corpus import prepared
from ctcdraft.corpus.chat_template import answer_text, chat_messages, prompt_tokens
from ctcdraft.corpus.generation.openai import ServedAnswers
from ctcdraft.corpus.generation.requests import Response
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.types import Corpus
from ctcdraft.errors import InputError
from ctcdraft.evaluation.benchmarks import project_prompts
from ctcdraft.models.loading import load_base

TINY = Path(__file__).resolve().parents[2] / "data" / "tiny"
SERVE = "from transformers.cli.transformers import main; main()"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_serve_available(), reason="transformers serve needs fastapi, uvicorn and openai: transformers[serving]"
    ),
]


class Served:
    """`transformers serve` at an address of its own, which may be killed and started again."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.start()

    def start(self) -> None:
        arguments = ["serve", str(TINY / "base"), "--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"]
        self.process = subprocess.Popen([sys.executable, "-c", SERVE, *arguments, "--dtype", "float32"])
        for _ in range(600):
            assert self.process.poll() is None, "the server ended while it started"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.5)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server():
    served = Served()
    yield served
    served.kill()


@pytest.fixture(scope="module")
def base():
    return load_base(str(TINY / "base"), "float32", "cpu")


def test_a_real_server_gives_the_same_text_and_the_same_ids(server, base):
    prompts = project_prompts(str(TINY / "prompts" / "held_out.jsonl"), "tiny", 60).prompts
    requests = make_requests([prompt_tokens(base.tokenizer, chat_messages(prompt.turns[:1], [])) for prompt in prompts])
    expected = TransformersAnswers(60, 48, 0.0, 0, 1).start(base)(requests)
    settings = (60, 48, 0.0, 0, 1, server.url, str(TINY / "base"), 4, 100.0, 1, 0.5, None, 8)
    served = ServedAnswers(*settings).start(base)(requests)
    kept = [(mine, other) for mine, other in zip(expected, served, strict=True) if isinstance(other, Response)]
    same = [mine.tokens == other.tokens for mine, other in kept]
    texts = [
        answer_text(base.tokenizer, mine.tokens, base.stop_token_ids)
        == answer_text(base.tokenizer, other.tokens, base.stop_token_ids)
        for mine, other in kept
    ]
    print(f"{len(requests)} answers, {len(kept)} round-trip: {sum(texts)} texts and {sum(same)} rows of ids equal")
    assert len(kept) > 0.8 * len(requests)
    assert all(texts)
    assert all(same)


@pytest.mark.parametrize(
    ("end", "sentence"),
    [(signal.SIGKILL, "Connection refused|disconnected|closed|reset|aborted"), (signal.SIGSTOP, "within 10 s")],
)
def test_a_real_server_that_dies_or_hangs_half_way_loses_nothing(server, base, tmp_path, end, sentence):
    prompts = Corpus.from_prompts(project_prompts(str(TINY / "prompts" / "held_out.jsonl"), "tiny", 24).prompts)

    def prepare(out, timeout=60.0):
        settings = (4, 24, 0.0, 0, 1, server.url, str(TINY / "base"), 4, timeout, 0, 0.5, None, 8)
        return prepared.prepare(base, prompts, ServedAnswers(*settings), tmp_path / out, {})

    def content(out):
        return {file.name: file.read_bytes() for file in (tmp_path / out).iterdir()}

    def end_it_half_way():
        while len(list(tmp_path.glob("cut/part-*.jsonl"))) < 2:
            time.sleep(0.01)
        server.process.send_signal(end)

    whole = prepare("whole")["counts"]
    threading.Thread(target=end_it_half_way, daemon=True).start()
    with pytest.raises(InputError, match=rf"at one request \(last: .*({sentence}).*finished batches are kept"):
        prepare("cut", timeout=10.0 if end == signal.SIGSTOP else 60.0)
    kept = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("cut/part-*.jsonl")}
    assert 2 <= len(kept) < 6
    if end == signal.SIGKILL:
        server.kill()
        server.start()
    else:
        server.process.send_signal(signal.SIGCONT)
    prepare("cut")
    assert content("cut") == content("whole")
    assert kept.items() <= {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("cut/*")}.items()
    print(f"{len(kept)} of 6 parts before the end; {whole['answers']} answers, {whole['dropped']} dropped")
