"""Compatibility of an objective with a drafter and its tree builder, checked before the first training step."""

from __future__ import annotations

from typing import Any

from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM
from ctcdraft.objectives.base import Objective


def describe_reading(objective: Objective, drafter: DraftHead, frames: int) -> str:
    """Return a phrase on how the trained frames become a tree; raise InputError where they cannot.

    The two mismatches of the paper's Table 2 are allowed: cross-entropy with collapse, and CTC without.
    """
    frame_tree = getattr(drafter, "frame_tree", None)
    supervises, interprets_as = kinds(objective, frame_tree)
    if supervises == "states" and not drafter.predicts_hidden_states:
        raise InputError(
            f"the objective trains predictions of the base's next hidden states, which {type(drafter).__name__} does "
            "not make; objective=eagle and eagle_ctc are for drafter=eagle"
        )
    refuse_incompatible(objective, frame_tree)
    correction = getattr(drafter, "correction", None)
    if supervises in ("alignments", "transductions") and getattr(correction, "reads_frames", False):
        raise InputError(
            f"the objective trains labels in any frame, but {type(correction).__name__} corrects frame k for label k; "
            "use objective=cross_entropy or distill, or drafter/correction=gru"
        )
    if supervises == "tokens" and frames > objective.labels and drafter.per_frame_weights:
        raise InputError(
            f"the objective trains frame k on label k, so {frames - objective.labels} of {frames} frames would "
            f"learn nothing; set objective.labels={frames} or drafter.frames={objective.labels}"
        )
    if supervises is None or interprets_as is None:
        return "in the drafter's own way"
    return mismatch(objective, frame_tree) or f"trained as {supervises}, read as {interprets_as}"


def describe_unused_layers(base: BaseLM, drafter: DraftHead) -> str:
    """Return a phrase on auxiliary layers that the drafter does not read; empty where it reads all."""
    if len(base.aux_layers) == 1 or getattr(drafter, "uses_aux_hidden_states", True):
        return ""
    return (
        f"; of the {len(base.aux_layers)} layers base.aux_layers={base.aux_layers} {type(drafter).__name__} reads the "
        "last one at most"
    )


def refuse_incompatible(objective: Any, frame_tree: Any) -> None:
    """Raise InputError where a tree builder interprets frames as something they were not trained for."""
    supervises, interprets_as = kinds(objective, frame_tree)
    name = type(frame_tree).__name__
    if supervises == "transductions" and interprets_as not in (None, supervises):
        raise InputError(
            f"the objective trains frames that never merge, but {name} reads them as {interprets_as}; "
            "use drafter/tree=transducer_search"
        )
    if supervises == "alignments" and interprets_as == "transductions":
        raise InputError(
            f"the objective lets repeated frames merge into one token, but {name} takes each for a token of its own; "
            "use objective=transducer or prefix_transducer (or drafter/tree=prefix_search)"
        )
    if supervises == "tokens" and interprets_as in ("alignments", "transductions"):
        raise InputError(
            f"the objective trains frame k on label k and leaves the blank untrained, but {name} sums over "
            "alignments with blanks; use drafter/tree=per_frame (to sample: sampled_per_frame; for Table 2: collapse)"
        )


def mismatch(objective: Any, frame_tree: Any) -> str | None:
    """Return a phrase where frames are read otherwise than they were trained; None where not, or if unknown."""
    supervises, interprets_as = kinds(objective, frame_tree)
    # Collapse takes fixed alignments instead of summing over all, but they are alignments: raw frames are CTC's own.
    as_trained = supervises == interprets_as or (supervises, interprets_as) == ("alignments", "raw frames")
    if None in (supervises, interprets_as) or as_trained:
        return None
    published = (supervises, interprets_as) in (("tokens", "raw frames"), ("alignments", "tokens"))
    as_in = ", as in Table 2 of the paper" if published else ""
    return f"trained as {supervises} but read as {interprets_as} by {type(frame_tree).__name__}: a mismatch{as_in}"


def kinds(objective: Any, frame_tree: Any) -> tuple[str | None, str | None]:
    """Return what frames are trained as and read as; None for an objective or a tree builder that does not declare it.

    An objective of one's own need not, and sequential drafters have no frames to read.
    """
    declared = getattr(objective, "supervises", None), getattr(frame_tree, "interprets_as", None)
    for part, name in zip((objective, frame_tree), declared, strict=True):
        if name == "words":
            raise InputError(f'{type(part).__name__} declares "words", which is called "tokens" now; rename it')
    return declared
