"""Answer files in FastChat's format, as Medusa, EAGLE, CTC-drafter and Spec-Bench write them.

One JSON object per line and question. Medusa, EAGLE and CTC-drafter write `idxs`, the 0-based index of a turn's last
forward pass; Spec-Bench writes `decoding_steps`, their number, and a `category`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError

# FastChat numbers MT-Bench's questions by category, ten in each; only Spec-Bench names the category.
MT_BENCH_FIRST_ID = 81
MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
NUMBER_FIELDS = {"new_tokens": "tokens", "wall_time": "seconds"}


@dataclass(frozen=True)
class LoggedTurn:
    """One turn, with the fields by which the metrics of our own responses measure it."""

    text: str
    token_count: int  # 0 where the file does not hold it
    pass_count: int  # forward passes
    seconds: float

    @property
    def tokens(self) -> range:
        return range(self.token_count)

    @property
    def passes(self) -> range:
        return range(self.pass_count)

    @property
    def committed(self) -> int:
        # All, because a file does not distinguish the prefill's token from the others.
        return self.token_count

    @property
    def seconds_decode(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class LoggedRun:
    """One file: turns by question id, in the order of the file."""

    name: str
    models: tuple[str, ...]
    answers: Mapping[str, tuple[LoggedTurn, ...]]
    categories: Mapping[str, str]
    repeated: tuple[str, ...]  # question ids that occur more than once
    choices: int  # most responses to a question
    began: float | None

    def turns(self) -> list[LoggedTurn]:
        return [turn for answer in self.answers.values() for turn in answer]


def read_log(path: str) -> LoggedRun:
    """Return an answer file, gzipped or not. Raises InputError."""
    answers: dict[str, tuple[LoggedTurn, ...]] = {}
    categories: dict[str, str] = {}
    repeated, models, stamps, choices = [], [], [], 0
    for where, row in read_rows(path):
        question = str(checked_field(row, "question_id", (int, str), where))
        # The last line counts: these programs append to the file of an earlier attempt, and FastChat's own clean-up
        # keeps the last line.
        if question in answers:
            repeated.append(question)
        responses = checked_field(row, "choices", (list,), where)
        if not responses:
            raise InputError(f"{where} has no answer in `choices`; record that question again or remove the line")
        choices = max(choices, len(responses))
        answers[question] = parse_turns(responses[0], where)
        models.append(str(row.get("model_id", "unnamed")))
        if "category" in row:
            categories[question] = str(row["category"])
        if isinstance(row.get("tstamp"), (int, float)):
            stamps.append(float(row["tstamp"]))
    if not answers:
        raise InputError(f"{path} holds no answer; give an answer file as recorded.path= or recorded.baseline=")
    names, again = tuple(dict.fromkeys(models)), tuple(dict.fromkeys(repeated))
    named = categories or mt_bench_categories(answers)
    return LoggedRun(Path(path).name, names, answers, named, again, choices, min(stamps, default=None))


def read_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as stream:
            for number, line in enumerate(stream, 1):
                where = f"line {number} of {path}"
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError:
                    raise InputError(f"{where} is not JSON; if it is truncated, remove it") from None
                if not isinstance(row, dict):
                    raise InputError(f"{where} is not a JSON object; give one question per line")
                yield where, row
    except (OSError, EOFError, UnicodeDecodeError) as error:
        give = "give an answer file as recorded.path= or recorded.baseline="
        raise InputError(f"cannot read {path} ({' '.join(str(error).split())}); {give}") from error


def parse_turns(choice: Any, where: str) -> tuple[LoggedTurn, ...]:
    if not isinstance(choice, dict):
        raise InputError(f"{where}: `choices` must hold objects with turns, new_tokens and wall_time")
    texts = checked_field(choice, "turns", (list,), where)
    columns = [checked_numbers(choice, name, len(texts), where) for name in NUMBER_FIELDS]
    if "decoding_steps" in choice:
        steps = checked_numbers(choice, "decoding_steps", len(texts), where)
    elif "idxs" in choice:
        steps = [index + 1 for index in checked_numbers(choice, "idxs", len(texts), where)]
    else:
        raise InputError(f"{where} has neither `idxs` nor `decoding_steps`, so its forward passes are unknown")
    return tuple(
        LoggedTurn(str(text), int(tokens), int(passes), float(seconds))
        for text, tokens, seconds, passes in zip(texts, *columns, steps, strict=True)
    )


def checked_numbers(choice: dict[str, Any], name: str, turns: int, where: str) -> list[float]:
    values = checked_field(choice, name, (list,), where)
    if len(values) != turns:
        raise InputError(f"{where} has {turns} turns but {len(values)} values in `{name}`; remove the line")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise InputError(f"{where} has {value!r} in `{name}`, which is not a count or time; fix or remove the line")
    return values


def checked_field(row: dict[str, Any], name: str, types: tuple[type, ...], where: str) -> Any:
    if name not in row:
        raise InputError(f"{where} has no `{name}`; it has {', '.join(sorted(row)) or 'nothing'}")
    if not isinstance(row[name], types):
        raise InputError(f"{where}: `{name}` is {row[name]!r}, not {' or '.join(kind.__name__ for kind in types)}")
    return row[name]


def mt_bench_categories(ids: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """Return the category of every id if all ids are MT-Bench's; nothing otherwise."""
    last = MT_BENCH_FIRST_ID + 10 * len(MT_BENCH_CATEGORIES) - 1
    # Another benchmark may share some of these ids, so one foreign id is enough to name none.
    if not all(one.isdigit() and MT_BENCH_FIRST_ID <= int(one) <= last for one in ids):
        return {}
    return {one: MT_BENCH_CATEGORIES[(int(one) - MT_BENCH_FIRST_ID) // 10] for one in ids}
