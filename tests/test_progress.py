"""Progress lines with an injected clock: the estimate, and when a line is written."""

import io
import sys

import pytest

from ctcdraft.progress import Progress, format_minutes


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def lines_of(seconds, **given):
    """Return the lines written where the items take these seconds."""
    clock, lines = Clock(), []
    progress = Progress(len(seconds), "answers", clock=clock, write=lines.append, **given)
    for taken in seconds:
        clock.now += taken
        progress.advance()
    return lines


def test_the_estimate_is_of_the_remaining_items_at_the_rate_so_far():
    assert lines_of([30.0] * 10, first=4, redirected=False) == [
        "4 of 10 answers, 2.0 minutes so far; about 3.0 minutes for the remaining 6"
    ]


def test_what_was_finished_before_counts_in_the_lines_and_not_in_the_rate():
    assert lines_of([90.0] * 4, before=96, redirected=False) == [
        "97 of 100 answers, 1.5 minutes so far; about 4.5 minutes for the remaining 3"
    ]


def test_a_redirected_output_gets_one_line_a_minute():
    lines = lines_of([1.0] * 200, redirected=True)
    assert [line.split(",")[0] for line in lines] == [f"{done} of 200 answers" for done in (1, 61, 121, 181)]
    assert lines[-1].endswith("3.0 minutes so far; about 0.3 minutes for the remaining 19")
    slow = lines_of([150.0] * 3, redirected=True)
    assert [line.split(",")[0] for line in slow] == ["1 of 3 answers", "2 of 3 answers"]


def test_a_line_may_come_before_the_estimate_where_the_first_items_are_slow():
    lines = lines_of([40.0] * 6, first=4, redirected=True)
    assert [line.split(",")[0] for line in lines] == ["2 of 6 answers", "4 of 6 answers"]


def test_a_warm_up_is_no_part_of_the_rate():
    clock, lines = Clock(), []
    progress = Progress(3, "answers", clock=clock, write=lines.append, redirected=False)
    clock.now += 1000
    progress.begin()
    clock.now += 60
    progress.advance()
    assert lines == ["1 of 3 answers, 1.0 minutes so far; about 2.0 minutes for the remaining 2"]


class Output(io.StringIO):
    """A file or a terminal that counts how often it was flushed."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal, self.flushed = terminal, 0

    def isatty(self):
        return self.terminal

    def flush(self):
        self.flushed += 1


@pytest.mark.parametrize(("stdout", "stderr", "lines"), [(True, True, 1), (False, True, 2), (True, False, 2)])
def test_lines_follow_where_the_output_goes(stdout, stderr, lines, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sys, "stdout", output := Output(stdout))
    monkeypatch.setattr(sys, "stderr", Output(stderr))
    progress = Progress(3, "answers", clock=clock)
    for _ in range(3):
        clock.now += 61
        progress.advance()
    assert len(output.getvalue().splitlines()) == lines
    assert output.flushed >= lines  # a buffered line would appear minutes late


@pytest.mark.parametrize(
    ("seconds", "minutes"), [(0, "0.1"), (3, "0.1"), (473, "7.9"), (7200, "120"), (90000, "1,500")]
)
def test_minutes(seconds, minutes):
    assert format_minutes(seconds) == f"{minutes} minutes"
