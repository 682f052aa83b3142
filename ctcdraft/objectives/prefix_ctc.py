"""The prefix objective: the probability that the collapsed text begins with the labels. It knows scores, not frames."""

from __future__ import annotations

from ctcdraft.drafters.drafter import Batch
from ctcdraft.nn.heads import Emissions
from ctcdraft.objectives.ctc import blank_rate, of_alignments
from ctcdraft.objectives.objective import Loss, check_decay, check_frames, check_labels, decayed_mean, labels_there


class PrefixCTC:
    """-log P(the text begins with x1 .. xk), for every k of a window, weighted by decay^(k-1).

    It asks for what drafting is paid for: a draft is worth its longest right beginning, and what the frames
    say after it costs nothing, where CTC wants the text to end there. All k come from one recursion.
    Prefixes with adjacent repeats that the frames cannot say are left out; their share is a metric.
    """

    supervises = "alignments"
    likelihoods = staticmethod(of_alignments)

    def __init__(self, labels: int, decay: float) -> None:
        self.labels = check_labels(labels)
        self.decay = check_decay(decay)

    def __call__(self, emissions: Emissions, batch: Batch) -> Loss:
        check_frames(emissions, self.labels)
        scores = emissions.scores(batch.labels_BAS)
        prefix_BAS = self.likelihoods(scores, batch).prefix_XS
        real_BAS = labels_there(batch)
        feasible_BAS = real_BAS & ~prefix_BAS.isneginf()  # what is not a number must show
        value = decayed_mean(-prefix_BAS, feasible_BAS, self.decay)
        infeasible = 1 - feasible_BAS.sum() / real_BAS.sum().clamp(min=1)
        metrics = {"blank_rate": blank_rate(scores, batch), "infeasible_share": infeasible}
        return Loss(value, {"loss": value.detach(), **metrics})
