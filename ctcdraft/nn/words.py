"""Words without a blank: what a drafter emits that is told the words before. It knows no alignment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from ctcdraft.errors import InputError
from ctcdraft.nn.heads import Emissions


class WordHead(nn.Module):
    """A head over the words alone, computed in its own dtype."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words: Any = words

    @property
    def blank(self) -> int:
        """V: no class of this head, only the number of them."""
        return self.words.weight.shape[0]

    def forward(self, states_XD: Tensor) -> Tensor:
        return self.token_logits(states_XD)

    def token_logits(self, states_XD: Tensor) -> Tensor:
        """Logits_XV. For a state of the base itself, and the base's head, these are the base's own."""
        return self.words(states_XD.to(self.words.weight.dtype))


@dataclass(frozen=True)
class WordEmissions(Emissions):
    """Frame t says word t, given the root and the true words before it: there is nothing to align.

    head: the base's, which the base's own states may be put through. own: the one these states belong to.
    """

    head: Any
    own: Any = None

    def logits(self) -> Tensor:
        """Logits_BATV."""
        return self.own(self.states_BATD)

    def scores(self, labels_BAS: Tensor) -> NoReturn:
        raise InputError(
            "this objective aligns labels with frames and blanks, but every frame of this drafter is told the words "
            "before it and has no blank; use objective=cross_entropy or distill, for drafter=eagle eagle or eagle_ctc"
        )

    def label_log_probs(self, labels_BAS: Tensor) -> Tensor:
        return Emissions(self.states_BATD, self.own).label_log_probs(labels_BAS)

    def map_label_frames(self, measure: Callable[..., Tensor], labels_BAS: Tensor, *more_BA: Tensor) -> Tensor:
        """As that of Emissions, by the head these states belong to."""
        return Emissions(self.states_BATD, self.own).map_label_frames(measure, labels_BAS, *more_BA)
