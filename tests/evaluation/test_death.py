"""Why a draft died, on passes made by hand, where anybody can see it."""

import pytest
from truths import slow_next_label_distribution

from ctcdraft.evaluation.tracing.records import TraceFrames, TraceStep
from ctcdraft.evaluation.tracing.rejection_reason import (
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
    exact_alignments,
    forecast,
    prefix_alignments,
    rejection_reason,
)

A, B, C = 11, 12, 13  # words; the root is 7
_ = None


def frames(*said, reads="alignments", sure=0.9):
    """Frames that say these words, or the blank (_), and leave what they lack to be sure to the others alike."""
    words, rows = (A, B, C), []
    for one in said:
        row = [(1 - sure) / 3] * 4
        row[3 if one is None else words.index(one)] = sure
        rows.append(tuple(row))
    return TraceFrames(reads, words, (tuple(rows),))


def a_pass(guesses, bonus, seen=None, accepted=None, depth=6, committed=None, parents=None):
    """A chain of guesses below the root 7, all of which stood unless said otherwise."""
    accepted = len(guesses) if accepted is None else accepted
    path = tuple(range(accepted + 1))
    parents = tuple(range(-1, len(guesses))) if parents is None else parents
    committed = len(path) if committed is None else committed
    return TraceStep((7, *guesses), parents, path, bonus, committed, depth, ((bonus, 0.9),), seen)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        # The frames say A B and then nothing, and A B stood: the base went on with C.
        (a_pass([A, B], C, frames(A, B, _, _)), EARLY_BLANK),
        (a_pass([A, B, A], C, frames(A, B, _, _), accepted=2), EARLY_BLANK),  # though the tree had a guess below
        # A A in a row is one A: the base meant two.
        (a_pass([A], A, frames(A, A, _, _)), MERGED_REPEAT),
        (a_pass([B, A], A, frames(B, _, A, A, _)), MERGED_REPEAT),
        (a_pass([A], A, frames(A, _, _, _)), EARLY_BLANK),  # nothing was repeated here
        # A blank between them parts them: two A were guessed and stood, the third was never meant.
        (a_pass([A, A], A, frames(A, _, A, _)), EARLY_BLANK),
        (a_pass([A], A, frames(A, A, _, reads="transductions")), NOT_IN_TREE),  # nothing merges
        # B was guessed behind A, the base said C.
        (a_pass([A, B], C, frames(A, B, _, _), accepted=1), WRONG_TOKEN),
        (a_pass([B], C, frames(B, A), accepted=0), WRONG_TOKEN),
        # The frames meant A B, but the tree held only A.
        (a_pass([A], B, frames(A, B, _, _)), NOT_IN_TREE),
        (a_pass([A, B, C], B, frames(A, B, C)), ALL_ACCEPTED),
        (a_pass([A, B], C, frames(A, B, C, _), depth=2), ALL_ACCEPTED),
        (a_pass([A, B], C, frames(A, B, C, _), committed=2), ENDED),
        (a_pass([], C), NO_DRAFT),
        (a_pass([], C, depth=0), ALL_ACCEPTED),
        (a_pass([A, B], B, frames(A, B), accepted=1), REJECTED_BY_VERIFIER),
        # Read directly, frame k is word k and the blank means nothing.
        (a_pass([A], B, frames(A, B, reads="words")), NOT_IN_TREE),
        (a_pass([A, B], C, frames(A, B, C, reads="words"), accepted=1), WRONG_TOKEN),
        (a_pass([A], B, frames(A, _, A, reads="words", sure=0.7)), WRONG_TOKEN),
        # Without frames there is only the tree.
        (a_pass([A, B], C, accepted=1), WRONG_TOKEN),
        (a_pass([A, B], C), ALL_ACCEPTED),
        (a_pass([A, B, C], C, accepted=1, parents=(-1, 0, 0, 2)), NOT_IN_TREE),
    ],
)
def test_the_reason(one, why):
    assert rejection_reason(one) == why
    assert why in REASONS


def test_what_the_frames_foresee_is_the_exact_law():
    """Held to every alignment there is; C was not recorded, and is in the rest."""
    whole = [[0.5, 0.2, 0.1, 0.2], [0.1, 0.3, 0.2, 0.4], [0.25, 0.25, 0.25, 0.25]]
    recorded = tuple((a, b, blank) for a, b, _c, blank in whole)
    seen = TraceFrames("alignments", (A, B), (recorded,))
    for said, places in (((), ()), ((A,), (0,)), ((A, B), (0, 1)), ((B, B), (1, 1))):
        words, end = slow_next_label_distribution(whole, 3, places)
        foreseen = forecast(seen, said)
        assert foreseen.end == pytest.approx(end)
        for word, place in ((A, 0), (B, 1), (OTHER_TOKENS, 2)):
            assert foreseen.token_probs[word] == pytest.approx(words.get(place, 0.0))


def test_frames_that_listen_are_heard_behind_the_text():
    """Before a word is said the frames mean A, behind it B, whatever they were before."""
    mean_a, mean_b = frames(A, A).heard[0], frames(B, B).heard[0]
    seen = TraceFrames("alignments", (A, B, C), (mean_a, mean_b))
    assert forecast(seen, ()).best == A
    assert forecast(seen, (A,)).best == B


def test_alignments_are_in_words_and_blanks():
    seen = frames(A, _, A, _, sure=0.7)
    ((p, way),) = exact_alignments(seen, (A, A), 1)
    assert way == [A, None, A, None]
    assert p == pytest.approx(0.7**4)
    share, ((p, way),) = prefix_alignments(seen, (A, A), 1)
    assert way == [A, None, A]
    assert p == pytest.approx(0.7**3)
    assert p < share < 1


def test_all_that_was_not_recorded_is_not_one_word():
    """A hundred unlikely words together outweigh A, which is likelier than each of them."""
    seen = TraceFrames("alignments", (A, B), (((0.3, 0.1, 0.05), (0.3, 0.1, 0.05)),))
    assert forecast(seen, ()).token_probs[OTHER_TOKENS] > forecast(seen, ()).token_probs[A]
    assert rejection_reason(a_pass([B], A, seen, accepted=0)) == NOT_IN_TREE
