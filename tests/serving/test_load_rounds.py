"""The load generator: in which order it measures, and which rows it goes on with."""

import itertools
import json
import math
import subprocess
import sys

import pytest

from benchmarks import serving
from benchmarks.serving_report import Load, Rows, report

SERVERS = ("undrafted", "ngram", "ctc")


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
