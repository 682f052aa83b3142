"""Steps that read a waiting prompt verify no drafts: once per request, never two steps in a row."""

from types import SimpleNamespace

from ctcdraft.serving.scheduling import MOST_RUNNING, DraftDrops, drop_drafts_for_prompts


class Queue(list):
    def peek_request(self):
        return self[0]


def request(name, drafts=()):
    return SimpleNamespace(request_id=name, spec_token_ids=[*drafts])


class Scheduler:
    """Takes requests from the queue while there are places; returns the draft tokens of the step."""

    def __init__(self, config="served", places=3):
        self.vllm_config, self.max_num_running_reqs = config, places
        self.waiting, self.running = Queue(), [request("a"), request("b")]

    def stock(self):
        drafts = [token for one in self.running for token in one.spec_token_ids]
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
    drops, running = DraftDrops(), [request("a", [7])]
    waiting = Queue([request("b")])
    assert [drops.next_step_drops(waiting, running, 4) for _ in range(4)] == [True, False, False, False]


def test_steps_without_drafts_do_not_count():
    drops, waiting = DraftDrops(), Queue([request("b")])
    assert not drops.next_step_drops(waiting, [request("a")], 4)
    assert drops.next_step_drops(waiting, [request("a", [7])], 4)


def test_other_schedulers_stay_as_they_are():
    assert Scheduler("undrafted").step("c") == 4
