"""A training run with redirected output prints one line per minute: loss, speed and remaining time."""

from __future__ import annotations

import re
import sys

from tiny_models import random_base
from training_parts import make_trainer

from ctcdraft.training.run_directory import RunDirectory


def lines_of(one, seconds, capsys):
    """Return the lines that `fit` prints where every step takes so many seconds."""
    clock = iter(range(0, 10**6, seconds))
    capsys.readouterr()
    one.fit([], clock=lambda: next(clock))
    return [line for line in capsys.readouterr().out.splitlines() if " steps, " in line]


def test_one_line_a_minute_of_the_remaining_steps(tmp_path, capsys):
    """Steps of 20 seconds. After a resume, finished steps count in the lines but not in the time."""
    base = random_base(context=64)
    lines = lines_of(make_trainer(RunDirectory(tmp_path), base, 8), 20, capsys)
    assert [re.sub(r"\d+\.\d{3}, [\d,]+ tokens", "L, N tokens", line) for line in lines] == [
        "3 of 8 steps, 1.0 minutes so far; about 1.7 minutes for the remaining 5; loss L, N tokens/s",
        "6 of 8 steps, 2.0 minutes so far; about 0.7 minutes for the remaining 2; loss L, N tokens/s",
    ]
    again = make_trainer(RunDirectory(tmp_path), base, 12)
    again.restore()
    (line,) = lines_of(again, 20, capsys)
    assert line.startswith("11 of 12 steps, 1.0 minutes so far; about 0.3 minutes for the remaining 1; loss ")


def test_a_terminal_gets_no_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert lines_of(make_trainer(RunDirectory(tmp_path), random_base(context=64), 8), 61, capsys) == []
