"""The load generator: what it counts, and the servers that it starts."""

import argparse
import asyncio
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from streaming_server import stream, streaming

from benchmarks import serving
from benchmarks.server_process import Server, open_client
from benchmarks.serving_report import Load


def options(url, **changes):
    values = {"url": url, "model": "m", "max_tokens": 64, "temperature": 0.0, "timeout": 30.0, "rate": None}
    return argparse.Namespace(**values | {"seconds": 0.5, "warm_up": False} | changes)


def load_of(url, concurrency=1, **changes):
    prompts = serving.level_prompts(["p", "q"], 0, 1)
    return asyncio.run(serving.run_load(options(url, **changes), concurrency, prompts))


def ask_once(url):
    async def ask():
        load = Load(1, 1.0)
        async with open_client(url, 30.0) as client:
            await serving.ask(client, options(url), "p", load, math.inf)
        return load

    return asyncio.run(ask())


def test_only_tokens_within_the_window_count():
    """Events of 3 tokens, 0.1 s apart: at most 10 of 20 arrive within a second."""
    with streaming(lambda body: stream([3] * 20, 0.1)) as server:
        load = load_of(server.url, seconds=1.0)
    assert 0 < load.tokens <= 30
    assert load.tokens % 3 == 0
    assert load.speed == load.tokens / 1.0
    assert load.requests == 1
    assert load.answers == {"p": "a" * 20}  # read to its end all the same
    assert server.bodies[0]["stream_options"]["continuous_usage_stats"]


def test_tokens_without_continuous_usage_count_at_the_end_of_a_stream():
    with streaming(lambda body: stream([3, 3], 0.1, continuous=False)) as server:
        assert ask_once(server.url).tokens == 6


def test_the_tokens_of_the_first_event_are_no_further_ones():
    with streaming(lambda body: stream([3, 2, 2], 0.2)) as server:
        (further,) = ask_once(server.url).further
    assert 0.099 <= further < 0.2  # 0.4 s for 4 tokens


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        (stream([1, 1], 0.0, finished=False), "without finish_reason"),
        (stream([1, 1], 0.0, continuous=False, used=False), "without usage"),
        ([*stream([1], 0.0), (0.0, {"error": {"message": "out of blocks"}})], "out of blocks"),
        ([], "without finish_reason"),
        (None, "500"),
    ],
    ids=["cut", "uncounted", "error", "empty", "refused"],
)
def test_a_stream_that_is_not_whole_has_failed(events, sentence):
    with streaming(lambda body: events) as server:
        load = ask_once(server.url)
    (failure,) = load.failures
    assert sentence in failure
    assert (load.requests, load.answers) == (0, {})


def test_a_failure_of_the_warm_up_is_one_of_the_level():
    with streaming(lambda body: None if body["messages"][0]["content"] == "p" else stream([1], 0.01)) as server:
        load = load_of(server.url, seconds=0.05, warm_up=True)
    assert load.failures


def test_a_rate_ends_with_the_window():
    """16 places at 4 requests per second: filling them all would take 4 seconds."""
    with streaming(lambda body: stream([1], 0.0)) as server:
        began = time.perf_counter()
        load = load_of(server.url, concurrency=16, rate=4.0)
        seconds = time.perf_counter() - began
    due = [*itertools.takewhile(lambda start: start < 0.5, serving.arrivals(0.0, 4.0, 16))]
    assert 0 < load.requests <= len(due)
    assert seconds < 2.5


def test_requests_arrive_at_random_and_alike_for_every_server():
    times = [*itertools.islice(serving.arrivals(5.0, 4.0, 8), 4001)]
    assert times == [*itertools.islice(serving.arrivals(5.0, 4.0, 8), 4001)]
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    assert times[0] == 5.0
    assert sum(gaps) / 4000 == pytest.approx(1 / 4, rel=0.1)
    assert gaps[2000] == pytest.approx(math.log(2) / 4, rel=0.1)  # the median of exponential gaps
    assert [*itertools.islice(serving.arrivals(5.0, None, 8), 2)] == [5.0, 5.0]


def test_a_level_never_asks_for_a_prompt_again():
    levels = [[*itertools.islice(serving.level_prompts("abcde", level, 2), 7)] for level in range(2)]
    assert levels == [
        ["a", "c", "e", "(2) a", "(2) c", "(2) e", "(3) a"],
        ["b", "d", "(2) b", "(2) d", "(3) b", "(3) d", "(4) b"],
    ]


def test_a_server_that_answers_already_is_not_measured():
    with (
        streaming(lambda body: None) as server,
        pytest.raises(SystemExit, match=rf"a server answers at {server.url} already"),
    ):
        Server("sleep 60", server.url)


def test_a_server_ends_with_a_measurement_that_is_interrupted_as_it_starts(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    server = Server("sleep 60", "http://127.0.0.1:9")
    monkeypatch.setattr("benchmarks.server_process.httpx.get", interrupt)
    with pytest.raises(KeyboardInterrupt), server:
        pass
    assert server.process.poll() is not None


def test_a_terminated_measurement_ends_its_server(tmp_path):
    (tmp_path / "prompts").write_text('{"question": "q"}')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "benchmarks.serving", url, "--model", "m", "--concurrency", "1"]
        command += ["--prompts", str(tmp_path / "prompts")]
        command += ["--server", f"a=sh -c 'echo $$ > {tmp_path}/began; exec sleep 60'"]
        process = subprocess.Popen(command, cwd=serving.ROOT, stderr=subprocess.DEVNULL)
        try:
            for _ in range(2):  # before the server is started, and while it is waited for
                listener.accept()[0].close()
            while not ((tmp_path / "began").exists() and (tmp_path / "began").read_text().strip()):
                time.sleep(0.05)
            process.terminate()
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()
    server = int((tmp_path / "began").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
