"""Corpora of prompts from ShareGPT, GSM8K and this project's own files: targets of configs/corpus.

Each source reads one format; then all take the same way through `build_corpus`:

    conversations -> cleaning (filters.py) -> decontamination -> prompts with unique ids -> optional subset

Every conversation that was read is counted as kept or under exactly one reason for dropping it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ctcdraft.corpus.decontamination import Decontamination
from ctcdraft.corpus.filters import Cleaning
from ctcdraft.corpus.readers import Paths, Record, get_column, read_hub_records, read_records
from ctcdraft.corpus.types import USER, Conversation, Corpus, Prompt, drop_reasons, normalize_text, prompt_id
from ctcdraft.errors import InputError

EARLIER_PART = "in an earlier part"  # reason in the account of a mixture


def sharegpt(
    path: Paths | None,
    name: str,
    hub: str,
    hub_file: str,
    cleaning: Cleaning,
    leakage: Decontamination,
    limit: int | None,
    seed: int,
) -> Corpus:
    """Return the user turns of ShareGPT conversations or OpenAI `messages`."""
    records = read_records(path) if path is not None else read_hub_records(hub, data_files=hub_file)
    conversations = (Conversation(parse_messages(record, where)) for where, record in records)
    return build_corpus(conversations, f"corpus {name}: {path or hub}", name, cleaning, leakage, limit, seed)


def gsm8k(
    path: Paths | None,
    name: str,
    hub: str,
    hub_config: str,
    split: str,
    instruction: str | None,
    cleaning: Cleaning,
    leakage: Decontamination,
    limit: int | None,
    seed: int,
) -> Corpus:
    """Return grade-school problems. `instruction` is appended to each question after cleaning and decontamination."""
    records = read_records(path) if path is not None else read_hub_records(hub, name=hub_config, split=split)
    source, format_turn = f"corpus {name}: {path or hub}", with_instruction(instruction)
    return build_corpus(word_problems(records, name), source, name, cleaning, leakage, limit, seed, format_turn)


def project_prompts(
    path: Paths, name: str, cleaning: Cleaning, leakage: Decontamination, limit: int | None, seed: int
) -> Corpus:
    """Return prompts of this project's format: {"id", "category", "turns": [...], "reference"?} on every line."""
    conversations = project_conversations(read_records(path))
    return build_corpus(conversations, f"corpus {name}: {path}", name, cleaning, leakage, limit, seed)


def mixture(path: None, name: str, parts: Mapping[str, Callable[[], Corpus]]) -> Corpus:
    """Return the concatenation of several corpora, each cleaned and limited by itself, with their accounts added up.

    A prompt that several parts have is kept in the first of them and counted as dropped. Raise InputError where one id
    stands for different prompts.
    """
    if path is not None:
        keys = " ".join(f"corpus.parts.{part}.path=FILE" for part in parts)
        raise InputError(f"corpus.path={path}, but corpus {name} has several; give {keys}")
    corpora = [load_part(part, load) for part, load in parts.items()]
    prompts = drop_repeated_prompts([corpus.prompts for corpus in corpora])
    (repeated, count), *_ = Counter(prompt.id for prompt in prompts).most_common(1)
    if count > 1:
        raise InputError(
            f"{count} different prompts of corpus {name} ({', '.join(parts)}) have the id {repeated}; give each an id "
            "of its own, or leave one part out"
        )
    account = sum_accounts([corpus.account for corpus in corpora])
    dropped = account.get("dropped", {}) | {EARLIER_PART: account["kept"] - len(prompts)}
    return Corpus(prompts, account | {"kept": len(prompts), "dropped": dropped})


