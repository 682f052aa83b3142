"""The questions of a benchmark, from a file or from the hub. It knows no model and no measure.

The readers are the corpus's where the shape is the same: what training and evaluation share has one home.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.corpus.readers import Paths, Record, find_files, get_column, read_hub_records, read_records
from ctcdraft.corpus.sources import project_conversations, to_prompts, with_instruction, word_problems
from ctcdraft.corpus.types import Prompt, normalize_text
from ctcdraft.errors import InputError, check_int

PUBLISHED_SIZES = {"mt_bench": 80, "gsm8k": 1319}  # questions of the published sets


@dataclass(frozen=True)
class Benchmark:
    """prompts: the first `limit` questions. hash: of all questions, so that a higher limit may go on later."""

    name: str
    prompts: tuple[Prompt, ...]
    hash: str

    @property
    def turns(self) -> int:
        return sum(len(prompt.turns) for prompt in self.prompts)


def mt_bench(path: str | None, name: str, hub: str, limit: int | None) -> Benchmark:
    """MT-Bench: 80 questions in 8 categories, two turns each; FastChat's question.jsonl, or the hub's copy.

    FastChat says question_id and turns where the hub says prompt_id and prompt. Its references are whole
    sample answers for a judge, which nothing here compares with.
    """
    with benchmark_error_advice():
        prompts = load_questions(path, lambda: read_hub_records(hub), mt_bench_prompts)
    return make_benchmark(prompts, name, limit, path or hub)


def mt_bench_prompts(found: Iterator[Record]) -> Iterator[Prompt]:
    return (mt_bench_prompt(where, record) for where, record in found)


def mt_bench_prompt(where: str, record: dict[str, Any]) -> Prompt:
    names = ("prompt_id", "prompt") if "prompt_id" in record else ("question_id", "turns")
    number, turns = get_column(record, names[0], None, where), get_column(record, names[1], list, where)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InputError(f"{where} has an empty turn or one that is not text; check benchmark.path=")
    return Prompt(str(number), get_column(record, "category", str, where), tuple(turns), None)


def gsm8k(
    path: str | None, name: str, hub: str, hub_config: str, split: str, instruction: str | None, limit: int | None
) -> Benchmark:
    """Grade-school problems with a number as reference; `instruction` follows each question."""
    with benchmark_error_advice():
        asked, place = with_instruction(instruction), f"benchmark {name}: {path or hub}"
        prompts = load_questions(
            path,
            lambda: read_hub_records(hub, name=hub_config, split=split),
            lambda found: to_prompts(word_problems(found, name), name, asked, place),
        )
    return make_benchmark(prompts, name, limit, path or hub)


def project_prompts(path: str, name: str, limit: int | None) -> Benchmark:
    """Prompts as this project writes them, some with a reference."""
    with benchmark_error_advice():
        asked, place = with_instruction(None), f"benchmark {name}: {path}"
        prompts = read_questions(
            question_files(path), lambda found: to_prompts(project_conversations(found), name, asked, place)
        )
    return make_benchmark(prompts, name, limit, path)


def load_questions(
    path: str | None, hub: Callable[[], Iterator[Record]], shaped: Callable[[Iterator[Record]], Iterator[Prompt]]
) -> list[Prompt]:
    """Return the questions of a path, or of the hub where there is none."""
    return list(shaped(hub())) if path is None else read_questions(question_files(path), shaped)


def make_benchmark(prompts: list[Prompt], name: str, limit: int | None, source: str) -> Benchmark:
    """The first `limit` questions, or all."""
    if not prompts:
        raise InputError(f"benchmark {name}: {source} holds no question; check benchmark.path=")
    if limit is not None:
        check_int(limit, "benchmark.limit")
    text = "\n".join(f"{prompt.id}\t{prompt.turns}\t{prompt.reference}" for prompt in prompts)
    return Benchmark(name, tuple(prompts[:limit]), hashlib.sha256(text.encode()).hexdigest()[:16])


@contextmanager
def benchmark_error_advice() -> Iterator[None]:
    """The readers advise about corpora; here the same keys are called benchmark."""
    try:
        yield
    except InputError as error:
        message = str(error)
        for ours in ("corpus.path=", "corpus="):
            message = message.replace(ours, ours.replace("corpus", "benchmark"))
        raise InputError(message) from error


NON_TEST_NAMES = re.compile(
    r"(?<![a-z])(train(ing)?|valid(ation)?|val|dev|answers?|reference(s|_answers?)?|judge?ments?|solutions?)(?![a-z])"
)
DATASET_DICT_FILE = "dataset_dict.json"  # of a folder that the package datasets has saved


def question_files(path: Paths) -> list[Path]:
    """Return the files to be read. Raises InputError where several were found and some hold no questions of a test."""
    if isinstance(path, str) and (Path(path).expanduser() / DATASET_DICT_FILE).is_file():
        raise InputError(
            f"{path} holds the splits of a data set as the package datasets saves them; write the test split to a file "
            "of JSON lines (to_json) and give that as benchmark.path="
        )
    found = find_files(path)
    if isinstance(path, str) and Path(path).expanduser().is_file():
        return found
    others = [file for file in found if NON_TEST_NAMES.search(file.name.lower())]
    if others:
        rest = [file for file in found if file not in others]
        instead = f"={rest[0]}" if len(rest) == 1 else "=FILE with the file of the test"
        raise InputError(
            f"{path} holds {join_names(others)}, which by the name is no test{describe_rest(rest)}; give "
            f"benchmark.path{instead}"
        )
    return found


def join_names(some: list[Path]) -> str:
    return ", ".join(file.name for file in some[:3]) + (", ..." if len(some) > 3 else "")


def describe_rest(rest: list[Path]) -> str:
    return f", beside {join_names(rest)}" if rest else ""


def read_questions(found: list[Path], shaped: Callable[[Iterator[Record]], Iterator[Prompt]]) -> list[Prompt]:
    """Return the questions of all files, behind one another. Raises InputError where two files share one.

    shaped: what makes questions of the records of one shape; it reads all files in one go, as it may number them.
    """
    where: list[Path] = []  # the file of each record

    def recorded() -> Iterator[Record]:
        for file in found:
            for record in read_records(str(file)):
                where.append(file)
                yield record

    prompts = list(shaped(recorded()))
    if len(found) > 1:
        refuse_shared_questions(prompts, where)
    return prompts


def refuse_shared_questions(prompts: list[Prompt], where: list[Path]) -> None:
    first: dict[tuple[str, ...], Path] = {}
    for prompt, file in zip(prompts, where, strict=True):
        asked = tuple(map(normalize_text, prompt.turns))
        if first.setdefault(asked, file) != file:
            raise InputError(
                f"{first[asked]} and {file.name} beside it both ask {prompt.turns[0][:60]!r}; give one of them as "
                "benchmark.path="
            )
