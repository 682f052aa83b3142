"""The preview of a row shows what training reads: every token in its colour, and the window of an anchor as text."""

import re

from test_answer_masks import row
from tiny_models import tiny_tokenizer

from ctcdraft.corpus.preview import COLOURS, render_row

PIECE = re.compile("\x1b\\[([0-9;]+)m(.*?)\x1b\\[0m", re.DOTALL)


def coloured_pieces(text):
    names = {code: name for name, code in COLOURS.items()}
    return [(names[code], piece) for code, piece in PIECE.findall(text)]


def test_every_token_has_the_colour_of_its_part(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    head, text, window = render_row(row(), tiny_tokenizer(), labels=4).split("\n")
    assert head == "p1: 4 of 9 tokens are answer, ended"
    assert coloured_pieces(text) == [
        ("prompt", "<bos><|user|>a<|end|><|assistant|>"),
        ("anchor", "y"),
        ("root", "e"),
        ("labels", "s<|end|>"),
    ]
    assert coloured_pieces(window)[-1][0] == "labels"


def test_response_tokens_outside_the_window_are_green(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = render_row(row(), tiny_tokenizer(), labels=1).split("\n")[1]
    assert coloured_pieces(text)[-1] == ("answer", "<|end|>")


def test_the_window_is_described_as_text(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    preview = render_row(row(), tiny_tokenizer(), labels=1)
    assert preview.endswith("anchor 5 'y', root 'e': the draft head is trained on the labels 's'")
    assert "\x1b" not in preview
