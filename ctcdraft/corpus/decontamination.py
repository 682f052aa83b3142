"""Decontamination: removal of prompts that contain a question of a benchmark, by n-gram overlap.

A prompt is contaminated if it shares `words` consecutive words with a question, case and punctuation aside; a shorter
question must be the whole user turn. N-grams are kept as 64-bit hashes, so that all of GSM8K takes 350 kB and the
bundled benchmarks are distributed as hashes, not as text.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from ctcdraft.corpus.readers import Record, get_column, read_records
from ctcdraft.corpus.types import Conversation
from ctcdraft.errors import InputError, check_int
from ctcdraft.io import atomic_write

HashArray = npt.NDArray[np.uint64]

WORD = re.compile(r"\w+")
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that changing any one word changes the hash
BLOCK_SIZE = 2048  # conversations per numpy call: small arrays are slow


def split_words(text: str) -> list[str]:
    """Don't STOP, 3.5!      ->      don t stop 3 5"""
    return WORD.findall((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold())


@lru_cache(maxsize=1 << 19)
def word_hash(word: str) -> int:
    """Return a 64-bit hash of a word that is equal on every machine, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def ngram_hashes(texts: Sequence[str], words: int) -> tuple[HashArray, npt.NDArray[np.intp]]:
    """Return ngram_N, the hash of every run of `words` words of every text (or of the whole of a shorter text), and
    text_N, the index of its text."""
    text_words = [split_words(text) for text in texts]
    short = [index for index, text in enumerate(text_words) if 0 < len(text) < words]
    long = [index for index, text in enumerate(text_words) if len(text) >= words]
    word_M = np.fromiter((word_hash(word) for index in long for word in text_words[index]), np.uint64)
    text_M = np.repeat(np.array(long, dtype=np.intp), [len(text_words[index]) for index in long])
    # Runs over the concatenation of all long texts; a run counts if it ends in the text in which it begins.
    inside = text_M[: len(text_M) - words + 1] == text_M[words - 1 :]
    # Not by numpy, which is slow on small arrays.
    whole = np.array([ngram_hash([word_hash(word) for word in text_words[index]]) for index in short], dtype=np.uint64)
    return (
        np.concatenate([rolling_hashes(word_M, words)[inside], whole]),
        np.concatenate([text_M[: len(inside)][inside], np.array(short, dtype=np.intp)]),
    )


def ngram_hash(words: Sequence[int]) -> int:
    """Return the polynomial hash of a run of words modulo 2**64, starting from their number."""
    value = len(words)
    for word in words:
        value = (value * HASH_MULTIPLIER + word) % 2**64
    return value


def rolling_hashes(word_M: HashArray, words: int) -> HashArray:
    """Return `ngram_hash` of every run of `words` words, vectorised."""
    ngram_N = np.full(max(len(word_M) - words + 1, 0), words, np.uint64)
    for offset in range(words):
        ngram_N = ngram_N * np.uint64(HASH_MULTIPLIER) + word_M[offset : offset + len(ngram_N)]
    return ngram_N


@dataclass(frozen=True)
class Decontamination:
    """Removal of prompts that share n-grams with benchmarks."""

    words: int  # length of the n-grams
    benchmarks: Mapping[str, str]  # by name a file of questions or of hashes (.npz, from `write_hashes`)

    def benchmark_hashes(self) -> dict[str, HashArray]:
        """Return the sorted n-gram hashes of every benchmark."""
        check_int(self.words, "corpus.leakage.words")
        return {name: self._read_hashes(name, path) for name, path in self.benchmarks.items()}

    def _read_hashes(self, name: str, path: str) -> HashArray:
        if not path.endswith(".npz"):
            return unique_hashes(read_records(path), self.words)
        try:
            with Path(path).open("rb") as stream, np.load(stream) as stored:
                words, ngram_N = int(stored["words"]), stored["sequences"]
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
        return ngram_N

    def drop_leaked(self, conversations: Iterable[Conversation], leaked: Counter[str]) -> Iterator[Conversation]:
        """Yield the uncontaminated conversations; count the others under the name of the benchmark."""
        known = self.benchmark_hashes()
        leaked.update(dict.fromkeys(known, 0))
        conversations = iter(conversations)
        while block := list(islice(conversations, BLOCK_SIZE)):
            benchmark_of = self._find_leaks(block, known)
            for index, conversation in enumerate(block):
                if index in benchmark_of:
                    leaked[benchmark_of[index]] += 1
                else:
                    yield conversation
        word_hash.cache_clear()  # up to 100 MB, not needed once the corpus is read

    def _find_leaks(self, block: list[Conversation], benchmark_hashes: dict[str, HashArray]) -> dict[int, str]:
        """Return the first matching benchmark of each contaminated conversation, by its index in the block."""
        turns = [(index, turn) for index, conversation in enumerate(block) for turn in conversation.user_turns]
        ngram_N, turn_N = ngram_hashes([turn for _, turn in turns], self.words)
        leaks: dict[int, str] = {}
        for name, ngram_K in benchmark_hashes.items():
            if len(ngram_K) and len(ngram_N):
                # Clipped, because a hash above all of the benchmark's gets the index behind the last one.
                index_N = np.searchsorted(ngram_K, ngram_N).clip(max=len(ngram_K) - 1)
                for turn in np.unique(turn_N[ngram_K[index_N] == ngram_N]):
                    leaks.setdefault(turns[turn][0], name)  # counted once, under the first benchmark
        return leaks


def question_turns(where: str, record: dict[str, Any]) -> list[str]:
    """Return the questions of a record in the format of GSM8K, MT-Bench (FastChat's or the hub's) or this project."""
    name = next((name for name in ("turns", "question", "prompt") if name in record), "question")
    question = get_column(record, name, None, where)
    turns = [question] if isinstance(question, str) else question
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise InputError(f"{where} has no text as `{name}`; check corpus.leakage.benchmarks")
    return turns


def unique_hashes(records: Iterable[Record], words: int) -> HashArray:
    texts = [turn for where, record in records for turn in question_turns(where, record)]
    return np.unique(ngram_hashes(texts, words)[0])  # sorted, as `searchsorted` needs them


def write_hashes(records: Iterable[Record], words: int, out: Path) -> None:
    """Write the n-gram hashes of a benchmark to an .npz, as tests/ship_benchmarks.py does for data/tiny/leakage."""
    hashes = unique_hashes(records, words)

    def save(draft: Path) -> None:
        with draft.open("wb") as stream:  # np.savez appends .npz to a path
            np.savez(stream, words=np.int64(words), sequences=hashes)

    atomic_write(out, save)
