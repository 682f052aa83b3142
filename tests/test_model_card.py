"""Which of several reports of one benchmark the card of a published head quotes."""

import json

import pytest

from ctcdraft.model_card import largest_reports, measurement_section


def report(run, name, prompts, date="2026-01-01", **changes):
    row = {
        "drafter": "ctc", "benchmark": "gsm8k", "temperature": 0.0, "nodes": 8, "prompts": prompts, "tau": 1.5,
        "tau_ci": None, "speedup": 1.1, "speedup_ci": None, "hardware": "a CPU", "dtype": "float32",
        "lossless": {"owes": "words", "equal": prompts, "rounding": 0, "prompts": prompts}, **changes,
    }  # fmt: skip
    where = {"git": {"commit": "0123456789"}, "date": date, "command": f"python evaluate.py out={name}"}
    (run / "evaluation" / name).mkdir(parents=True)
    (run / "evaluation" / name / "report.json").write_text(json.dumps({"rows": [row], "environment": where}))


def quoted(run):
    return [where["command"].rpartition("=")[2] for _, where in largest_reports(run, "ctc")]


@pytest.mark.parametrize("sizes", [(2, 120), (120, 2)])
def test_the_largest_report_of_a_benchmark_is_quoted(sizes, tmp_path):
    for name, prompts in zip("ab", sizes, strict=True):
        report(tmp_path, name, prompts, date=f"2026-01-0{prompts % 9}")
    assert quoted(tmp_path) == ["ab"[sizes.index(120)]]


def test_of_equally_large_reports_the_newer_is_quoted(tmp_path):
    for name, date in (("a", "2026-02-01"), ("b", "2026-03-01"), ("c", "2026-01-01")):
        report(tmp_path, name, 80, date)
    assert quoted(tmp_path) == ["b"]


def test_other_settings_are_quoted_too(tmp_path):
    """Another benchmark, another temperature, and a replay of more questions, which has no speed-up."""
    report(tmp_path, "a", 120)
    report(tmp_path, "b", 2, benchmark="mt_bench")
    report(tmp_path, "c", 3, temperature=1.0)
    report(tmp_path, "d", 1319, speedup=None)
    assert quoted(tmp_path) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("prompts", "said"), [(2, "2 of 1,319 questions of gsm8k; a CPU"), (1319, "1,319 questions of gsm8k; a CPU")]
)
def test_the_card_has_the_number_of_questions(prompts, said, tmp_path):
    report(tmp_path, "a", prompts)
    ((rows, where),) = largest_reports(tmp_path, "ctc")
    assert measurement_section(rows, where).startswith(f"{said}, float32, commit 0123456")


def test_an_evaluation_of_code_that_is_not_under_git_is_quoted(tmp_path):
    report(tmp_path, "a", 2)
    ((rows, where),) = largest_reports(tmp_path, "ctc")
    assert "commit 0123456, 2026-01-01" in measurement_section(rows, where)
    assert "code not under git, 2026-01-01" in measurement_section(rows, where | {"git": None})
