"""Steps that read a waiting prompt have no drafts: once per request, never two steps in a row."""

import queue
from types import SimpleNamespace

import pytest

from ctcdraft.serving.scheduling import (
    MOST_RUNNING,
    DraftDrops,
    drop_drafts_for_prompts,
    first_waiting,
    skip_drafts_for_prompts,
)


class Queue(list):
    def peek_request(self):
        return self[0]


def request(name, drafts=()):
    return SimpleNamespace(request_id=name, spec_token_ids=[*drafts], num_output_tokens=1)


class Scheduler:
    """Takes requests from the queue while there are places; returns the draft tokens of the step."""

    def __init__(self, config="served", places=3):
        self.vllm_config, self.max_num_running_reqs = config, places
        self.waiting, self.running = Queue(), [request("a"), request("b")]

    def stock(self):
        drafts = [token for one in self.running for token in one.spec_token_ids]
        for one in self.running:
            one.spec_token_ids = []
        while self.waiting and len(self.running) < self.max_num_running_reqs:
            self.running.append(self.waiting.pop(0))
        return drafts

    schedule = drop_drafts_for_prompts(stock, lambda config: config == "served")

    def step(self, *arrivals):
        for one in self.running:
            one.spec_token_ids = [7, 8]
        self.waiting.extend(map(request, arrivals))
        return len(self.schedule())


def test_the_step_of_a_waiting_request_verifies_no_drafts():
    scheduler = Scheduler()
    assert [scheduler.step(), scheduler.step("c"), scheduler.step()] == [4, 0, 6]


def test_there_are_drafts_where_no_place_is_free():
    scheduler = Scheduler(places=2)
    assert [scheduler.step("c"), scheduler.step(), scheduler.step()] == [4, 4, 4]


def test_many_requests_keep_their_drafts():
    scheduler = Scheduler(places=99)
    for number in range(MOST_RUNNING - 3):
        scheduler.running.append(request(number))
    assert scheduler.step("last") == 0  # beside one less than the most
    assert [scheduler.step(), scheduler.step("one more")] == [2 * MOST_RUNNING, 2 * MOST_RUNNING]


def test_never_two_steps_in_a_row():
    scheduler = Scheduler(places=9)
    assert [scheduler.step(name) for name in "cdef"] == [0, 6, 0, 10]


def test_a_request_for_which_there_is_no_memory_has_the_effect_once():
    drops, dropped = DraftDrops(), []
    for _ in range(4):
        dropped.append(drops.next_step_drops("c", 2, 9))
        drops.next_step += 1
    assert dropped == [True, False, False, False]


def test_steps_without_drafts_do_not_count():
    scheduler = Scheduler(places=9)
    scheduler.waiting.append(request("c"))
    scheduler.schedule()
    assert scheduler.step("d") == 0


class Engine:
    """Has drafts for all running requests when it is asked, and messages that came during a step."""

    def __init__(self, scheduler):
        self.scheduler, self.asked, self.input_queue = scheduler, 0, queue.Queue()
        self.vllm_config = scheduler.vllm_config

    def stock(self, model_executed):
        self.asked += model_executed
        for one in self.scheduler.running:
            one.spec_token_ids = [7, 8]

    post_step = skip_drafts_for_prompts(stock, lambda config: config == "served")

    def step(self, *messages):
        """Run a step, during which messages arrive; return its draft tokens, and whether drafts were asked for."""
        found, asked = len(self.scheduler.schedule()), self.asked
        for kind, name in messages:
            self.input_queue.put((SimpleNamespace(name=kind), (request(name), 0)))
        self.post_step(True)
        while not self.input_queue.empty():
            kind, (new, _) = self.input_queue.get()
            if kind.name == "ADD":
                self.scheduler.waiting.append(new)
        return found, self.asked > asked


def test_nothing_is_drafted_for_a_step_that_will_read_a_prompt():
    engine = Engine(Scheduler(places=9))
    steps = [engine.step(), engine.step(("ADD", "c")), engine.step(("ADD", "d")), engine.step()]
    # After "c" arrived, the next step has no drafts; "d" is read beside drafts, not two steps in a row without.
    assert steps == [(0, True), (4, False), (0, True), (6, True)]
    assert engine.step()[0] == 8


def test_other_messages_stop_no_draft():
    engine = Engine(Scheduler(places=9))
    assert [engine.step(("ABORT", "a")), engine.step()] == [(0, True), (4, True)]
    assert engine.step(("ABORT", "a"), ("ADD", "c")) == (4, False)


def test_requests_without_an_answer_do_not_count():
    """Nothing is drafted for them, so the next request with a prompt still has its effect."""
    engine = Engine(Scheduler(places=9))
    for one in engine.scheduler.running:
        one.num_output_tokens = 0
    assert engine.step(("ADD", "c")) == (0, True)
    engine.scheduler.waiting.clear()
    for one in engine.scheduler.running:
        one.num_output_tokens = 1
    assert engine.step(("ADD", "d")) == (4, False)


def test_other_engines_are_always_asked():
    engine = Engine(Scheduler("undrafted", places=9))
    engine.scheduler.schedule = list  # of a class of its own, which has no configuration
    del engine.scheduler.vllm_config
    assert engine.step(("ADD", "c")) == (0, True)


@pytest.mark.parametrize("config", ["served", "undrafted"])
def test_whose_drafts_they_are_is_asked_before_the_first_step_alone(config, monkeypatch):
    """The answer reads the files of the head."""
    asked = []
    is_served = lambda config: asked.append(config) or config == "served"  # noqa: E731
    monkeypatch.setattr(Scheduler, "schedule", drop_drafts_for_prompts(Scheduler.stock, is_served))
    monkeypatch.setattr(Engine, "post_step", skip_drafts_for_prompts(Engine.stock, is_served))
    engine = Engine(Scheduler(config, places=9))
    engine.step()
    known = len(asked)
    for _ in range(3):
        engine.step()
    assert known > 0
    assert len(asked) == known


def test_an_engine_without_a_queue_sees_the_waiting_requests():
    waiting = Queue([request("c")])
    assert (first_waiting(waiting, None), first_waiting(Queue(), None)) == ("c", None)


def test_other_schedulers_stay_as_they_are():
    assert Scheduler("undrafted").step("c") == 4
