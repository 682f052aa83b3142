"""Benchmarks from local files: first N, both spellings of MT-Bench, and one sentence for what is wrong."""

import json

import pytest

from ctcdraft.errors import InputError
from ctcdraft.evaluation.benchmarks import gsm8k, mt_bench, project_prompts


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def grade_school(path, limit=None, instruction=None):
    return gsm8k(path, "gsm8k", "nowhere/hub", "main", "test", instruction, limit)


def test_mt_bench(tmp_path):
    ours = {"question_id": 81, "category": "writing", "turns": ["Compose", "Rewrite"]}
    hubs = {"prompt_id": 82, "category": "maths", "prompt": ["x + 4 = 7", "and 2x?"], "reference": ["3", "6"]}
    made = mt_bench(written(tmp_path / "q.jsonl", ours, hubs), "mt_bench", "nowhere/hub", None)
    assert [(prompt.id, prompt.category, len(prompt.turns)) for prompt in made.prompts] == [
        ("81", "writing", 2),
        ("82", "maths", 2),
    ]
    assert made.turns == 4
    assert {prompt.reference for prompt in made.prompts} == {None}


def test_gsm8k_takes_the_first_and_keeps_its_name(tmp_path):
    problems = [{"question": f"{n} + 1?", "answer": f"easy\n#### {n + 1}"} for n in range(5)]
    path = written(tmp_path / "test.jsonl", *problems)
    whole, few = grade_school(path), grade_school(path, limit=2)
    assert [prompt.turns[0] for prompt in few.prompts] == ["0 + 1?", "1 + 1?"]
    assert few.prompts[1].reference == "2"
    assert few.hash == whole.hash
    assert grade_school(path, instruction="Think.").hash != whole.hash


def test_project_prompts(tmp_path):
    path = written(tmp_path / "p.jsonl", {"id": "a", "category": "sums", "turns": ["1 + 1?"], "reference": "2"})
    assert project_prompts(path, "tiny", None).prompts[0].reference == "2"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: grade_school("absent.jsonl"), "benchmark.path="),
        (lambda path: grade_school(written(path, {"turns": ["a"]})), "no column `question`.*benchmark="),
        (lambda path: grade_school(written(path)), "benchmark.path="),
        (lambda path: mt_bench(written(path), "mt_bench", "", None), "holds no question"),
        (lambda path: mt_bench(written(path, {"question_id": 1, "turns": [], "category": ""}), "", "", None), "empty"),
        (lambda path: grade_school(written(path, {"question": "a", "answer": "#### 1"}), limit=0), "limit=0"),
        (lambda path: grade_school(written(path, {"question": "a", "answer": "#### 1"}), limit="few"), "limit=few"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(make, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence) as caught:
        make(tmp_path / "file.jsonl")
    assert "corpus" not in str(caught.value)
    assert "\n" not in str(caught.value)
