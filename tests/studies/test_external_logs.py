"""Answer files: measures by hand, broken files refused in one sentence."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctcdraft.errors import InputError
from studies.external_logs import page as log_page
from studies.external_logs.compare import compare_logs, terminal
from studies.external_logs.metrics import doubled_words_per_1000
from studies.external_logs.read import read_log

REPOSITORY = Path(__file__).resolve().parents[2]
TRACES = Path(
    os.environ.get("CTCDRAFT_TRACES", REPOSITORY.parent / "shared" / "data" / "ctc_drafter_traces")
)  # the authors' answer files


def line(question, texts=("a b",), idxs=(3,), tokens=(8,), seconds=(2.0,), **more):
    """One question in EAGLE's and Medusa's shape."""
    choice = {"index": 0, "turns": list(texts), "idxs": list(idxs), "new_tokens": list(tokens)}
    choice["wall_time"] = list(seconds)
    return {"question_id": question, "answer_id": "x", "model_id": "m", "choices": [choice], "tstamp": 1e9, **more}


def file(tmp_path, name, lines):
    path = tmp_path / name
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(path)


OURS = [line(81, ("a b", "c"), (3, 1), (8, 4), (2.0, 2.0)), line(91, ("d",), (4,), (9,), (1.0,))]
THEIRS = [line(81, ("a b", "c"), (7, 3), (8, 4), (4.0, 4.0)), line(91, ("e",), (5,), (6,), (2.0,))]


def pair(tmp_path, ours=OURS, theirs=THEIRS):
    files = file(tmp_path, "ours.jsonl", ours), file(tmp_path, "theirs.jsonl", theirs)
    return compare_logs(read_log(files[0]), read_log(files[1]), 0)


def note_text(comparison):
    return "\n".join(note.text for note in comparison.notes)


def test_every_measure_by_hand(tmp_path):
    """Question 81: 12 tokens, passes 4 + 2, last indices 3 + 1, 4 s against 12 in 8 s. 91: 9 / 5 / 4, 1 s; 6 in 2 s."""
    ours, theirs = pair(tmp_path).rows
    assert (ours["tokens"], ours["passes"]) == (21, 11)
    assert ours["tau"] == pytest.approx(21 / 11)
    assert ours["tau_mean"] == pytest.approx((12 / 6 + 9 / 5) / 2)
    assert ours["tau_paper"] == pytest.approx((12 / 4 + 9 / 4) / 2)
    assert ours["speedup"] == pytest.approx((21 / 5) / (18 / 10))
    assert ours["speedup_paper"] == pytest.approx(((3 + 9) / 2) / ((1.5 + 3) / 2))
    assert ours["speedup_turns"] == pytest.approx(((4 + 2 + 9) / 3) / ((2 + 1 + 3) / 3))
    assert ours["tokens_per_second"] == pytest.approx(21 / 5)
    assert ours["equal"] == 1
    assert (theirs["tau"], theirs["speedup"], theirs["equal"]) == (1, 1, None)
    assert list(ours["categories"]) == ["writing", "roleplay"]
    assert ours["categories"]["roleplay"]["tau"] == 9 / 5
    for name in ("tau", "tau_mean", "tau_paper", "speedup", "speedup_paper", "speedup_turns"):
        low, high = ours[f"{name}_ci"]
        assert low <= ours[name] <= high


def test_spec_bench_counts_passes_and_names_categories(tmp_path):
    row = line(1, category="translation")
    row["choices"][0]["decoding_steps"] = row["choices"][0].pop("idxs")
    row["choices"][0]["accept_lengths"] = [3, 3, 2]
    comparison = compare_logs(read_log(file(tmp_path, "spec.jsonl", [row])), None, 0)
    assert comparison.rows[0]["passes"] == 3
    assert list(comparison.rows[0]["categories"]) == ["translation"]
    assert comparison.rows[0]["speedup"] is None
    assert "no baseline was given" in note_text(comparison)


def test_gzipped_files_are_read(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(line(5)).encode()))
    assert list(read_log(str(path)).answers) == ["5"]


def test_missing_token_counts_of_the_baseline_are_replaced_and_noted(tmp_path):
    """8 + 4 and 6 forward passes replace them; idxs would give 10 and 5 tokens: ratio 6 / ((10/8 + 5/2) / 2) = 3.2."""
    theirs = [line(81, ("a b", "c"), (7, 3), (0, 0), (4.0, 4.0)), line(91, ("e",), (5,), (0,), (2.0,))]
    comparison = pair(tmp_path, theirs=theirs)
    assert comparison.rows[0]["speedup"] == pytest.approx((21 / 5) / (18 / 10))
    assert comparison.rows[1]["tau"] is comparison.rows[1]["tau_paper"] is None
    assert "3 of 3 turns hold a token count of zero; forward passes (idxs + 1) replace it" in note_text(comparison)
    assert "speedup_paper would be 3.20" in note_text(comparison)
    shown = terminal(comparison)
    place = next(place for place, note in enumerate(comparison.notes, 1) if "replace it" in note.text)
    (speeds,) = [text for text in shown.split("\n") if text.startswith("speedup_paper ")]
    assert speeds.count(f"{place}") >= 2  # beside both numbers


def test_missing_values_are_noted_and_never_divided(tmp_path):
    ours = [*OURS, line(92, tokens=(0,)), line(93, seconds=(0.0,)), line(94), line(94, tokens=(5,))]
    theirs = [*THEIRS, line(93, idxs=(7,)), line(99, idxs=(7,), tstamp=1.1e9)]
    for one in theirs:
        one["tstamp"] = one["tstamp"] + 30 * 86400
    comparison = pair(tmp_path, ours, theirs)
    assert comparison.rows[0]["prompts"] == 4  # 92 has no count
    assert comparison.rows[0]["tokens"] == 21 + 8 + 5  # the last line of 94 counts
    assert comparison.rows[0]["compared"] == 2  # 93 has no time, 94 no partner
    assert comparison.rows[0]["speedup"] == pytest.approx((21 / 5) / (18 / 10))
    for text in (
        "1 of 5 questions lack a token count", "1 of 5 questions have a time of zero",
        "1 questions occur more than once (94)", "1 questions are in ours.jsonl alone (94)",
        "1 questions are in theirs.jsonl alone (99)", "recorded 30 days apart (run 2001-09-09, baseline 2001-10-09)",
        "1 of 3 questions have another text",
    ):  # fmt: skip
        assert text in note_text(comparison), text


def test_a_baseline_that_is_not_autoregression_is_noted(tmp_path):
    assert "tokens and forward passes differ in 3 of 3 turns" in note_text(pair(tmp_path, theirs=OURS))


def test_doubled_words():
    assert doubled_words_per_1000(["He took the the dog", "1 1 is not a a word"]) == pytest.approx(1000 * 2 / 12)
    assert doubled_words_per_1000([""]) is None


BROKEN = {
    "cut short": ('{"question_id": 1, "choi', "line 1 of .* is not JSON; if it is truncated"),
    "a list": ("[1]", "not a JSON object"),
    "no choices": (json.dumps({"question_id": 1}), "has no `choices`; it has question_id"),
    "no answer": (json.dumps({"question_id": 1, "choices": []}), "no answer in `choices`"),
    "no question": (json.dumps({"choices": []}), "has no `question_id`"),
    "odd answer": (json.dumps({"question_id": 1, "choices": [3]}), "`choices` must hold objects"),
    "turns of text": (json.dumps({"question_id": 1, "choices": [{"turns": "a"}]}), "`turns` is 'a', not list"),
    "two lengths": (json.dumps(line(1, seconds=(1.0, 2.0))), "1 turns but 2 values in `wall_time`"),
    "a word": (json.dumps(line(1, tokens=("many",))), "'many' in `new_tokens`"),
    "below zero": (json.dumps(line(1, seconds=(-1,))), "-1 in `wall_time`"),
    "nothing": ("", "holds no answer"),
}


@pytest.mark.parametrize(("content", "sentence"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_refused_in_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=sentence):
        read_log(str(path))


def test_a_file_without_forward_passes_is_refused(tmp_path):
    row = line(1)
    del row["choices"][0]["idxs"]
    with pytest.raises(InputError, match="neither `idxs` nor `decoding_steps`"):
        read_log(file(tmp_path, "a.jsonl", [row]))


def test_two_benchmarks_are_not_compared(tmp_path):
    with pytest.raises(InputError, match="no question in common"):
        pair(tmp_path, theirs=[line(7)])


def test_a_missing_file_is_refused_in_one_sentence():
    with pytest.raises(InputError, match=r"cannot read nowhere.jsonl .*recorded.path="):
        read_log("nowhere.jsonl")


def test_exchanged_run_and_baseline_are_refused(tmp_path):
    """Baselines are published without token counts; forward passes replace them in a baseline, never in a run."""
    uncounted = [line(81, tokens=(0,)), line(91, tokens=(0,))]
    with pytest.raises(InputError, match=r"no question of .* has token counts; were run and baseline exchanged"):
        pair(tmp_path, ours=uncounted)


def test_another_number_of_turns_is_noted(tmp_path):
    """Ids of two benchmarks may be the same numbers."""
    assert "1 of 2 questions have another number of turns" in note_text(pair(tmp_path, ours=[line(81), OURS[1]]))
    assert "another number of turns" not in note_text(pair(tmp_path))


def test_times_of_zero_throughout_leave_no_speed(tmp_path):
    comparison = pair(tmp_path, ours=[line(81, seconds=(0,)), line(91, seconds=(0,))])
    assert (
        comparison.rows[0]["speedup"]
        is comparison.rows[0]["tokens_per_second"]
        is comparison.rows[0]["speedup_paper_ci"]
        is None
    )
    assert comparison.rows[0]["tau"] == 2


def evaluate(*arguments):
    return subprocess.run(
        [sys.executable, "evaluate.py", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )


def test_the_command(tmp_path):
    ours, theirs = file(tmp_path, "ours.jsonl", OURS), file(tmp_path, "theirs.jsonl", THEIRS)
    command = (f"recorded.path={ours}", f"recorded.baseline={theirs}", f"out={tmp_path / 'out'}")
    run = evaluate(*command)
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rows"][0]["tau"] == pytest.approx(21 / 11)
    assert "another text" in (tmp_path / "out" / "report.md").read_text()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "another text" in page
    assert "<td>1.91 [1.80, 2.00] (1)</td>" in page  # tau with the number of its note
    svg = (tmp_path / "out" / "figures" / "acceptance_by_category.svg").read_text()
    assert "ours.jsonl, writing: 2.00" in svg
    assert "theirs.jsonl" not in svg  # the baseline has one token per forward pass
    assert log_page.rebuild_page(tmp_path / "out").read_text() == page
    again = evaluate(*command)
    assert again.returncode == 1
    assert "holds a report" in again.stderr
    alone = evaluate(f"recorded.baseline={theirs}")
    assert "recorded.path=" in alone.stderr
