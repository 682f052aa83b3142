"""Each cleaning step by itself, with the values of its configuration."""

from collections import Counter
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ctcdraft.corpus.filters import Cleaning
from ctcdraft.corpus.types import Conversation

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "corpus" / "cleaning" / "conversations.yaml"


@pytest.fixture(scope="module")
def steps():
    return instantiate(OmegaConf.load(CONFIG)).steps


def talk(*texts, first="user"):
    speakers = ("user", "assistant") if first == "user" else ("assistant", "user")
    return Conversation(tuple((speakers[n % 2], text) for n, text in enumerate(texts)))


def conversation(*turns):
    return Conversation(turns)


def test_a_conversation_that_asks_nothing_is_dropped_without_the_step_that_does_it(steps):
    """Files of ShareGPT split long conversations: some have responses alone."""
    dropped, shortened = Counter(), Counter()
    kept = Cleaning({"length": steps["length"]}).clean([talk("a", first="assistant"), talk("b")], dropped, shortened)
    assert list(kept) == [talk("b")]
    assert dropped == {"length": 0, "without a user turn": 1}


def test_roles(steps):
    step = steps["roles"]
    assert step(conversation(("human", "a"), ("gpt", "b"))) == talk("a", "b")
    assert step(conversation(("system", "s"), ("user", "a"))) == talk("a")
    assert step(conversation(("human", "a"), ("function", "f"))) is None


def test_alternation(steps):
    step = steps["alternation"]
    assert step(talk("a", "b", "c")) == talk("a", "b", "c")
    assert step(talk("z", "a", "b", first="assistant")) == talk("a", "b")
    assert step(conversation(("user", "a"), ("user", "b"))) is None
    assert step(talk("a", first="assistant")) is None
    assert step(conversation()) is None


def test_empties(steps):
    step = steps["empties"]
    assert step(talk(" a\n", "b")) == talk("a", "b")
    assert [step(talk("a", bad)) for bad in ("", " \n", None, "half \ud83d of a character")] == [None] * 4
    assert step(talk("é \U0001f600")) is not None


def test_controls(steps):
    step = steps["controls"]
    assert step(talk("What is <b> in HTML?")) is not None
    assert step(talk("Hi</s> there")) is None
    assert step(talk("Hi", "an answer may</s>", "bye")) is not None  # responses of the source are not used


ENGLISH = [
    "What is the difference between a list and a tuple in Python?",
    "ok",
    "5 + 3 = ?",
    "Fa la la la la, la la la la: sing it",
    "def add(x, y):\n    return x + y\ndef sub(x, y):\n    return x - y",
    "Please translate into Spanish: Where is the station?",
    "Explain the word 'Zeitgeist' (der Geist der Zeit) to me, please.",
    "Who wrote Les Misérables, and what is it about?",
]
FOREIGN = [
    "Wie kann ich die Daten in einer Tabelle mit Python lesen und schreiben?",
    "¿Cuál es la diferencia entre echo y print en PHP?",
    "Donne moi le code pour une application qui peut lire un tag.",
    "Quais são as diferenças entre uma lista e um dicionário em Python?",
    "Как мне написать письмо?",
    "如何用 Python 读取文件?",
    "Non mi ricordo più il codice di sblocco del telefono, come posso fare?",
]


@pytest.mark.parametrize("text", ENGLISH)
def test_english_passes(steps, text):
    assert steps["language"](talk(text)) is not None


@pytest.mark.parametrize("text", FOREIGN)
def test_other_languages_do_not(steps, text):
    assert steps["language"](talk(text)) is None


def test_length(steps):
    step = steps["length"]
    assert step(talk("a" * step.characters, "b" * 10 * step.characters)) is not None
    assert step(talk("a" * (step.characters + 1))) is None
    assert step(talk(*["a"] * (2 * step.turns))) is not None
    assert step(talk(*["a"] * (2 * step.turns + 1))) is None


def test_duplicates_and_a_second_cleaning_without_memory_of_the_first(steps):
    from collections import Counter

    from ctcdraft.corpus.filters import Cleaning

    cleaning = Cleaning({"duplicates": steps["duplicates"]})
    talks = [talk("Hi there", "x"), talk("hi  THERE", "y"), talk("Hi there", "x", "and?"), talk("Hi, there")]
    for _ in range(2):
        dropped: Counter[str] = Counter()
        kept = list(cleaning.clean(talks, dropped, Counter()))
        assert kept == [talks[0], talks[2], talks[3]]
        assert dropped == {"duplicates": 1}
