"""Whether a benchmark's questions are among the prompts. It knows benchmarks as numbers, and neither base nor token.

Two texts share a sequence if `words` words in a row are the same, but for case and for what stands between the
words; a question shorter than that must be the whole of what is said. A sequence is kept as eight bytes, so all of
GSM8K is 350 kB, and the benchmarks that ship do so as numbers, not as text.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from ctcdraft.corpus.readers import Record, get_column, read_records
from ctcdraft.corpus.types import Conversation
from ctcdraft.errors import InputError
from ctcdraft.io import atomic_write

HashArray = npt.NDArray[np.uint64]

WORD = re.compile(r"\w+")
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that a change of any one word changes the sum
BLOCK_SIZE = 2048  # conversations looked at together: arrays are slow in the small
HASH_CACHE_SIZE = 1 << 19  # words whose numbers are kept


def split_words(text: str) -> list[str]:
    """Don't STOP, 3.5!      ->      don t stop 3 5"""
    return WORD.findall((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold())


class WordHashes(dict[str, int]):
    """Eight bytes for every word, the same on every machine and every day."""

    def __missing__(self, word: str) -> int:
        if len(self) >= HASH_CACHE_SIZE:
            self.clear()
        number = int.from_bytes(hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
        self[word] = number
        return number


def ngram_hashes(texts: Sequence[str], words: int, numbers: WordHashes) -> tuple[HashArray, npt.NDArray[np.intp]]:
    """A number for every run of `words` words of every text, or for the whole of a shorter one.

    Returns sequence_N and text_N, the index of the text that each stands in.
    """
    text_words = [split_words(text) for text in texts]
    short = [index for index, text in enumerate(text_words) if 0 < len(text) < words]
    long = [index for index, text in enumerate(text_words) if len(text) >= words]
    word_M = np.fromiter((numbers[word] for index in long for word in text_words[index]), np.uint64)
    text_M = np.repeat(np.array(long, dtype=np.intp), [len(text_words[index]) for index in long])
    # Runs over all long texts at once; one counts if it ends in the text it began in.
    inside = text_M[: len(text_M) - words + 1] == text_M[words - 1 :]
    whole = np.array([ngram_hash([numbers[word] for word in text_words[index]]) for index in short], dtype=np.uint64)
    return (
        np.concatenate([rolling_hashes(word_M, words)[inside], whole]),
        np.concatenate([text_M[: len(inside)][inside], np.array(short, dtype=np.intp)]),
    )


def ngram_hash(words: Sequence[int]) -> int:
    """One number for a run of words, in 64 bits that overflow on purpose; it begins with how many they are."""
    number = len(words)
    for word in words:
        number = (number * HASH_MULTIPLIER + word) % 2**64
    return number


def rolling_hashes(word_M: HashArray, words: int) -> HashArray:
    """`number_of` every run of so many words, together."""
    number_N = np.full(max(len(word_M) - words + 1, 0), words, np.uint64)
    for place in range(words):
        number_N = number_N * np.uint64(HASH_MULTIPLIER) + word_M[place : place + len(number_N)]
    return number_N


@dataclass(frozen=True)
class Decontamination:
    """Benchmarks by name, each a file of questions or of numbers (.npz, as `write_numbers` makes them)."""

    words: int
    benchmarks: Mapping[str, str]

    def benchmark_hashes(self) -> dict[str, HashArray]:
        """The sequences of every benchmark, sorted."""
        if self.words < 1:
            raise InputError(f"corpus.leakage.words={self.words} is no length of a sequence; give 1 or more, as 13")
        return {name: self._read_hashes(name, path) for name, path in self.benchmarks.items()}

    def _read_hashes(self, name: str, path: str) -> HashArray:
        if not path.endswith(".npz"):
            return np.unique(ngram_hashes(list(read_questions(path)), self.words, WordHashes())[0])
        try:
            with Path(path).open("rb") as stream, np.load(stream) as stored:
                words, sequence_N = int(stored["words"]), stored["sequences"]
        except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
            raise InputError(
                f"cannot read the benchmark {name} from {path} ({error}); give its questions as "
                f"corpus.leakage.benchmarks.{name}=FILE"
            ) from error
        if words != self.words:
            raise InputError(
                f"{path} holds sequences of {words} words, and corpus.leakage.words={self.words}; give the questions "
                f"themselves as corpus.leakage.benchmarks.{name}=FILE"
            )
        return sequence_N

    def drop_leaked(self, found: Iterable[Conversation], leaked: Counter[str]) -> Iterator[Conversation]:
        """The conversations whose user says nothing of a benchmark; the others are counted under its name."""
        known, numbers = self.benchmark_hashes(), WordHashes()
        leaked.update(dict.fromkeys(known, 0))
        found = iter(found)
        while block := list(islice(found, BLOCK_SIZE)):
            benchmark_of = self._find_leaks(block, known, numbers)
            for index, conversation in enumerate(block):
                if index in benchmark_of:
                    leaked[benchmark_of[index]] += 1
                else:
                    yield conversation

    def _find_leaks(
        self, block: list[Conversation], benchmark_hashes: dict[str, HashArray], numbers: WordHashes
    ) -> dict[int, str]:
        """Which conversations of a block leak, and the first benchmark that each of them is found in."""
        turns = [(index, turn) for index, conversation in enumerate(block) for turn in conversation.user_turns]
        sequence_N, turn_N = ngram_hashes([turn for _, turn in turns], self.words, numbers)
        leaks: dict[int, str] = {}
        for name, sequence_K in benchmark_hashes.items():
            if len(sequence_K) and len(sequence_N):
                index_N = np.searchsorted(sequence_K, sequence_N).clip(max=len(sequence_K) - 1)
                for turn in np.unique(turn_N[sequence_K[index_N] == sequence_N]):
                    leaks.setdefault(turns[turn][0], name)
        return leaks


def read_questions(path: str) -> Iterator[str]:
    """Every question of a file in the shape of GSM8K, MT-Bench (FastChat's or the hub's) or this project."""
    for where, record in read_records(path):
        yield from question_turns(where, record)


def question_turns(where: str, record: dict[str, Any]) -> list[str]:
    name = next((name for name in ("turns", "question", "prompt") if name in record), "question")
    question = get_column(record, name, None, where)
    turns = [question] if isinstance(question, str) else question
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise InputError(f"{where} has no text as `{name}`; check corpus.leakage.benchmarks")
    return turns


def write_hashes(found: Iterable[Record], words: int, out: Path) -> None:
    """Keep a benchmark as numbers: what is in data/tiny/leakage was made so, by tests/ship_benchmarks.py."""
    texts = [turn for where, record in found for turn in question_turns(where, record)]
    sequence_N = np.unique(ngram_hashes(texts, words, WordHashes())[0])
    atomic_write(out, lambda draft: save_hashes(draft, words, sequence_N))


def save_hashes(draft: Path, words: int, sequence_N: HashArray) -> None:
    with draft.open("wb") as stream:  # a path would be given another ending
        np.savez(stream, words=np.int64(words), sequences=sequence_N)
