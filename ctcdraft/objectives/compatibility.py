"""What a run is going to cost, said before its first step. It measures one step and multiplies."""

from __future__ import annotations

from typing import Any

from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM
from ctcdraft.objectives.base import Objective


def describe_reading(objective: Objective, drafter: DraftHead, frames: int) -> str:
    """How the frames will be read, in words; refused where that could only be nonsense.

    The paper's Table 2 has the two crossings: cross-entropy read by collapse, and CTC read directly.
    """
    paths = getattr(drafter, "paths", None)
    taught, reads = getattr(objective, "supervises", None), getattr(paths, "interprets_as", None)
    if taught == "states" and not drafter.predicts_hidden_states:
        raise InputError(
            f"the objective teaches the base's next states, which {type(drafter).__name__} does not guess; "
            "objective=eagle and eagle_ctc are for drafter=eagle"
        )
    refuse_incompatible(objective, paths)
    if taught == "words" and frames > objective.labels and drafter.per_frame_weights:
        raise InputError(
            f"the objective teaches frame k to say label k, so {frames - objective.labels} of {frames} frames would "
            f"learn nothing; set objective.labels={frames} or drafter.frames={objective.labels}"
        )
    if taught is None or reads is None:
        return "in the drafter's own way"
    return mismatch(objective, paths) or f"taught {taught}, read as {reads}"


def describe_unused_layers(base: BaseLM, drafter: DraftHead) -> str:
    """What is computed and stored of the base's states and read by nobody, in words; nothing where all of it is."""
    if len(base.taps) == 1 or getattr(drafter, "uses_aux_hidden_states", True):
        return ""
    return (
        f"; of the {len(base.taps)} taps base.taps={base.taps} {type(drafter).__name__} reads the last layer's at most"
    )


def refuse_incompatible(objective: Any, paths: Any) -> None:
    """Raise InputError where frames so taught, so read, say nothing."""
    taught, reads = getattr(objective, "supervises", None), getattr(paths, "interprets_as", None)
    if reads is None:
        return
    name = type(paths).__name__
    if taught == "transductions" and reads != taught:
        raise InputError(
            f"the objective teaches frames of which no two say one word together, but {name} reads them as {reads}; "
            "use drafter/paths=transducer_search"
        )
    if taught == "alignments" and reads == "transductions":
        raise InputError(
            f"the objective lets repeated frames merge into one word, but {name} takes each for a word of its own; "
            "use objective=transducer or prefix_transducer (or drafter/paths=prefix_search)"
        )
    if taught == "words" and reads in ("alignments", "transductions"):
        raise InputError(
            f"the objective teaches frame k to say label k and leaves the blank untrained, but {name} sums over "
            "alignments with blanks; use drafter/paths=direct (or collapse, for Table 2's row)"
        )


def mismatch(objective: Any, paths: Any) -> str | None:
    """In words, where frames are read otherwise than they are taught; None where they are not, or nobody can say."""
    taught, reads = getattr(objective, "supervises", None), getattr(paths, "interprets_as", None)
    if None in (taught, reads) or taught == reads or {taught, reads} == {"alignments", "raw frames"}:
        return None
    published = (taught, reads) in (("words", "raw frames"), ("alignments", "words"))
    as_in = ", as in Table 2 of the paper" if published else ""
    return f"taught {taught} but read as {reads} by {type(paths).__name__}: a crossing{as_in}"
