"""Draft lengths from probabilities and times that are given, not measured."""

import numpy as np
import pytest

from ctcdraft.drafters.tree_policy import AcceptanceModel
from ctcdraft.serving.lengths import FIRST_DRAFTED, FIRST_PLAIN, MOST_WAIT, DraftLengths, StepTime

PROBS_QK = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.2, 0.1, 0.05]])


def simulate(lengths, steps, requests, base, slope, draft, accepted_share=1.0):
    """Return the kinds of the steps and the time they took, for an engine of these times."""
    drafted, total, tokens = [], 0.0, 0.0
    probs_QK = np.tile(PROBS_QK, (requests // 2, 1))
    ids, rooms_Q = list(range(requests)), np.full(requests, 4)
    for _ in range(steps):
        wants = lengths.wants_draft(requests)
        chosen_Q = lengths.choose(ids, probs_QK, rooms_Q, requests) if wants else np.zeros(requests, dtype=int)
        read = requests + int(chosen_Q.sum())
        accepted_Q = accepted_share * np.array([probs_QK[i, :n].sum() for i, n in enumerate(chosen_Q)])
        seconds = base + slope * read
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
        lengths.observe_request("a", 3)
        lengths.observe_request("b", 0)
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
