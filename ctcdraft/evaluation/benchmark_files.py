"""The files of a benchmark: one set of questions, and nothing else that lies beside it.

A folder of a data set holds several files of one shape: training problems beside the test, the same questions with
other solutions, answers of models. Read together they are no published benchmark, and hold questions that a head
may have been trained on. So one file that is named is read as it is, while several, or what a folder or a
pattern gives, are refused if their names say that they are something else, or if two have a question in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ctcdraft.corpus.readers import Paths, Record, find_files, read_records
from ctcdraft.corpus.types import Prompt, normalize_text
from ctcdraft.errors import InputError

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
