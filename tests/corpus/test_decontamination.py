"""Decontamination finds what a slow comparison of words finds, and prepared corpora hold no benchmark question."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from local_data import require_data
from truths_corpus import slow_leaks, slow_words

from ctcdraft.config.cli import register_resolvers
from ctcdraft.corpus.decontamination import (
    Decontamination,
    ngram_hash,
    ngram_hashes,
    split_words,
    word_hash,
    write_hashes,
)
from ctcdraft.corpus.readers import read_records
from ctcdraft.corpus.types import USER, Conversation
from ctcdraft.errors import InputError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def leaking(texts, leakage):
    """Return which of the texts are contaminated, and the counts by benchmark."""
    leaked: Counter[str] = Counter()
    talks = [Conversation(((USER, text),), str(index)) for index, text in enumerate(texts)]
    kept = {conversation.id for conversation in leakage.drop_leaked(talks, leaked)}
    return [index for index in range(len(texts)) if str(index) not in kept], leaked


def questions_file(tmp_path, texts, name="bench.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    return str(tmp_path / name)


def random_texts(rng, count, vocabulary, longest):
    """Return texts of few words, so that some share a run, in mixed case and with punctuation between words."""
    words = [f"w{n}" for n in range(vocabulary)]
    texts = []
    for _ in range(count):
        picked = [rng.choice(words) for _ in range(rng.randrange(longest))]
        texts.append("".join(rng.choice([word, word.upper()]) + rng.choice([" ", ", ", "\n", "-"]) for word in picked))
    return texts


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_leaks_are_those_of_the_slow_comparison(tmp_path, length):
    rng = random.Random(length)
    questions, texts = random_texts(rng, 12, 9, 9), random_texts(rng, 3000, 9, 9)  # more than one block
    slow = slow_leaks(texts, questions, length)
    assert 0 < len(slow) < len(texts)
    fast, counts = leaking(texts, Decontamination(length, {"bench": questions_file(tmp_path, questions)}))
    assert fast == slow
    assert counts == {"bench": len(slow)}


def test_a_shared_run_of_thirteen_words_and_an_equal_short_question(tmp_path):
    thirteen = "one two three four five six seven eight nine ten eleven twelve thirteen"
    path = questions_file(tmp_path, [f"Once {thirteen}, and so on.", "Who are you?"])
    texts = [
        f"Say {thirteen.upper()} now",
        thirteen.removesuffix(" thirteen"),
        "who are YOU",
        "Tell me: who are you?",
        thirteen.replace("seven", "7"),
    ]
    assert leaking(texts, Decontamination(13, {"bench": path}))[0] == [0, 2]


def test_all_turns_are_looked_at_and_a_leak_is_counted_once(tmp_path):
    path = questions_file(tmp_path, ["Who are you?"])
    talk = Conversation(((USER, "Hi"), ("assistant", "Hello"), (USER, "Who are you?")))
    answered = Conversation(((USER, "Hi"), ("assistant", "Who are you?")))
    leaked: Counter[str] = Counter()
    both = Decontamination(13, {"first": path, "second": path})
    assert list(both.drop_leaked([talk, answered], leaked)) == [answered]
    assert leaked == {"first": 1, "second": 0}


def test_vectorised_hashes_equal_single_ones():
    texts = ["a b c d", "", "b c", "d a b c"]
    sequence_N, text_N = ngram_hashes(texts, 3)
    expected = {(0, "a b c"), (0, "b c d"), (2, "b c"), (3, "d a b"), (3, "a b c")}
    alone = {(index, ngram_hash([word_hash(word) for word in run.split()])) for index, run in expected}
    assert set(zip(text_N.tolist(), sequence_N.tolist(), strict=True)) == alone


@pytest.mark.parametrize("text", ["Don't STOP, 3.5!", "naïve café_x — ﬁne ½", "", "日本語 text"])
def test_split_words_equals_its_slow_twin(text):
    assert split_words(text) == slow_words(text)


def test_benchmarks_as_hashes_equal_their_questions(tmp_path):
    path = questions_file(tmp_path, ["a b c d e", "f g"])
    write_hashes(read_records(path), 3, tmp_path / "bench.npz")
    texts = ["x a b c", "f g", "f g h", "c d"]
    expected = leaking(texts, Decontamination(3, {"bench": path}))
    assert expected[0] == [0, 1]
    assert leaking(texts, Decontamination(3, {"bench": str(tmp_path / "bench.npz")})) == expected
    with pytest.raises(InputError, match=r"holds sequences of 3 words, and corpus.leakage.words=4"):
        Decontamination(4, {"bench": str(tmp_path / "bench.npz")}).benchmark_hashes()
    (tmp_path / "torn.npz").write_bytes((tmp_path / "bench.npz").read_bytes()[:100])
    for name in ("torn.npz", "gone.npz"):
        with pytest.raises(InputError, match=f"cannot read the benchmark bench from .*{name}"):
            Decontamination(3, {"bench": str(tmp_path / name)}).benchmark_hashes()


def corpus_of(*overrides):
    register_resolvers()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("prepare", overrides=list(overrides)).corpus


def benchmark_questions():
    with (require_data("CTCDRAFT_DATA", "gsm8k") / "test.jsonl").open() as stream:
        gsm8k = [json.loads(line)["question"] for line in stream]
    with (require_data("CTCDRAFT_DATA", "mt_bench") / "question.jsonl").open() as stream:
        mt_bench = [turn for line in stream for turn in json.loads(line)["turns"]]
    assert (len(gsm8k), len(mt_bench)) == (1319, 160)
    return {"gsm8k": gsm8k, "mt_bench": mt_bench}


def test_bundled_hashes_are_those_of_the_benchmarks():
    shipped = instantiate(corpus_of().leakage).benchmark_hashes()
    for name, questions in benchmark_questions().items():
        assert np.array_equal(shipped[name], np.unique(ngram_hashes(questions, 13)[0])), name
    assert len(shipped["tiny"])


@pytest.mark.parametrize("name", ["gsm8k", "mt_bench"])
def test_every_question_of_a_benchmark_is_contaminated(name):
    questions = benchmark_questions()[name]
    leakage = instantiate(corpus_of().leakage)
    assert leaking(questions, leakage)[0] == list(range(len(questions)))


def test_a_recount_finds_no_question_among_the_prompts_of_gsm8k():
    """The recount compares words, not hashes: four questions without decontamination, none with it."""
    path = require_data("CTCDRAFT_DATA", "gsm8k") / "train.jsonl"
    corpus = instantiate(corpus_of("corpus=gsm8k", f"corpus.path={path}"))
    questions = [turn for turns in benchmark_questions().values() for turn in turns]
    with path.open() as stream:
        before = [json.loads(line)["question"] for line in stream]
    assert len(slow_leaks(before, questions, 13)) == 4
    assert corpus.account["leaked"] == {"tiny": 0, "mt_bench": 0, "gsm8k": 4}
    assert (corpus.account["read"], corpus.account["kept"]) == (7473, 7469)
    assert slow_leaks([turn for prompt in corpus.prompts for turn in prompt.turns], questions, 13) == []


@pytest.mark.slow
def test_a_recount_finds_no_question_among_the_prompts_of_sharegpt():
    corpus = instantiate(corpus_of("corpus=sharegpt", f"corpus.path={require_data('CTCDRAFT_DATA', 'sharegpt')}"))
    account = corpus.account
    assert account["read"] == account["kept"] + sum(account["dropped"].values()) + sum(account["leaked"].values())
    questions = [turn for turns in benchmark_questions().values() for turn in turns]
    assert slow_leaks([turn for prompt in corpus.prompts for turn in prompt.turns], questions, 13) == []
