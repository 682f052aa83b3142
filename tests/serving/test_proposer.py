"""The proposer without an engine: drafts are computed when vLLM takes them, and steps are timed without them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ctcdraft.serving import proposer as proposer_module
from ctcdraft.serving.proposer import CTCProposer, LastStep

CATCH_UP, DRAFT, FORWARD = 0.5, 0.02, 0.1  # seconds


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def proposer(monkeypatch):
    clock, steps = Clock(), []
    monkeypatch.setattr(proposer_module, "perf_counter", clock)

    def store_older():
        clock.now += CATCH_UP

    def draft(batch, depth):
        clock.now += DRAFT
        return batch.roots_Q[:, None] + torch.arange(1, depth + 1), torch.full((len(batch.roots_Q), depth), 0.9)

    one = CTCProposer.__new__(CTCProposer)
    one.max_length, one.depth, one.due, one.last = 20, 3, None, LastStep(0.0, frozenset())
    one.drafter = SimpleNamespace(store_older=store_older, draft=draft)
    one.lengths = SimpleNamespace(
        wants_draft=lambda requests: True,
        choose=lambda ids, probs_QK, rooms_Q, requests: rooms_Q,
        observe_request=lambda one, accepted: None,
        observe_step=lambda *values: steps.append(values),
    )
    one.clock, one.steps = clock, steps
    return one


def step_of(proposer, sampled, lengths, drafted):
    """Let a step end; return the drafts as they are before and after vLLM takes them."""
    proposer.clock.now += FORWARD
    starts = np.cumsum([0, *(1 + count for count in drafted)]).tolist()
    proposer.begin_step(tuple("ab"), starts, drafted, torch.zeros(2, 1, dtype=torch.int32))
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
