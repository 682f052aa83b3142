"""The proposer without an engine: drafts are computed when vLLM takes them, and steps are timed without them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ctcdraft.serving import proposer as proposer_module
from ctcdraft.serving.proposer import CTCProposer, LastStep

CATCH_UP, DRAFT, FORWARD = 0.5, 0.02, 0.1  # seconds
STOPS = (1, None)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def proposer(monkeypatch):
    clock, steps, outcomes, forgotten = Clock(), [], [], []
    monkeypatch.setattr(proposer_module, "perf_counter", clock)

    def store_older():
        clock.now += CATCH_UP

    def draft(batch, depth):
        clock.now += DRAFT
        return batch.roots_Q[:, None] + torch.arange(1, depth + 1), torch.full((len(batch.roots_Q), depth), 0.9)

    one = CTCProposer.__new__(CTCProposer)
    one.depth, one.due, one.last = 3, None, LastStep(0.0, frozenset())
    one.stored = []
    store_when_many = lambda: one.stored.append(clock.now)  # noqa: E731
    one.drafter = SimpleNamespace(store_older=store_older, draft=draft, store_when_many=store_when_many)
    one.lengths = SimpleNamespace(
        wants_draft=lambda requests: True,
        choose=lambda ids, probs_QK, rooms_Q, requests: rooms_Q,
        observe_request=lambda one, drafted, accepted: outcomes.append((one, drafted, accepted)),
        forget=lambda ids: forgotten.extend(ids),
        observe_step=lambda *values: steps.append(values),
    )
    one.clock, one.steps, one.outcomes, one.forgotten = clock, steps, outcomes, forgotten
    return one


def step_of(proposer, sampled, lengths, drafted, ids="ab", limits=(20, 20)):
    """Let a step end; return the drafts as they are before and after vLLM takes them."""
    proposer.clock.now += FORWARD
    starts = np.cumsum([0, *(1 + count for count in drafted)]).tolist()
    table_QM = torch.zeros(len(ids), 1, dtype=torch.int32)
    proposer.begin_step(tuple(ids), starts, drafted, table_QM, limits, [STOPS] * len(ids))
    lengths = np.array(lengths)
    drafts = proposer.propose(sampled, lengths)
    before = [list(draft) for draft in drafts]
    lengths[:] = 0  # vLLM writes to its array
    proposer.complete()
    return before, drafts


def test_drafts_are_filled_in_when_they_are_taken(proposer):
    before, drafts = step_of(proposer, [[7], [9]], [10, 18], [0, 0])
    assert before == [[], []]
    assert drafts == [[8, 9, 10], [10]]  # the second request has room for one
    proposer.complete()  # without a new step nothing is due
    assert drafts == [[8, 9, 10], [10]]


def test_a_request_in_prefill_gets_no_draft(proposer):
    assert step_of(proposer, [[], [9]], [10, 12], [0, 0])[1] == [[], [10, 11, 12]]


def test_steps_are_timed_without_their_drafts_and_without_catching_up(proposer):
    step_of(proposer, [[7], [9]], [10, 10], [0, 0])
    step_of(proposer, [[8, 9], [3]], [12, 11], [3, 1])
    ((requests, read, committed, seconds, draft_seconds),) = proposer.steps
    assert (requests, read, committed) == (2, 6, 3)
    assert (seconds, draft_seconds) == pytest.approx((FORWARD, DRAFT))


def test_a_request_that_ends_gets_no_draft_and_its_surplus_tokens_do_not_count(proposer):
    step_of(proposer, [[7], [9]], [10, 10], [0, 0], limits=(12, 20))
    # The first reaches its limit of 12 tokens with the second of three; the other samples a stop token.
    _, drafts = step_of(proposer, [[8, 9, 3], [5, 1]], [13, 12], [2, 1], limits=(12, 20))
    assert drafts == [[], []]
    ((requests, read, committed, *_),) = proposer.steps
    assert (requests, read, committed) == (2, 5, 4)
    assert proposer.outcomes == [("a", 2, 2), ("b", 1, 1)]
    assert len(proposer.stored) == 1  # nothing is drafted, so what waits may be stored


def test_room_is_what_the_request_may_still_generate(proposer):
    assert step_of(proposer, [[7], [9]], [10, 10], [0, 0], limits=(13, 12))[1] == [[8, 9], [10]]


def test_a_step_with_another_number_of_requests_than_expected_is_not_measured(proposer):
    step_of(proposer, [[7], [9]], [10, 10], [0, 0])
    step_of(proposer, [[8]], [11], [0], ids="a", limits=(20,))  # the other was aborted
    assert proposer.steps == []
    assert proposer.forgotten == ["b"]
    step_of(proposer, [[9]], [12], [0], ids="a", limits=(20,))
    assert len(proposer.steps) == 1


def test_requests_are_drafted_for_in_the_order_of_their_lengths(proposer):
    asked = []
    draft = proposer.drafter.draft
    proposer.drafter.draft = lambda batch, depth: (asked.append(batch.lengths), draft(batch, depth))[1]
    assert step_of(proposer, [[7], [9]], [15, 10], [0, 0])[1] == [[8, 9, 10], [10, 11, 12]]
    assert asked == [[9, 14]]


def test_rows_of_rejected_draft_tokens_are_left_out(proposer):
    batches = []
    draft = proposer.drafter.draft
    proposer.drafter.draft = lambda batch, depth: (batches.append(batch), draft(batch, depth))[1]
    # Three requests: one of three draft tokens accepted, in prefill with four tokens read, both of two accepted.
    proposer.begin_step(tuple("abc"), [0, 4, 8, 11], [3, 0, 2], torch.zeros(3, 1), (20,) * 3, [STOPS] * 3)
    proposer.propose([[5, 6], [], [7, 8, 9]], np.array([10, 4, 8]))
    proposer.complete()
    (batch,) = batches
    assert batch.kept_L.tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 10]
    assert batch.kept_L[batch.rows_Q].tolist() == [10, 1]  # the last rows of the third and of the first request
    assert (batch.roots_Q.tolist(), batch.anchors_Q.tolist(), batch.lengths) == ([9, 6], [6, 8], [7, 9])
