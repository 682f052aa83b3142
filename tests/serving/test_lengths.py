"""Draft lengths from probabilities and times that are given, not measured."""

import numpy as np
import pytest

from ctcdraft.drafters.acceptance import AcceptanceModel
from ctcdraft.serving.lengths import FIRST_DRAFTED, FIRST_PLAIN, MAX_UNMEASURED, MOST_WAIT, DraftLengths, StepTime

PROBS_QK = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.2, 0.1, 0.05]])


def simulate(lengths, steps, requests, base, slope, draft, accepted_share=1.0, measured=lambda step: True):
    """Return the kinds of the steps and the tokens per second, for an engine of these times."""
    drafted, total, tokens = [], 0.0, 0.0
    probs_QK = np.tile(PROBS_QK, (requests // 2, 1))
    ids, rooms_Q = list(range(requests)), np.full(requests, 4)
    for step in range(steps):
        wants = lengths.wants_draft(requests)
        chosen_Q = lengths.choose(ids, probs_QK, rooms_Q, requests) if wants else np.zeros(requests, dtype=int)
        read = requests + int(chosen_Q.sum())
        accepted_Q = accepted_share * np.array([probs_QK[i, :n].sum() for i, n in enumerate(chosen_Q)])
        seconds = base + slope * read
        if measured(step):
            lengths.observe_step(requests, read, requests + accepted_Q.sum(), seconds, draft if wants else None)
        drafted.append(wants)
        total += seconds + draft * wants
        tokens += requests + accepted_Q.sum()
    return drafted, tokens / total


def test_the_line_of_step_times_is_found():
    time = StepTime()
    for tokens in (4, 8, 16, 4, 12):
        time.add(tokens, 0.01 + 0.002 * tokens)
    assert time.line() == pytest.approx((0.01, 0.002))


def test_one_size_alone_has_no_slope():
    time = StepTime()
    for _ in range(5):
        time.add(8, 0.02)
    assert time.line() == pytest.approx((0.02, 0.0))


@pytest.mark.parametrize(
    ("slope", "expected"), [(0.0, [4, 4]), (0.002, [4, 1]), (0.05, [0, 0])], ids=["free", "some", "none"]
)
def test_lengths_follow_probabilities_and_times(slope, expected):
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    regime = lengths.regime(2)
    for read in (2, 6, 10):
        regime.time.add(read, 0.01 + slope * read)
    assert lengths.choose("ab", PROBS_QK, np.array([4, 4]), 2).tolist() == expected


def test_no_length_exceeds_its_room_or_enters_the_impossible():
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    probs_QK = np.array([[0.9, 0.8, 0.0, 0.0], [0.9, 0.8, 0.7, 0.6]])
    for adaptive in (True, False):
        lengths.adaptive = adaptive
        assert lengths.choose("ab", probs_QK, np.array([4, 3]), 2).tolist() == [2, 3]


def test_requests_whose_drafts_fail_get_shorter_ones():
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    for read in (2, 6, 10):
        lengths.regime(2).time.add(read, 0.01 + 0.004 * read)
    same_QK = np.tile(PROBS_QK[:1], (2, 1))
    for _ in range(60):
        lengths.choose("ab", same_QK, np.array([4, 4]), 2)
        lengths.observe_request("a", 4, 3)
        lengths.observe_request("b", 4, 0)
    first, second = lengths.choose("ab", same_QK, np.array([4, 4]), 2).tolist()
    assert first == 4
    assert second < first


def test_where_drafting_pays_nearly_all_steps_draft():
    drafted, _ = simulate(DraftLengths(AcceptanceModel(), adaptive=True), 2000, 2, 0.005, 0.0, 0.001)
    assert drafted[: FIRST_PLAIN + FIRST_DRAFTED] == [False] * FIRST_PLAIN + [True] * FIRST_DRAFTED
    assert sum(drafted) > 0.95 * len(drafted)


def test_where_nothing_is_accepted_at_most_three_percent_are_lost():
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    _, rate = simulate(lengths, MOST_WAIT, 16, 0.004, 0.001, 0.008, accepted_share=0.0)
    assert rate > 0.97 * 16 / (0.004 + 16 * 0.001)


def test_where_no_step_can_be_measured_drafting_ends():
    """Four steps are measured, then every step has prefill."""
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    drafted, _ = simulate(lengths, 1000, 16, 0.004, 0.001, 0.008, measured=lambda step: step < FIRST_PLAIN)
    assert sum(drafted) == MAX_UNMEASURED


def test_where_few_steps_are_measured_at_most_three_percent_are_lost():
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    rare = lambda step: step % 5 == 0  # noqa: E731
    _, rate = simulate(lengths, 4 * MOST_WAIT, 16, 0.004, 0.001, 0.008, accepted_share=0.0, measured=rare)
    assert rate > 0.97 * 16 / (0.004 + 16 * 0.001)


def test_an_unmeasured_trial_does_not_put_off_the_next_one():
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    simulate(lengths, 600, 2, 0.005, 0.0, 0.001, accepted_share=0.0)  # drafting does not pay
    regime = lengths.regime(2)
    assert (regime.drafting, regime.settled) == (False, True)
    wait = regime.wait
    regime.left = 1
    regime.observe(2, 2, 0.005, 0, 0.0)
    assert (regime.drafting, regime.settled) == (True, False)
    for _ in range(MAX_UNMEASURED + 1):
        lengths.wants_draft(2)
    assert (regime.drafting, regime.settled, regime.wait) == (False, True, wait)


def test_steps_that_become_slower_for_good_are_noticed_and_single_ones_are_not():
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    regime = lengths.regime(2)
    for _ in range(20):
        regime.observe(2, 2, 0.01, 0, 0.0)
    regime.observe(2, 2, 1.0, 0, 0.0)
    assert regime.plain.per_second == pytest.approx(200)
    for _ in range(100):
        regime.observe(2, 2, 0.1, 0, 0.0)
    assert regime.plain.per_second == pytest.approx(20, rel=0.05)


def test_a_draft_whose_end_was_dropped_is_expected_to_have_fewer_tokens_accepted():
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    for read in (2, 6, 10):
        lengths.regime(2).time.add(read, 0.01)
    lengths.choose("ab", PROBS_QK, np.array([4, 4]), 2)
    lengths.observe_request("a", 2, 2)
    assert lengths.recent["a"][1] == pytest.approx(PROBS_QK[0, :2].sum(), rel=0.02)


def test_nothing_is_kept_of_requests_that_ended():
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    lengths.choose("ab", PROBS_QK, np.array([4, 4]), 2)
    lengths.observe_request("a", 2, 2)
    lengths.choose("ab", PROBS_QK, np.array([4, 4]), 2)
    lengths.forget("ab")
    assert not lengths.recent
    assert not lengths.expected


@pytest.mark.parametrize(("fewest", "most"), [(1, 1), (2, 2), (3, 5), (6, 11), (12, 23)])
def test_batches_of_similar_sizes_are_measured_together(fewest, most):
    lengths = DraftLengths(AcceptanceModel(), adaptive=True)
    group = lengths.regime(fewest)
    assert [lengths.regime(number) is group for number in (fewest - 1, most, most + 1)] == [False, True, False]
