"""What drafters share that read their own guesses: one law a level, and a growth that makes a tree of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.base import DraftHead
from ctcdraft.drafters.trees.draft_sampling import DraftSampling
from ctcdraft.drafters.trees.dynamic import StepFunction, TreeBuilder
from ctcdraft.errors import check_int
from ctcdraft.nn.packing import gather_following


class ReleasableStepFunction(StepFunction, Protocol):
    """Laws that have kept rows of their own for the guesses, and forget them when the tree is grown."""

    def release(self) -> Any:
        """What to remember of the text; of the guesses nothing."""


class SequentialDrafter(DraftHead):
    """A drafter of several dependent steps: `laws` says what comes after a text, `growth` asks it for a tree.

    frames: how deep it guesses, and how many teacher-forced frames an anchor has in training: frame t is what
    is said of label t when the root and the labels before t are known.

    Where the base has several taps it reads the last layer's states alone, or none: as published, each of these
    drafters has one place for one state.
    """

    uses_aux_hidden_states = False

    def __init__(self, frames: int, growth: TreeBuilder, stops: Collection[int]) -> None:
        super().__init__()
        self.frames = check_int(frames, "drafter.frames")
        self.growth = growth
        self.stops = tuple(sorted(stops))

    @abstractmethod
    def step_function(self, context: Context, memory: Any | None) -> ReleasableStepFunction:
        """The laws of what follows the context; reads what is new in it and drops what `memory` holds beyond it."""

    def draft(self, context: Context, memory: Any | None, rng: torch.Generator) -> tuple[TokenTree, Any]:
        step_function = self.step_function(context, memory)
        depth = min(context.depth, self.frames)
        tree = self.growth(
            step_function, context.root, depth, context.nodes, self.stops, DraftSampling.of(context, rng)
        )
        return tree, step_function.release()


def teacher_forced_tokens(batch: Batch, frames: int) -> Tensor:
    """The newest word that each frame is told, tokens_BAT: the root, then the labels before it.

    anchor a, root x[a+1]   ->   x[a+1]  x[a+2]  x[a+3] ...        (past the end of a text: its last word)
    """
    tokens_BAT = gather_following(batch.tokens_BL[..., None], batch.anchors_BA, batch.position_ids_BL, frames + 1)[
        :, :, 1:, 0
    ]
    return torch.cat([batch.roots_BA[..., None], tokens_BAT[..., 1:]], dim=-1)


def extend_visibility(seen_KR: Tensor, rows_K: Tensor) -> Tensor:
    """Which guessed rows a new level sees: what the rows it continues saw, and itself.

    level 1: a b          level 2, one below b, one below a:        a b | c d
             1 0                                                    0 1 | 1 0
             0 1                                                    1 0 | 0 1
    """
    itself_KK = torch.eye(len(rows_K), dtype=torch.bool, device=rows_K.device)
    return torch.cat([seen_KR[rows_K], itself_KK], dim=1)