def drop_repeated_prompts(parts: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """Return the prompts of all parts without those whose normalised turns an earlier part has."""
    unique: list[Prompt] = []
    earlier: set[tuple[str, ...]] = set()
    for prompts in parts:
        normalized = [tuple(map(normalize_text, prompt.turns)) for prompt in prompts]
        unique += [prompt for prompt, turns in zip(prompts, normalized, strict=True) if turns not in earlier]
        earlier.update(normalized)
    return unique


def load_part(name: str, load: Callable[[], Corpus]) -> Corpus:
    """Return load(); its errors name the keys of this part."""
    try:
        return load()
    except InputError as error:
        raise InputError(str(error).replace("corpus.", f"corpus.parts.{name}.")) from error


def sum_accounts(accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """[{read: 2, dropped: {empty: 1}}, {read: 3, dropped: {}}]   ->   {read: 5, dropped: {empty: 1}}"""
    keys = dict.fromkeys(key for account in accounts for key in account)
    values = {key: [account[key] for account in accounts if key in account] for key in keys}
    return {key: sum_accounts(some) if isinstance(some[0], Mapping) else sum(some) for key, some in values.items()}


def with_instruction(instruction: str | None) -> Callable[[str], str]:
    """Return a function that appends the instruction to a question."""
    return lambda turn: f"{turn}\n{instruction}" if instruction else turn


def build_corpus(
    conversations: Iterable[Conversation],
    source: str,
    name: str,
    cleaning: Cleaning,
    leakage: Decontamination,
    limit: int | None,
    seed: int,
    format_turn: Callable[[str], str] = str,
) -> Corpus:
    """Clean, decontaminate and sample conversations; raise InputError if no prompt is left.

    Args:
        source: where the conversations come from, for error messages.
        format_turn: applied to every user turn after cleaning and decontamination.
    """
    if limit is not None and not (isinstance(limit, int) and limit >= 1):
        raise InputError(f"corpus.limit={limit} leaves nothing of {source}; give an integer >= 1, or null")
    dropped, shortened, leaked = Counter[str](), Counter[str](), Counter[str]()
    read, clean = CountingIterator(), CountingIterator()
    cleaned = cleaning.clean(read(conversations), dropped, shortened)
    prompts = to_prompts(clean(leakage.drop_leaked(cleaned, leaked)), name, format_turn, source)
    kept = list(sample_prompts(prompts, limit, seed))
    if not kept:
        reasons_text = ", ".join(f"{reason} {count:,}" for reason, count in drop_reasons(dropped, leaked).items())
        speaker_counts = ", ".join(f"{speaker} {count:,}" for speaker, count in read.speakers.most_common(4))
        raise InputError(
            f"{source} holds no prompt with a user turn that passes cleaning ({read.count:,} conversations read"
            + (f"; dropped: {reasons_text}" if reasons_text else "")
            + (f"; speakers: {speaker_counts}" if speaker_counts else "")
            + "); check corpus.path= and corpus.cleaning"
        )
    account = {
        "read": read.count,
        "kept": len(kept),
        "not_asked": clean.count - len(kept),
        "dropped": dict(dropped),
        "leaked": dict(leaked),
        "shortened": {step: count for step, count in shortened.items() if count},
    }
    return Corpus(kept, account)


class CountingIterator:
    """Passes conversations through and counts them, and the speakers of the first thousand."""

    def __init__(self) -> None:
        self.count = 0
        self.speakers: Counter[str] = Counter()

    def __call__(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        for conversation in conversations:
            if self.count < 1000:
                self.speakers.update(speaker for speaker, _ in conversation.turns)
            self.count += 1
            yield conversation


def to_prompts(
    conversations: Iterable[Conversation], name: str, format_turn: Callable[[str], str], source: str
) -> Iterator[Prompt]:
    """Yield conversations as prompts; raise InputError if two have the same id in the source."""
    seen: set[str] = set()
    for conversation in conversations:
        if conversation.id is not None:
            if conversation.id in seen:
                raise InputError(f"{source} holds two prompts with the id {conversation.id}; give each its own id")
            seen.add(conversation.id)
        turns = conversation.user_turns
        key, category = conversation.id or prompt_id(turns), conversation.category or name
        yield Prompt(key, category, tuple(map(format_turn, turns)), conversation.reference)


def sample_prompts(prompts: Iterator[Prompt], limit: int | None, seed: int) -> Iterable[Prompt]:
    """Return all prompts, or the `limit` of them with the smallest hash of seed and id.

    So the sample of 50 is a subset of the sample of 100, and does not depend on the order of the file.
    """
    if limit is None:
        return prompts
    return heapq.nsmallest(limit, prompts, key=lambda prompt: hashlib.sha256(f"{seed}:{prompt.id}".encode()).digest())


def parse_messages(record: dict[str, Any], where: str) -> tuple[tuple[str, str | None], ...]:
    """Return (speaker, text) turns from ShareGPT's keys (from, value) or OpenAI's (role, content)."""
    key = "messages" if "messages" in record else "conversations"
    turns = []
    for message in get_column(record, key, list, where):
        speaker = message.get("from", message.get("role")) if isinstance(message, dict) else None
        if not isinstance(speaker, str):
            raise InputError(
                f"{where} has a message {json.dumps(message)[:60]} in `{key}` without a speaker; "
                "each needs from and value, or role and content"
            )
        turns.append((speaker, message_text(message.get("value", message.get("content")))))
    return tuple(turns)


def message_text(value: Any) -> str | None:
    """Return a text, or OpenAI's list of text parts joined; None for an image, a number or nothing."""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    return value if isinstance(value, str) else None


def word_problems(records: Iterable[Record], name: str) -> Iterator[Conversation]:
    """Yield GSM8K's questions; the number after `####` is the reference."""
    for number, (where, record) in enumerate(records):
        question = get_column(record, "question", str, where)
        _, mark, result = str(record.get("answer", "")).rpartition("####")
        reference = result.strip().replace(",", "") if mark else None
        yield Conversation(((USER, question),), f"{name}-{number:05d}", name, reference)


def project_conversations(records: Iterable[Record]) -> Iterator[Conversation]:
    """Yield the prompts of this project's format; raise InputError for an empty turn."""
    for where, record in records:
        turns = get_column(record, "turns", list, where)
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InputError(f"{where} has an empty turn or one that is not text; correct or remove it")
        key = str(get_column(record, "id", None, where))
        user_turns = tuple((USER, turn) for turn in turns)
        yield Conversation(user_turns, key, record.get("category"), record.get("reference"))
