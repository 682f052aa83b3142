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

EARLIER_PART = "in an earlier part"  # reason in the account of a mixture, stored in manifests


def sharegpt(path: Paths | None, name: str, hub: str, hub_file: str, **selection: Any) -> Corpus:
    """Return the user turns of ShareGPT conversations or OpenAI `messages`; `selection` as in `build_corpus`."""
    records = read_records(path) if path is not None else read_hub_records(hub, data_files=hub_file)
    conversations = (Conversation(parse_messages(record, where)) for where, record in records)
    return build_corpus(conversations, path or hub, name, **selection)


def gsm8k(
    path: Paths | None, name: str, hub: str, hub_config: str, split: str, instruction: str | None, **selection: Any
) -> Corpus:
    """Return grade-school problems. `instruction` is appended to each question after cleaning and decontamination."""
    records = read_records(path) if path is not None else read_hub_records(hub, name=hub_config, split=split)
    format_turn = with_instruction(instruction)
    return build_corpus(word_problems(records, name), path or hub, name, format_turn=format_turn, **selection)


def project_prompts(path: Paths, name: str, **selection: Any) -> Corpus:
    """Return prompts of this project's format: {"id", "category", "turns": [...], "reference"?} on every line."""
    return build_corpus(project_conversations(read_records(path)), path, name, **selection)


def mixture(path: None, name: str, parts: Mapping[str, Callable[[], Corpus]]) -> Corpus:
    """Return the concatenation of several corpora, each cleaned and limited by itself, with their accounts added up.

    A prompt that several parts have is kept in the first of them and counted as dropped. Raise InputError where one id
    stands for different prompts.
    """
    if path is not None:
        keys = " ".join(f"corpus.parts.{part}.path=FILE" for part in parts)
        raise InputError(f"corpus.path={path}, but corpus {name} has several; give {keys}")
    corpora: list[Corpus] = []
    for part, load in parts.items():
        try:
            corpora.append(load())
        except InputError as error:  # the part names its keys as if it were the whole corpus
            raise InputError(str(error).replace("corpus.", f"corpus.parts.{part}.")) from error
    prompts: list[Prompt] = []
    earlier: set[tuple[str, ...]] = set()
    for corpus in corpora:
        normalized = [tuple(map(normalize_text, prompt.turns)) for prompt in corpus.prompts]
        prompts += [prompt for prompt, turns in zip(corpus.prompts, normalized, strict=True) if turns not in earlier]
        earlier.update(normalized)
    (repeated, count), *_ = Counter(prompt.id for prompt in prompts).most_common(1)
    if count > 1:
        raise InputError(
            f"{count} different prompts of corpus {name} ({', '.join(parts)}) have the id {repeated}; give each an id "
            "of its own, or leave one part out"
        )
    account = sum_accounts([corpus.account for corpus in corpora])
    dropped = account.get("dropped", {}) | {EARLIER_PART: account["kept"] - len(prompts)}
    return Corpus(prompts, account | {"kept": len(prompts), "dropped": dropped})


def sum_accounts(accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """[{read: 2, dropped: {empty: 1}}, {read: 3, dropped: {}}]   ->   {read: 5, dropped: {empty: 1}}"""
    keys = dict.fromkeys(key for account in accounts for key in account)
    values = {key: [account[key] for account in accounts if key in account] for key in keys}
    return {key: sum_accounts(some) if isinstance(some[0], Mapping) else sum(some) for key, some in values.items()}


def with_instruction(instruction: str | None) -> Callable[[str], str]:
    return lambda turn: f"{turn}\n{instruction}" if instruction else turn


def build_corpus(
    conversations: Iterable[Conversation],
    place: Paths,
    name: str,
    cleaning: Cleaning,
    leakage: Decontamination,
    limit: int | None,
    seed: int,
    format_turn: Callable[[str], str] = str,
) -> Corpus:
    """Clean, decontaminate and sample the conversations from `place`; raise InputError if no prompt is left.

    `format_turn` is applied to every user turn after that; at most `limit` prompts are sampled with `seed`.
    """
    source = f"corpus {name}: {place}"
    if limit is not None and not (isinstance(limit, int) and limit >= 1):
        raise InputError(f"corpus.limit={limit} leaves nothing of {source}; give an integer >= 1, or null")
    dropped, shortened, leaked = Counter[str](), Counter[str](), Counter[str]()
    read, clean = CountingIterator(), CountingIterator()
    cleaned = cleaning.clean(read(conversations), dropped, shortened)
    prompts: Iterable[Prompt] = to_prompts(clean(leakage.drop_leaked(cleaned, leaked)), name, format_turn, source)
    if limit is not None:
        # Those with the smallest hashes: the sample of 50 is a subset of that of 100, in any order of the file.
        prompts = heapq.nsmallest(limit, prompts, lambda one: hashlib.sha256(f"{seed}:{one.id}".encode()).digest())
    kept = list(prompts)
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
            if self.count < 1000:  # only for the error of a corpus that keeps nothing
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
        text = message.get("value", message.get("content"))
        if isinstance(text, list) and all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in text
        ):
            text = "\n".join(part["text"] for part in text)  # OpenAI's list of text parts
        turns.append((speaker, text if isinstance(text, str) else None))
    return tuple(turns)


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
