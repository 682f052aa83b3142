"""From files or the hub to a corpus: each source reads one shape, all go through the same cleaning and the same count.

It knows shapes, and which key of the config to name in a sentence; not what a step does, nor any token.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ctcdraft.corpus.decontamination import Decontamination
from ctcdraft.corpus.filters import Cleaning
from ctcdraft.corpus.readers import Paths, Record, get_column, read_hub_records, read_records
from ctcdraft.corpus.types import USER, Conversation, Corpus, Prompt, normalize_text, prompt_id
from ctcdraft.errors import InputError

EARLIER_PART = "in an earlier part"  # of a corpus of several: the reason under which the account has a prompt dropped


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
    """ShareGPT conversations or OpenAI `messages`: what their users say, turn by turn."""
    found = read_records(path) if path is not None else read_hub_records(hub, data_files=hub_file)
    talks = (Conversation(parse_messages(record, where)) for where, record in found)
    return build_corpus(
        talks, f"corpus {name}: {path or hub}", name, cleaning, leakage, limit, seed, with_instruction(None)
    )


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
    """Grade-school problems; `instruction` follows each question, after what cleaning and leakage look at."""
    found = read_records(path) if path is not None else read_hub_records(hub, name=hub_config, split=split)
    place = f"corpus {name}: {path or hub}"
    asked = with_instruction(instruction)
    return build_corpus(word_problems(found, name), place, name, cleaning, leakage, limit, seed, asked)


def project_prompts(
    path: Paths, name: str, cleaning: Cleaning, leakage: Decontamination, limit: int | None, seed: int
) -> Corpus:
    """Prompts as this project writes them: {"id", "category", "turns": [...], "reference"?} on every line."""
    place = f"corpus {name}: {path}"
    found = project_conversations(read_records(path))
    return build_corpus(found, place, name, cleaning, leakage, limit, seed, with_instruction(None))


def mixture(path: None, name: str, parts: Mapping[str, Callable[[], Corpus]]) -> Corpus:
    """Return corpora behind one another, their accounts added up; each has cleaned its own and chosen among its own.

    A prompt that several parts have is kept in the first of them and counted as dropped. Raises InputError where one
    id stands for different prompts.
    """
    if path is not None:
        files = " ".join(f"corpus.parts.{part}.path=FILE" for part in parts)
        raise InputError(f"corpus.path={path}, but corpus {name} has several; say {files}")
    found = [load_part(part, read) for part, read in parts.items()]
    prompts = drop_repeated_prompts([corpus.prompts for corpus in found])
    (twice, count), *_ = Counter(prompt.id for prompt in prompts).most_common(1)
    if count > 1:
        raise InputError(
            f"{count} different prompts of corpus {name} ({', '.join(parts)}) have the id {twice}; give each an id of "
            "its own, or leave one part out"
        )
    account = sum_accounts([corpus.account for corpus in found])
    dropped = account.get("dropped", {}) | {EARLIER_PART: account["kept"] - len(prompts)}
    return Corpus(prompts, account | {"kept": len(prompts), "dropped": dropped})


def drop_repeated_prompts(parts: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """Return the prompts of all parts without those whose turns, case and white space aside, an earlier part has."""
    unique: list[Prompt] = []
    earlier: set[tuple[str, ...]] = set()
    for prompts in parts:
        normalized = [tuple(map(normalize_text, prompt.turns)) for prompt in prompts]
        unique += [prompt for prompt, turns in zip(prompts, normalized, strict=True) if turns not in earlier]
        earlier.update(normalized)
    return unique


def load_part(name: str, read: Callable[[], Corpus]) -> Corpus:
    """What is wrong with a part names the part's own keys."""
    try:
        return read()
    except InputError as error:
        raise InputError(str(error).replace("corpus.", f"corpus.parts.{name}.")) from error


