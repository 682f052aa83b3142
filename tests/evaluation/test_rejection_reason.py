"""Rejection reasons of hand-made decoding steps."""

import pytest
from truths import slow_next_label_distribution

from ctcdraft.evaluation.trace import (
    ALL_ACCEPTED,
    EARLY_BLANK,
    ENDED,
    MERGED_REPEAT,
    NO_DRAFT,
    NOT_IN_TREE,
    OTHER_TOKENS,
    REASONS,
    REJECTED_BY_VERIFIER,
    WRONG_TOKEN,
    TraceFrames,
    TraceStep,
    exact_alignments,
    forecast,
    prefix_alignments,
    rejection_reason,
)

A, B, C = 11, 12, 13  # token ids; the root is 7
_ = None


def frames(*labels, reads="alignments", sure=0.9):
    """Frames with probability `sure` for these tokens, or the blank (_), and the rest shared equally."""
    tokens, rows = (A, B, C), []
    for step in labels:
        row = [(1 - sure) / 3] * 4
        row[3 if step is None else tokens.index(step)] = sure
        rows.append(tuple(row))
    return TraceFrames(reads, tokens, (tuple(rows),))


def make_step(drafts, bonus, trace=None, accepted=None, depth=6, committed=None, parents=None):
    """A decoding step with a chain of draft tokens below the root 7, all accepted by default."""
    accepted = len(drafts) if accepted is None else accepted
    path = tuple(range(accepted + 1))
    parents = tuple(range(-1, len(drafts))) if parents is None else parents
    committed = len(path) if committed is None else committed
    return TraceStep((7, *drafts), parents, path, bonus, committed, depth, ((bonus, 0.9),), trace)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        # The frames propose A B and then blanks, and A B was accepted: the base model continued with C.
        (make_step([A, B], C, frames(A, B, _, _)), EARLY_BLANK),
        (make_step([A, B, A], C, frames(A, B, _, _), accepted=2), EARLY_BLANK),  # although the tree had a node below
        # A A in a row collapses to one A: the base model emitted two.
        (make_step([A], A, frames(A, A, _, _)), MERGED_REPEAT),
        (make_step([B, A], A, frames(B, _, A, A, _)), MERGED_REPEAT),
        (make_step([A], A, frames(A, _, _, _)), EARLY_BLANK),  # nothing was repeated here
        # A blank separates them: two A were drafted and accepted, a third was not proposed.
        (make_step([A, A], A, frames(A, _, A, _)), EARLY_BLANK),
        (make_step([A], A, frames(A, A, _, reads="transductions")), NOT_IN_TREE),  # nothing merges
        # B was drafted after A, the base model emitted C.
        (make_step([A, B], C, frames(A, B, _, _), accepted=1), WRONG_TOKEN),
        (make_step([B], C, frames(B, A), accepted=0), WRONG_TOKEN),
        # The frames propose A B, but the tree held only A.
        (make_step([A], B, frames(A, B, _, _)), NOT_IN_TREE),
        (make_step([A, B, C], B, frames(A, B, C)), ALL_ACCEPTED),
        (make_step([A, B], C, frames(A, B, C, _), depth=2), ALL_ACCEPTED),
        (make_step([A, B], C, frames(A, B, C, _), committed=2), ENDED),
        (make_step([], C), NO_DRAFT),
        (make_step([], C, depth=0), ALL_ACCEPTED),
        (make_step([A, B], B, frames(A, B), accepted=1), REJECTED_BY_VERIFIER),
        # Read per frame, frame k proposes token k and the blank means nothing.
        (make_step([A], B, frames(A, B, reads="tokens")), NOT_IN_TREE),
        (make_step([A, B], C, frames(A, B, C, reads="tokens"), accepted=1), WRONG_TOKEN),
        (make_step([A], B, frames(A, _, A, reads="tokens", sure=0.7)), WRONG_TOKEN),
        # Without frames there is only the tree.
        (make_step([A, B], C, accepted=1), WRONG_TOKEN),
        (make_step([A, B], C), ALL_ACCEPTED),
        (make_step([A, B, C], C, accepted=1, parents=(-1, 0, 0, 2)), NOT_IN_TREE),
    ],
)
def test_the_reason(step, reason):
    assert rejection_reason(step) == reason
    assert reason in REASONS


def test_the_forecast_is_the_exact_next_label_distribution():
    """Compared with all alignments; C was not recorded and counts as OTHER_TOKENS."""
    probs = [[0.5, 0.2, 0.1, 0.2], [0.1, 0.3, 0.2, 0.4], [0.25, 0.25, 0.25, 0.25]]
    recorded = tuple((a, b, blank) for a, b, _c, blank in probs)
    trace = TraceFrames("alignments", (A, B), (recorded,))
    for labels, columns in (((), ()), ((A,), (0,)), ((A, B), (0, 1)), ((B, B), (1, 1))):
        tokens, end = slow_next_label_distribution(probs, 3, columns)
        predicted = forecast(trace, labels)
        assert predicted.end == pytest.approx(end)
        for token, column in ((A, 0), (B, 1), (OTHER_TOKENS, 2)):
            assert predicted.token_probs[token] == pytest.approx(tokens.get(column, 0.0))


def test_label_conditioned_frames_are_read_after_the_text():
    """Before any token is accepted the frames propose A, afterwards B."""
    mean_a, mean_b = frames(A, A).probs[0], frames(B, B).probs[0]
    trace = TraceFrames("alignments", (A, B, C), (mean_a, mean_b))
    assert forecast(trace, ()).best == A
    assert forecast(trace, (A,)).best == B


def test_alignments_are_in_tokens_and_blanks():
    trace = frames(A, _, A, _, sure=0.7)
    ((p, way),) = exact_alignments(trace, (A, A), 1)
    assert way == [A, None, A, None]
    assert p == pytest.approx(0.7**4)
    share, ((p, way),) = prefix_alignments(trace, (A, A), 1)
    assert way == [A, None, A]
    assert p == pytest.approx(0.7**3)
    assert p < share < 1


def test_unrecorded_tokens_are_not_one_token():
    """Many improbable tokens together outweigh A, which is more probable than each of them."""
    trace = TraceFrames("alignments", (A, B), (((0.3, 0.1, 0.05), (0.3, 0.1, 0.05)),))
    assert forecast(trace, ()).token_probs[OTHER_TOKENS] > forecast(trace, ()).token_probs[A]
    assert rejection_reason(make_step([B], A, trace, accepted=0)) == NOT_IN_TREE
