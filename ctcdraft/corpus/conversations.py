"""Prompts from files or from the hub, one reader per shape. It knows nothing of tokens or of the base."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError

Paths = str | Sequence[str]
Record = tuple[str, dict[str, Any]]  # where it stands, for the error sentences, and what it says

USERS = {"human", "user"}


@dataclass(frozen=True)
class Prompt:
    """What a user says, turn by turn; the answers in between are the base's own."""

    id: str
    category: str
    turns: tuple[str, ...]
    reference: str | None


def project_prompts(path: Paths, name: str, limit: int | None, seed: int) -> list[Prompt]:
    """Prompts as this project writes them: {"id", "category", "turns": [...], "reference"?} on every line."""
    prompts = []
    for where, record in records(path):
        turns = column(record, "turns", list, where)
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InputError(f"{where} has an empty turn or one that is not text; correct or remove it")
        name_of, category = str(column(record, "id", None, where)), str(record.get("category", name))
        prompts.append(Prompt(name_of, category, tuple(turns), record.get("reference")))
    return chosen(prompts, limit, seed, f"corpus {name}: {path}")


def sharegpt(path: Paths | None, name: str, hub: str, hub_file: str, limit: int | None, seed: int) -> list[Prompt]:
    """The user turns of ShareGPT conversations or OpenAI `messages`; system turns and old answers go.

    A prompt is named by a hash of its turns: ids in the wild repeat, and one prompt answered by ten models
    is ten conversations but only one prompt.
    """
    found = records(path) if path is not None else hub_records(hub, data_files=hub_file)
    prompts: dict[str, Prompt] = {}
    for where, record in found:
        turns = tuple(user_turns(record, where))
        if turns:
            key = hashlib.sha256("\0".join(turns).encode()).hexdigest()[:16]
            prompts.setdefault(key, Prompt(key, name, turns, None))
    return chosen(list(prompts.values()), limit, seed, f"corpus {name}: {path or hub}")


def gsm8k(
    path: Paths | None,
    name: str,
    hub: str,
    hub_config: str,
    split: str,
    instruction: str | None,
    limit: int | None,
    seed: int,
) -> list[Prompt]:
    """Grade-school problems; the number after `####` is the reference, `instruction` follows the question."""
    found = records(path) if path is not None else hub_records(hub, name=hub_config, split=split)
    prompts = []
    for number, (where, record) in enumerate(found):
        question = column(record, "question", str, where)
        _, mark, result = str(record.get("answer", "")).rpartition("####")
        turn = f"{question}\n{instruction}" if instruction else question
        reference = result.strip().replace(",", "") if mark else None
        prompts.append(Prompt(f"{name}-{number:05d}", name, (turn,), reference))
    return chosen(prompts, limit, seed, f"corpus {name}: {path or hub}")


def chosen(prompts: list[Prompt], limit: int | None, seed: int, where: str) -> list[Prompt]:
    """All prompts, or `limit` of them, picked by a hash of seed and id.

    So a choice of 50 is part of the choice of 100, and the order of the file does not matter.
    """
    if not prompts:
        raise InputError(f"{where} holds no prompt with a user turn; check corpus.path=")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InputError(f"{where} holds two prompts with the id {prompt.id}; give each its own id")
        seen.add(prompt.id)
    if limit is None:
        return prompts
    if limit < 1:
        raise InputError(f"limit is {limit}, which leaves nothing of {where}; give 1 or more, or null")
    return sorted(prompts, key=lambda prompt: hashlib.sha256(f"{seed}:{prompt.id}".encode()).digest())[:limit]


def user_turns(record: dict[str, Any], where: str) -> Iterator[str]:
    shape = "messages" if "messages" in record else "conversations"
    for message in column(record, shape, list, where):
        speaker = message.get("from", message.get("role")) if isinstance(message, dict) else None
        said = message.get("value", message.get("content")) if isinstance(message, dict) else None
        if speaker is None:
            raise InputError(
                f"{where} has a message {json.dumps(message)[:60]} in `{shape}` without a speaker; "
                "each needs from and value, or role and content"
            )
        if speaker in USERS and isinstance(said, str) and said.strip():
            yield said.strip()


def column(record: dict[str, Any], name: str, kind: type | None, where: str) -> Any:
    if name not in record:
        raise InputError(
            f"{where} has no column `{name}` (found: {', '.join(record) or 'nothing'}); "
            "check corpus.path=, or choose the corpus= whose shape this is"
        )
    if kind is not None and not isinstance(record[name], kind):
        found = type(record[name]).__name__
        raise InputError(f"{where} has a {found} as `{name}` instead of a {kind.__name__}; correct that line")
    return record[name]


def records(path: Paths) -> Iterator[Record]:
    """Every JSON object of a file, of several, of a glob or of a folder; .gz is read as it is."""
    for file in files(path):
        text = text_of(file)
        for where, entry in entries(text, file) if text.lstrip().startswith("[") else lines(text, file):
            if not isinstance(entry, dict):
                raise InputError(f"{where} is a {type(entry).__name__} instead of an object; check corpus.path=")
            yield where, entry


def entries(text: str, file: Path) -> Iterator[tuple[str, Any]]:
    for number, entry in enumerate(parsed(text, str(file)), 1):
        yield f"entry {number} of {file}", entry


def lines(text: str, file: Path) -> Iterator[tuple[str, Any]]:
    # Not splitlines(): it would also split at U+2028, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"line {number} of {file}"
            yield where, parsed(line, where)


def parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error}); correct or remove it") from error


def text_of(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError) as error:
        raise InputError(f"cannot read {file}: {error}; fetch it again, or check corpus.path=") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def files(path: Paths) -> list[Path]:
    """In sorted order. A folder gives its .jsonl files; only where it has none, its .json files.

    (Beside shards in .jsonl, a .json file is usually a description, such as our own manifest.json.)
    """
    found: list[Path] = []
    for one in [path] if isinstance(path, str) else path:
        place = Path(one).expanduser()
        if place.is_dir():
            by_line = [*place.glob("*.jsonl"), *place.glob("*.jsonl.gz")]
            here = by_line or [*place.glob("*.json"), *place.glob("*.json.gz")]
        else:
            here = [place] if place.is_file() else [Path(match) for match in glob.glob(str(place))]
        if not here:
            what = "a folder without .jsonl or .json files" if place.is_dir() else "not there"
            raise InputError(f"{place} is {what}; give a file, a folder or a glob of prompts as corpus.path=")
        found += sorted(here)
    return found


def hub_records(hub: str, split: str = "train", **selection: Any) -> Iterator[Record]:
    """Rows of a data set of the Hugging Face hub, from its local cache where it is there already."""
    import datasets

    try:
        rows = datasets.load_dataset(hub, split=split, **selection)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"cannot get {hub} from the hub ({reason}); give a local copy as corpus.path=, or go online"
        ) from error
    return ((f"row {number} of {hub}", row) for number, row in enumerate(rows))
