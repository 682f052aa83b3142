"""Progress of evaluations: the remaining work and the lines about it, with a clock that only answers advance."""

from functools import partial

import pytest
from small_evaluations import NO_TRACE, PROMPTS, evaluate_to, make_evaluation, make_setup

from ctcdraft.distributed import Shard
from ctcdraft.evaluation import evaluation as evaluation_module
from ctcdraft.evaluation import runner
from ctcdraft.evaluation.output_dir import OutputDir
from ctcdraft.evaluation.replay import evaluation as replay_evaluation
from ctcdraft.evaluation.replay import tree_size
from ctcdraft.evaluation.replay.evaluation import ReplayEvaluation
from ctcdraft.evaluation.tracer import Tracer, TraceSettings
from ctcdraft.progress import Progress

EXPLORER = TraceSettings(questions=1, tokens=4, tokens_per_frame=2)


class Slow:
    """Every answer takes `seconds`, warm-up an hour; `lines` holds what was printed, `counts` every Progress."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.lines, self.counts = 0.0, [], []
        self.patch = monkeypatch
        for module in (runner, replay_evaluation, tree_size):
            monkeypatch.setattr(module, "Progress", self.progress)
        self.takes(seconds, runner, "timed_answer")
        self.takes(seconds, evaluation_module, "profile_answer")
        self.takes(seconds, Tracer, "answer")
        self.takes(3600, runner, "warm_up")

    def takes(self, seconds, owner, name):
        work = getattr(owner, name)

        def working(*args):
            self.now += seconds
            return work(*args)

        self.patch.setattr(owner, name, working)

    def progress(self, *args, **more):
        given = more | {"write": self.lines.append}
        progress = Progress(*args, **given, clock=lambda: self.now, redirected=True)
        self.counts.append(progress)
        return progress


@pytest.fixture
def slow(monkeypatch):
    return partial(Slow, monkeypatch)


def run(path, prompts, timing_questions=0, trace=NO_TRACE, shard=None):
    evaluation = make_evaluation(make_setup(max_new_tokens=4), prompts, shard)
    return evaluate_to(path, evaluation, warm_up_tokens=1, profiled=timing_questions, trace=trace)


def test_minutes_are_printed_after_the_first_question_of_all_contestants(tmp_path, capsys):
    run(tmp_path, PROMPTS[:3])
    lines = [line for line in capsys.readouterr().out.splitlines() if "minutes" in line]
    assert len(lines) == 1
    assert lines[0].startswith("2 of 8 answers, ")  # two contestants; questions of one turn, two turns and one turn
    assert "about 0." in lines[0]
    assert lines[0].endswith("minutes for the remaining 6")


def test_the_estimate_is_of_the_remaining_questions_only(slow, tmp_path):
    run(tmp_path, PROMPTS[:1])
    timeline = slow(15.0)
    run(tmp_path, PROMPTS[:3])
    assert timeline.lines == ["4 of 6 answers, 1.0 minutes so far; about 0.5 minutes for the remaining 2"]
    assert [(one.done, one.total) for one in timeline.counts] == [(6, 6)]
    timeline.lines.clear()
    run(tmp_path, PROMPTS[:3])
    assert timeline.lines == []
    assert timeline.counts[-1].total == 0


def test_profiled_and_traced_answers_are_counted(slow, tmp_path):
    timeline = slow(120.0)
    run(tmp_path, PROMPTS[:3], timing_questions=2, trace=EXPLORER)
    (count,) = timeline.counts
    assert count.done == count.total in (8 + 4 + 2, 8 + 6 + 2)  # one of three questions has two turns
    assert len(timeline.lines) == count.total - 1  # an answer takes two minutes, so every one has its line
    assert timeline.lines[1].startswith("2 of ")
    assert "4.0 minutes so far" in timeline.lines[1]


def test_a_shard_counts_its_own_questions(slow, tmp_path):
    timeline = slow(1.0)
    run(tmp_path, PROMPTS, shard=Shard(2, 2))
    assert [one.total for one in timeline.counts] == [(2 + 1) * 2]


def test_a_minute_has_one_line_however_many_answers_it_has(slow, tmp_path):
    timeline = slow(25.0)
    run(tmp_path, PROMPTS)
    assert [line.split(",")[0] for line in timeline.lines] == ["2 of 10 answers", "5 of 10 answers", "8 of 10 answers"]


def test_the_choice_of_tree_sizes_counts_its_answers(slow):
    timeline = slow(1.0)
    timeline.takes(30.0, tree_size, "record_base_answer")
    setup = make_setup(max_new_tokens=4)
    search = tree_size.TreeSizeSearch([2, 4], "unused", prompts=2, timed=1, timed_steps=2, repeats=1)
    tree_size.choose_fixed(setup, search, [PROMPTS[0], PROMPTS[2]])
    # Two texts, replayed for the one drafter; and timed: one text, twice, autoregression and two sizes.
    count = 2 + 2 + 2 * 3
    assert [(one.done, one.total) for one in timeline.counts] == [(count, count)]
    assert timeline.lines[0].startswith(f"2 of {count} answers for tree sizes, 1.0 minutes so far; about ")


def test_a_replay_counts_what_the_loop_checks(slow, tmp_path):
    timeline = slow(1.0)
    timeline.takes(30.0, replay_evaluation, "record_base_answer")
    evaluation = make_evaluation(make_setup(max_new_tokens=4), PROMPTS[:3])
    ReplayEvaluation([2, 4], checked=1).run(evaluation, OutputDir(tmp_path, evaluation.shard), False)
    # One base answer and one replay per turn; the first question is decoded at both sizes; the second has two turns.
    assert [(one.done, one.total) for one in timeline.counts] == [(4 + 4 + 2, 4 + 4 + 2)]
    assert timeline.lines[0] == "4 of 10 answers, 0.5 minutes so far; about 0.8 minutes for the remaining 6"