def sum_accounts(accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """[{read: 2, dropped: {empty: 1}}, {read: 3, dropped: {}}]   ->   {read: 5, dropped: {empty: 1}}"""
    keys = dict.fromkeys(key for account in accounts for key in account)
    values = {key: [account[key] for account in accounts if key in account] for key in keys}
    return {key: sum_accounts(some) if isinstance(some[0], Mapping) else sum(some) for key, some in values.items()}


def build_corpus(
    found: Iterable[Conversation],
    source: str,
    name: str,
    cleaning: Cleaning,
    leakage: Decontamination,
    limit: int | None,
    seed: int,
    format_turn: Callable[[str], str],
) -> Corpus:
    """The corpus of what was found, and the account: every conversation is kept, or is under one reason.

    source: of the prompts, for the error sentences. format_turn: what a user's turn becomes when it is asked.
    """
    if limit is not None and not (isinstance(limit, int) and limit >= 1):
        raise InputError(f"corpus.limit={limit} leaves nothing of {source}; give a whole number from 1, or null")
    dropped: Counter[str] = Counter()
    shortened: Counter[str] = Counter()
    leaked: Counter[str] = Counter()
    read, passed = CountingIterator(), CountingIterator()
    speakers: Counter[str] = Counter()
    clean = passed(
        leakage.drop_leaked(cleaning.clean(count_speakers(read(found), speakers), dropped, shortened), leaked)
    )
    prompts = list(sample_prompts(to_prompts(clean, name, format_turn, source), limit, seed))
    account = {
        "read": read.count,
        "kept": len(prompts),
        "not_asked": passed.count - len(prompts),
        "dropped": dict(dropped),
        "leaked": dict(leaked),
        "shortened": {step: count for step, count in shortened.items() if count},
    }
    if not prompts:
        reasons = {**dropped, **{f"in benchmark {benchmark}": count for benchmark, count in leaked.items()}}
        reasons_text = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items() if count)
        speaker_counts = ", ".join(f"{speaker} {count:,}" for speaker, count in speakers.most_common(4))
        raise InputError(
            f"{source} holds no prompt with a user turn that passes cleaning ({read.count:,} conversations read"
            + (f"; dropped: {reasons_text}" if reasons_text else "")
            + (f"; speakers: {speaker_counts}" if speaker_counts else "")
            + "); check corpus.path= and corpus.cleaning"
        )
    return Corpus(prompts, account)


def with_instruction(instruction: str | None) -> Callable[[str], str]:
    """A question as it will be asked: the instruction follows it."""
    return lambda turn: f"{turn}\n{instruction}" if instruction else turn


class CountingIterator:
    """Counts what goes by."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, found: Iterable[Conversation]) -> Iterator[Conversation]:
        for conversation in found:
            self.count += 1
            yield conversation


def count_speakers(found: Iterable[Conversation], speakers: Counter[str]) -> Iterator[Conversation]:
    """The same conversations; who speaks in the first thousand of them goes into the sentence on an empty corpus."""
    found = iter(found)
    for conversation in islice(found, 1000):
        speakers.update(speaker for speaker, _ in conversation.turns)
        yield conversation
    yield from found


def to_prompts(
    found: Iterable[Conversation], name: str, format_turn: Callable[[str], str], source: str
) -> Iterator[Prompt]:
    """Conversations as prompts; an id that a source gives must be one prompt's only."""
    seen: set[str] = set()
    for conversation in found:
        if conversation.id is not None:
            if conversation.id in seen:
                raise InputError(f"{source} holds two prompts with the id {conversation.id}; give each its own id")
            seen.add(conversation.id)
        turns = tuple(format_turn(turn) for turn in conversation.user_turns)
        yield Prompt(
            conversation.id or prompt_id(conversation.user_turns),
            conversation.category or name,
            turns,
            conversation.reference,
        )


def sample_prompts(prompts: Iterator[Prompt], limit: int | None, seed: int) -> Iterable[Prompt]:
    """All prompts, or `limit` of them, picked by a hash of seed and id; only those are held in memory.

    So a choice of 50 is part of the choice of 100, and the order of the file does not matter.
    """
    if limit is None:
        return prompts
    return heapq.nsmallest(limit, prompts, key=lambda prompt: hashlib.sha256(f"{seed}:{prompt.id}".encode()).digest())


def parse_messages(record: dict[str, Any], where: str) -> tuple[tuple[str, str | None], ...]:
    """Who spoke, and what, in ShareGPT's words (from, value) or OpenAI's (role, content)."""
    shape = "messages" if "messages" in record else "conversations"
    turns = []
    for message in get_column(record, shape, list, where):
        speaker = message.get("from", message.get("role")) if isinstance(message, dict) else None
        if not isinstance(speaker, str):
            raise InputError(
                f"{where} has a message {json.dumps(message)[:60]} in `{shape}` without a speaker; "
                "each needs from and value, or role and content"
            )
        turns.append((speaker, message_text(message.get("value", message.get("content")))))
    return tuple(turns)


def message_text(value: Any) -> str | None:
    """Text, or OpenAI's list of parts where all of them are text; None for a picture, a number or nothing."""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    return value if isinstance(value, str) else None


def word_problems(found: Iterable[Record], name: str) -> Iterator[Conversation]:
    """GSM8K's questions; the number after `####` is the reference."""
    for number, (where, record) in enumerate(found):
        question = get_column(record, "question", str, where)
        _, mark, result = str(record.get("answer", "")).rpartition("####")
        reference = result.strip().replace(",", "") if mark else None
        yield Conversation(((USER, question),), f"{name}-{number:05d}", name, reference)


def project_conversations(found: Iterable[Record]) -> Iterator[Conversation]:
    for where, record in found:
        turns = get_column(record, "turns", list, where)
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InputError(f"{where} has an empty turn or one that is not text; correct or remove it")
        user_turns = tuple((USER, turn) for turn in turns)
        category = record.get("category")
        yield Conversation(user_turns, str(get_column(record, "id", None, where)), category, record.get("reference"))
