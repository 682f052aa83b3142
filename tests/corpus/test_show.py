"""What is shown is what is trained on: every token in its colour, and the window of an anchor in words."""

import re

from test_masks import row
from tiny_models import tiny_tokenizer

from ctcdraft.corpus.preview import ANCHOR_COLOUR, ANSWER_COLOUR, LABEL_COLOUR, PROMPT_COLOUR, ROOT_COLOUR, render_row

PIECE = re.compile("\x1b\\[([0-9;]+)m(.*?)\x1b\\[0m", re.DOTALL)


def test_every_token_has_the_colour_of_its_part(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    head, text, window = render_row(row(), tiny_tokenizer(), labels=4).split("\n")
    assert head == "p1: 4 of 9 tokens are answer, ended"
    assert PIECE.findall(text) == [
        (PROMPT_COLOUR, "<bos><|user|>a<|end|><|assistant|>"),
        (ANCHOR_COLOUR, "y"),
        (ROOT_COLOUR, "e"),
        (LABEL_COLOUR, "s<|end|>"),
    ]
    assert "".join(piece for _, piece in PIECE.findall(text)) == "<bos><|user|>a<|end|><|assistant|>yes<|end|>"
    assert PIECE.findall(window)[-1][0] == LABEL_COLOUR


def test_what_is_answer_but_not_in_the_window_is_green(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = render_row(row(), tiny_tokenizer(), labels=1).split("\n")[1]
    assert PIECE.findall(text)[-1] == (ANSWER_COLOUR, "<|end|>")


def test_the_window_is_said_in_words(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    made = render_row(row(), tiny_tokenizer(), labels=1)
    assert made.endswith("anchor 5 'y', root 'e': the head must say 's'")
    assert "\x1b" not in made
