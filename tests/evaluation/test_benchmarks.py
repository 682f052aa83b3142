"""Benchmarks from local files: the first N questions, both formats of MT-Bench, and one sentence per mistake."""

import json

import pytest

from ctcdraft.errors import InputError
from ctcdraft.evaluation.benchmarks import gsm8k, mt_bench, project_prompts


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def grade_school(path, limit=None, instruction=None):
    return gsm8k(path, "gsm8k", "nowhere/hub", "main", "test", instruction, limit)


def test_mt_bench(tmp_path):
    ours = {"question_id": 81, "category": "writing", "turns": ["Compose", "Rewrite"]}
    hubs = {"prompt_id": 82, "category": "maths", "prompt": ["x + 4 = 7", "and 2x?"], "reference": ["3", "6"]}
    benchmark = mt_bench(write_lines(tmp_path / "q.jsonl", ours, hubs), "mt_bench", "nowhere/hub", None)
    assert [(prompt.id, prompt.category, len(prompt.turns)) for prompt in benchmark.prompts] == [
        ("81", "writing", 2),
        ("82", "maths", 2),
    ]
    assert sum(len(prompt.turns) for prompt in benchmark.prompts) == 4
    assert {prompt.reference for prompt in benchmark.prompts} == {None}


def test_gsm8k_takes_the_first_and_keeps_its_name(tmp_path):
    problems = [{"question": f"{n} + 1?", "answer": f"easy\n#### {n + 1}"} for n in range(5)]
    path = write_lines(tmp_path / "test.jsonl", *problems)
    whole, few = grade_school(path), grade_school(path, limit=2)
    assert [prompt.turns[0] for prompt in few.prompts] == ["0 + 1?", "1 + 1?"]
    assert few.prompts[1].reference == "2"
    assert few.hash == whole.hash
    assert grade_school(path, instruction="Think.").hash != whole.hash


