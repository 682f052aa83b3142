"""Benchmarks: the questions of MT-Bench, GSM8K and our own prompts, from files or from the Hugging Face hub.

A folder of a data set often holds several files of one format: training problems beside the test set, the same
questions with other solutions, answers of models. Together they are no published benchmark, and may hold questions a
head was trained on. So files of a folder or pattern are refused if their names show that they are not the test set, or
if two of them share a question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ctcdraft.corpus.readers import Paths, Record, find_files, get_column, read_hub_records, read_records
from ctcdraft.corpus.sources import project_conversations, to_prompts, with_instruction, word_problems
from ctcdraft.corpus.types import Prompt, normalize_text
from ctcdraft.errors import InputError, check_int
from ctcdraft.models.fingerprint import text_hash

NON_TEST_NAMES = re.compile(
    r"(?<![a-z])(train(ing)?|valid(ation)?|val|dev|answers?|reference(s|_answers?)?|judge?ments?|solutions?)(?![a-z])"
)
DATASET_DICT_FILE = "dataset_dict.json"  # written by datasets.DatasetDict.save_to_disk
PUBLISHED_SIZES = {"mt_bench": 80, "gsm8k": 1319}  # questions of the published sets


@dataclass(frozen=True)
class Benchmark:
    """The first `limit` questions, and a hash of all of them, so that a higher limit can resume an evaluation."""

    name: str
    prompts: tuple[Prompt, ...]
    hash: str
    rest: tuple[Prompt, ...] = ()  # the questions beyond the limit


def mt_bench(path: str | None, name: str, hub: str, limit: int | None) -> Benchmark:
    """Return MT-Bench: 80 questions in 8 categories, two turns each; from FastChat's question.jsonl or the hub."""
    return load_benchmark(name, path or hub, path, lambda: read_hub_records(hub), mt_bench_prompts, limit)


def mt_bench_prompts(records: Iterator[Record]) -> Iterator[Prompt]:
    for where, record in records:
        # FastChat's fields question_id and turns are prompt_id and prompt on the hub.
        names = ("prompt_id", "prompt") if "prompt_id" in record else ("question_id", "turns")
        number, turns = get_column(record, names[0], None, where), get_column(record, names[1], list, where)
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InputError(f"{where} has an empty turn or one that is not text; check benchmark.path=")
        category = get_column(record, "category", str, where)
        yield Prompt(str(number), category, tuple(turns), None)  # its references are sample answers for a judge


def gsm8k(
    path: str | None, name: str, hub: str, hub_config: str, split: str, instruction: str | None, limit: int | None
) -> Benchmark:
    """Return GSM8K: grade-school problems with a number as reference; `instruction` follows each question."""
    source = path or hub

    def parse(records: Iterator[Record]) -> Iterator[Prompt]:
        problems, instruct = word_problems(records, name), with_instruction(instruction)
        return to_prompts(problems, name, instruct, f"benchmark {name}: {source}")

    return load_benchmark(name, source, path, lambda: read_hub_records(hub, name=hub_config, split=split), parse, limit)


def project_prompts(path: str, name: str, limit: int | None) -> Benchmark:
    """Return prompts in this project's format, some with a reference."""

    def parse(records: Iterator[Record]) -> Iterator[Prompt]:
        return to_prompts(project_conversations(records), name, with_instruction(None), f"benchmark {name}: {path}")

    return load_benchmark(name, path, path, lambda: iter(()), parse, limit)  # it is not on the hub


def load_benchmark(
    name: str,
    source: str,
    path: str | None,
    hub: Callable[[], Iterator[Record]],
    parse: Callable[[Iterator[Record]], Iterator[Prompt]],
    limit: int | None,
) -> Benchmark:
    """Return a benchmark of the first `limit` questions, or of all, of a path, or of the hub if path is None."""
    try:
        prompts = list(parse(hub())) if path is None else read_questions(question_files(path), parse)
    except InputError as error:
        # The corpus readers advise about corpus.path=, which is another key here.
        message = str(error).replace("corpus.path=", "benchmark.path=").replace("corpus=", "benchmark=")
        raise InputError(message) from error
    if not prompts:
        raise InputError(f"benchmark {name}: {source} holds no questions; check benchmark.path=")
    if limit is not None:
        check_int(limit, "benchmark.limit")
    text = "\n".join(f"{prompt.id}\t{prompt.turns}\t{prompt.reference}" for prompt in prompts)
    asked = tuple(prompts[:limit])
    return Benchmark(name, asked, text_hash(text), tuple(prompts[len(asked) :]))


def question_files(path: Paths) -> list[Path]:
    """Return the files to read; raise InputError if several match and some are not a test set by their names."""
    if isinstance(path, str) and (Path(path).expanduser() / DATASET_DICT_FILE).is_file():
        raise InputError(
            f"{path} holds the splits of a data set saved by the package datasets; write the test split to a file "
            "of JSON lines (to_json) and give that as benchmark.path="
        )
    matching = find_files(path)
    if isinstance(path, str) and Path(path).expanduser().is_file():
        return matching  # a single file was named on purpose
    others = [file for file in matching if NON_TEST_NAMES.search(file.name.lower())]
    if others:
        rest = [file for file in matching if file not in others]
        beside = f", beside {join_names(rest)}" if rest else ""
        instead = f"={rest[0]}" if len(rest) == 1 else "=FILE with the file of the test set"
        raise InputError(
            f"{path} holds {join_names(others)}, which by the name is no test set{beside}; give benchmark.path{instead}"
        )
    return matching


def join_names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths[:3]) + (", ..." if len(paths) > 3 else "")


def read_questions(paths: list[Path], parse: Callable[[Iterator[Record]], Iterator[Prompt]]) -> list[Prompt]:
    """Return the questions of all files in order; raise InputError if two files share one."""
    sources: list[Path] = []  # the file of each record

    def read_all() -> Iterator[Record]:
        for path in paths:
            for record in read_records(str(path)):
                sources.append(path)
                yield record

    prompts = list(parse(read_all()))  # once for all files, as it may number the records
    first: dict[tuple[str, ...], Path] = {}  # the first file that holds a question
    for prompt, source in zip(prompts, sources, strict=len(paths) > 1):
        question = tuple(map(normalize_text, prompt.turns))
        if first.setdefault(question, source) != source:
            raise InputError(
                f"{first[question]} and {source.name} beside it both ask {prompt.turns[0][:60]!r}; give one of them "
                "as benchmark.path="
            )
    return prompts
