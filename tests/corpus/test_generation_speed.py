"""Generation speed: the plan's hours from a trial on a simulated machine equal that machine's time for the corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_models import random_base

from ctcdraft.corpus import prepared
from ctcdraft.corpus.chat_template import chat_messages, prompt_tokens
from ctcdraft.corpus.generation import transformers as answering
from ctcdraft.corpus.generation.requests import batch_samples
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.planning import corpus


@dataclass
class Machine:
    """A simulated machine and its clock.

    A decoding step of a batch takes `weights` seconds, and per row `row` seconds and `attended` for every token before.
    """

    weights: float = 0.0
    row: float = 0.0
    attended: float = 0.0
    read: float = 1e-6
    cold: float = 0.0
    now: float = 0.0
    batches: tuple[int, ...] = ()

    def generate(self, batch, tokens):
        self.now += self.cold if not self.batches else 0.0
        self.batches += (len(batch),)
        length = max(map(len, batch))
        self.now += self.read * len(batch) * length
        for step in range(tokens):
            self.now += self.weights + len(batch) * (self.row + self.attended * (length + step))


@pytest.fixture(scope="module")
def base():
    return random_base(context=2048)


@pytest.fixture
def run_on(monkeypatch, base):
    """Plan a corpus on a simulated machine; return the plan and the seconds of the whole corpus."""

    def run(machine, prompts, answers):
        monkeypatch.setattr(answering, "perf_counter", lambda: machine.now)
        monkeypatch.setattr(
            answering,
            "generate_batch",
            lambda base, batch_prompts, budgets, choose: machine.generate(batch_prompts, budgets[0]),
        )
        plan = corpus.plan_corpus(base, Corpus.from_prompts(prompts), answers, Path("never"), prepared.SINGLE_SHARD)
        spent = machine.now
        for batch in batch_samples(base.tokenizer, prompts, answers):
            batch_prompts = [prompt_tokens(base.tokenizer, chat_messages(one.prompt.turns, [])) for one in batch]
            machine.generate(batch_prompts, answers.max_new_tokens)
        return plan, machine.now - spent

    return run


def prompts_of(count):
    return [Prompt(f"p{n}", "test", ("!" * (20 + n % 150),), None) for n in range(count)]


GREEDY = TransformersAnswers(32, 64, 0.0, 0, 1)
SAMPLED = TransformersAnswers(32, 64, 1.0, 0, 8)


@pytest.mark.parametrize(
    ("machine", "count", "answers"),
    [
        (
            Machine(weights=0.1, row=0.001, cold=30.0),
            320,
            GREEDY,
        ),  # limited by memory bandwidth, weights on a slow disk
        (Machine(row=0.002), 320, GREEDY),  # limited by arithmetic
        (Machine(weights=0.01, attended=1e-4), 320, GREEDY),  # long texts cost as much as the weights
        (Machine(weights=0.01, row=0.001), 5, GREEDY),  # fewer than a batch
        (Machine(weights=0.1, row=1e-4), 33, GREEDY),  # one row more than a batch, which lasts as long
        (Machine(weights=0.01, row=0.001), 12, SAMPLED),
    ],
    ids=["weights", "arithmetic", "long texts", "few prompts", "a batch and one", "samples"],
)
def test_planned_hours_equal_the_time_of_the_corpus(run_on, machine, count, answers):
    plan, seconds = run_on(machine, prompts_of(count), answers)
    assert plan.measured["hours_at_most"] * 3600 == pytest.approx(seconds, rel=0.1)
    assert plan.measured["trial"]["rows"] == min(32, count * answers.samples)
    assert " if they " not in str(plan)


@pytest.mark.parametrize("slow", [Machine(weights=2.0), Machine(row=2.0)], ids=["weights", "arithmetic"])
def test_a_trial_of_fewer_rows_gives_bounds_that_hold(run_on, slow, base):
    """On a slow machine the whole batch would take long: both bounds are printed, and each is exact for one machine."""
    prompts = prompts_of(320)
    plan, seconds = run_on(slow, prompts, GREEDY)
    trial = plan.measured["trial"]
    assert (trial["rows"], trial["batch"]) == (1, 32)
    steps = GREEDY.max_new_tokens * 10
    bounds = [3600 * hours for hours in answering.GenerationSpeed(**trial).hours(plan.work.prompt_tokens, steps)]
    assert bounds[1] == plan.measured["hours_at_most"] * 3600
    assert seconds == pytest.approx(bounds[1 if slow.row else 0], rel=0.1)
    assert bounds[1] == pytest.approx(32 * bounds[0], rel=0.1)
    assert "at most about 0.36 hours if 32 rows take no longer than 1, and 11.5 hours if they take 32 times as long (" \
        "a trial of 1 of 32 rows" in str(plan)  # fmt: skip


def test_a_trial_grows_to_the_whole_batch_and_warms_up_every_size():
    machine = Machine(weights=1e-3, row=1e-4, cold=100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "perf_counter", lambda: machine.now)
        measured_speed = answering.measure_speed(machine.generate, [[7] * 40] * 10, context=1000)
    assert machine.batches == (1, 1, 1, 4, 4, 4, 10, 10, 10)
    assert (measured_speed.rows, measured_speed.batch, measured_speed.length) == (10, 10, 40)
    assert measured_speed.step_seconds == pytest.approx(1e-3 + 10 * 1e-4)
    assert measured_speed.read_seconds == pytest.approx((400 * 1e-6 + 2e-3) / 400)


def test_a_slow_machine_gets_a_short_trial():
    """No trial is begun that could take longer than MAX_TRIAL_SECONDS if time is proportional to rows."""
    machine = Machine(row=0.05, read=1e-9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "perf_counter", lambda: machine.now)
        measured_speed = answering.measure_speed(machine.generate, [[7] * 40] * 64, context=1000)
    assert (measured_speed.rows, measured_speed.batch) == (16, 64)
    assert machine.now < 2 * answering.MAX_TRIAL_SECONDS
    long = answering.measure_speed(Machine(row=1.0).generate, [[7] * 2000] * 64, context=1000)
    assert long.length == 1000 - 1 - answering.TRIAL_STEPS  # leaves space for the generated tokens


def test_turns_and_rows_of_a_trial():
    assert answering.turns_of_all_batches([1, 3, 1], rows=2) == 3 + 1
    assert answering.turns_of_all_batches([2] * 5, rows=2) == 6
    assert answering.repeat_to_length([[1, 2, 3], [4]], rows=3, length=4) == [[1, 2, 3, 1], [4, 4, 4, 4], [1, 2, 3, 1]]
    assert answering.repeat_to_length([[1, 2]], rows=1, length=0) == [[1]]


def test_hours_of_a_share_are_that_share():
    whole = answering.GenerationSpeed(4, 8, 10, 1e-3, 0.5)
    assert whole.hours(1000, 7200) == pytest.approx((0.5 / 3600 + 1.0, 1 / 3600 + 2.0))
    assert whole.hours(1000, 7200, 0.25) == pytest.approx(tuple(one / 4 for one in whole.hours(1000, 7200)))