def test_project_prompts(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", {"id": "a", "category": "sums", "turns": ["1 + 1?"], "reference": "2"})
    assert project_prompts(path, "tiny", None).prompts[0].reference == "2"


def problem(question):
    return {"question": question, "answer": "easy\n#### 1"}


def test_a_folder_with_training_problems_is_no_benchmark(tmp_path):
    """GSM8K as published: train and test side by side, in one format."""
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    test = write_lines(folder / "test.jsonl", problem("1 + 1?"))
    assert [prompt.turns for prompt in grade_school(str(folder)).prompts] == [("1 + 1?",)]
    write_lines(folder / "train.jsonl", problem("2 + 2?"))
    sentence = (
        f"{folder} holds train.jsonl, which by the name is no test set, beside test.jsonl; give benchmark.path={test}"
    )
    for path in (str(folder), f"{folder}/*.jsonl", [test, str(folder / "train.jsonl")]):
        with pytest.raises(InputError) as caught:
            grade_school(path)
        assert str(caught.value) == sentence.replace(str(folder), str(path), 1)
    assert grade_school(test).hash != grade_school(str(folder / "train.jsonl")).hash  # a file given by name is read
    (folder / "test.jsonl").unlink()
    with pytest.raises(
        InputError, match=r"holds train\.jsonl, which by the name is no test set; give benchmark\.path=FILE"
    ):
        grade_school(str(folder))


@pytest.mark.parametrize(
    "other",
    ["train-00000-of-00001.jsonl", "gsm8k_train.jsonl", "train_socratic.jsonl", "validation.jsonl", "dev.json.jsonl",
     "Train.jsonl.gz", "training.jsonl", "reference_answer.jsonl", "gpt-4_judgments.jsonl", "model_solutions.jsonl"],
)  # fmt: skip
def test_files_that_are_no_test_set_by_name_are_refused(tmp_path, other):
    write_lines(tmp_path / "questions.jsonl", problem("1 + 1?"))
    write_lines(tmp_path / other, problem("2 + 2?"))
    with pytest.raises(InputError, match=r"benchmark\.path=.*questions\.jsonl$") as caught:
        grade_school(str(tmp_path))
    assert other in str(caught.value)


def test_a_test_in_several_files_is_one_benchmark(tmp_path):
    """Such as constraints, latest and trained: names that contain train or test within a longer word."""
    for number, name in enumerate(("constraints", "latest", "trained", "test-00000-of-00002", "devices")):
        write_lines(tmp_path / f"{name}.jsonl", problem(f"{number} + 1?"))
    assert len(grade_school(str(tmp_path)).prompts) == 5


def test_two_files_with_one_question_are_refused(tmp_path):
    """Such as the same problems with other solutions, which GSM8K has beside the test set."""
    write_lines(tmp_path / "test.jsonl", problem("1 + 1?"), problem("2 + 2?"), problem("1 + 1?"))
    assert len(grade_school(str(tmp_path)).prompts) == 3  # repeated questions within one file are kept
    write_lines(tmp_path / "test_socratic.jsonl", problem("3 + 3?"), problem("2 +  2?"))
    with pytest.raises(
        InputError, match=r"test\.jsonl and test_socratic\.jsonl beside it both ask '2 \+  2\?'; give one"
    ):
        grade_school(str(tmp_path))


def test_a_folder_of_mt_bench_is_its_questions_alone(tmp_path):
    question = {"question_id": 81, "category": "writing", "turns": ["Compose", "Rewrite"]}
    path = write_lines(tmp_path / "question.jsonl", question)
    (tmp_path / "model_answer").mkdir()  # as FastChat stores answers
    write_lines(tmp_path / "model_answer" / "gpt-4.jsonl", {"question_id": 81, "choices": []})
    benchmark = mt_bench(str(tmp_path), "mt_bench", "nowhere/hub", None)
    assert benchmark == mt_bench(path, "mt_bench", "nowhere/hub", None)
    assert sum(len(prompt.turns) for prompt in benchmark.prompts) == 2
    write_lines(tmp_path / "gpt-4_judgment.jsonl", question | {"score": 9})
    with pytest.raises(InputError, match=rf"gpt-4_judgment\.jsonl.*; give benchmark\.path={path}"):
        mt_bench(str(tmp_path), "mt_bench", "nowhere/hub", None)
    with pytest.raises(InputError, match=r"holds train\.jsonl, which by the name is no test set"):
        project_prompts(write_folder(tmp_path / "own"), "tiny", None)


def write_folder(folder):
    folder.mkdir()
    for name in ("train", "held_out"):
        write_lines(folder / f"{name}.jsonl", {"id": name, "turns": [name]})
    return str(folder)


def test_a_saved_dictionary_of_splits_is_one_sentence(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([problem("1 + 1?")])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(InputError, match=r"saved holds the splits of a data set .* write the test split to a file"):
        grade_school(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: grade_school("absent.jsonl"), "benchmark.path="),
        (lambda path: grade_school(write_lines(path, {"turns": ["a"]})), "no column `question`.*benchmark="),
        (lambda path: grade_school(write_lines(path)), "benchmark.path="),
        (lambda path: mt_bench(write_lines(path), "mt_bench", "", None), "holds no question"),
        (
            lambda path: mt_bench(write_lines(path, {"question_id": 1, "turns": [], "category": ""}), "", "", None),
            "empty",
        ),
        (
            lambda path: grade_school(write_lines(path, {"question": "a", "answer": "#### 1"}), limit=0),
            "limit must be .*, got 0",
        ),
        (
            lambda path: grade_school(write_lines(path, {"question": "a", "answer": "#### 1"}), limit="few"),
            "limit must be .*, got few",
        ),
    ],
)
def test_every_mistake_is_one_sentence(make, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence) as caught:
        make(tmp_path / "file.jsonl")
    assert "corpus" not in str(caught.value)
    assert "\n" not in str(caught.value)
