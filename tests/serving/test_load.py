"""The load generator: what it counts, in which order it measures, and which rows it goes on with."""

import argparse
import asyncio
import itertools
import json
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
from benchmarks.serving_report import Load, Rows, report

SERVERS = ("undrafted", "ngram", "ctc")


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


class Measured:
    """Servers that are not started and loads that are not run, in the order in which they would be."""

    def __init__(self, monkeypatch, folder):
        self.folder, self.monkeypatch, self.calls, self.prompts = folder, monkeypatch, [], []
        self.load = lambda name, concurrency: Load(concurrency, 1.0, tokens=10)
        self.stop_after = math.inf
        (folder / "prompts").write_text("".join(f'{{"question": "q{n}"}}\n' for n in range(7)))
        monkeypatch.setattr(serving, "Server", self.start)
        monkeypatch.setattr(serving, "run_load", self.run_load)
        monkeypatch.setattr(serving, "code_version", lambda: "commit a")

    def start(self, command, url):
        self.calls.append([command])
        return serving.nullcontext()

    async def run_load(self, options, concurrency, prompts):
        if len(self.prompts) == self.stop_after:
            raise KeyboardInterrupt
        self.calls[-1].append(concurrency)
        self.prompts.append([*itertools.islice(prompts, 4)])
        return self.load(self.calls[-1][0], concurrency)

    def main(self, *arguments):
        self.calls, self.prompts = [], []
        command = ["serving", "http://127.0.0.1:1", "--model", "m", "--prompts", str(self.folder / "prompts")]
        command += [part for name in SERVERS for part in ("--server", f"{name}={name}")]
        command += ["--rows", str(self.folder / "rows"), "--concurrency", "1", "2", *arguments]
        self.monkeypatch.setattr(sys, "argv", command)
        serving.main()


@pytest.fixture
def measured(monkeypatch, tmp_path):
    return Measured(monkeypatch, tmp_path)


def test_every_round_begins_with_another_server_and_all_get_the_same_prompts(measured):
    measured.main()
    order = ["undrafted", "ngram", "ctc", "ngram", "ctc", "undrafted", "ctc", "undrafted", "ngram"]
    assert measured.calls == [[name, 1, 2] for name in order]
    assert measured.prompts == [["q0", "q2", "q4", "q6"], ["q1", "q3", "q5", "(2) q1"]] * 9


def test_a_server_that_was_interrupted_is_measured_at_all_levels_again(measured):
    measured.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        measured.main("--rounds", "1")
    measured.stop_after = math.inf
    measured.main("--rounds", "1")
    assert measured.calls == [["ngram", 1, 2], ["ctc", 1, 2]]
    measured.main("--rounds", "1")
    assert measured.calls == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [("commit", "commit 'commit a' instead of 'commit b'"), ("seconds", "seconds '120.0' instead of '5.0'")],
)
def test_rows_of_other_code_or_settings_are_refused(measured, monkeypatch, changed, sentence):
    measured.main("--rounds", "1")
    if changed == "commit":
        monkeypatch.setattr(serving, "code_version", lambda: "commit b")
    with pytest.raises(SystemExit, match=rf"rows was measured with {sentence}; give another --rows"):
        measured.main("--rounds", "1", "--seconds", "120" if changed == "commit" else "5")


def test_too_few_prompts_are_refused(measured):
    (measured.folder / "prompts").write_text('{"question": "q"}\n{"question": "q"}\n')
    with pytest.raises(SystemExit, match="has 1 prompts for 2 levels"):
        measured.main()


def test_a_reference_without_tokens_is_refused(measured, capsys):
    measured.load = lambda name, concurrency: Load(concurrency, 1.0, failures=["no such model"])
    with pytest.raises(SystemExit, match=r"the reference undrafted gave 0 tokens in 120 s at 1 requests .* \(1 failed"):
        measured.main()
    assert "no such model" in capsys.readouterr().err
    assert not (measured.folder / "rows").exists()


@pytest.mark.parametrize("failed", ["undrafted", "ctc", None])
def test_a_failure_voids_the_ratio_of_its_level(capsys, failed):
    rows = Rows(None, {})
    for number, name, concurrency in itertools.product((1, 2), ("undrafted", "ctc"), (1, 4)):
        failures = ["the server is gone"] * ((number, name, concurrency) == (2, failed, 4))
        rows.add(number, name, Load(concurrency, 1.0, tokens=10, failures=failures))
    report(rows, ("undrafted", "ctc"), (1, 4))
    lines = {tuple(line.split()[:2]): line for line in capsys.readouterr().out.splitlines()}
    assert "ratio 1.00 [1.00, 1.00]" in lines["ctc", "1"]
    assert ("ratio void" in lines["ctc", "4"]) == (failed is not None)
    assert (("failed:", "the") in lines) == (failed is not None)


def test_the_version_of_the_code_names_changes_that_are_not_committed(monkeypatch, tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    monkeypatch.setattr(serving, "ROOT", tmp_path)
    (tmp_path / "code").write_text("1")
    git("init", "--quiet")
    git("add", "code")
    git("commit", "--quiet", "--message", "m")
    (tmp_path / "rows").write_text(json.dumps({}))
    versions = [serving.code_version()]
    for text in "23":
        (tmp_path / "code").write_text(text)
        versions.append(serving.code_version())
    assert len(set(versions)) == 3
    assert len(versions[0]) == 40
    assert all(version.startswith(versions[0]) for version in versions)
