"""Sequential drafters: each level of the tree is computed from the draft tokens above it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.base import DraftHead, refuse_other_tree
from ctcdraft.drafters.trees.request import StepFunction, StepTreeBuilder, TreeRequest
from ctcdraft.errors import check_int
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.base_layer import base_block_config, init_from_base_layer
from ctcdraft.nn.masks import gather_following
from ctcdraft.nn.transformer import CausalBlock


class ReleasableStepFunction(StepFunction, Protocol):
    """A step function that caches keys and values of draft tokens while the tree is built."""

    def release(self) -> Any:
        """Drop the cache rows of draft tokens and return the memory of the text."""


class SequentialDrafter(DraftHead):
    """A drafter of several dependent steps: `tree` is built from the next-token distributions of `step_function`.

    Frame t is the distribution of label t given the root and the labels before it, all teacher-forced in training.
    `frames` is the number of frames per anchor in training and the maximal depth of the tree.
    """

    uses_aux_hidden_states = False  # as published: the last layer's hidden states, which come first of several, or none

    def __init__(self, frames: int, tree: StepTreeBuilder, stops: Collection[int]) -> None:
        super().__init__()
        self.frames = check_int(frames, "drafter.frames")
        refuse_other_tree(self, tree, from_frames=False)
        self.step_tree = tree
        self.stops = tuple(sorted(stops))

    @abstractmethod
    def step_function(self, context: Context, memory: Any | None) -> ReleasableStepFunction:
        """Return the distributions after a context, its new tokens read and cache rows beyond it dropped."""

    def draft(self, context: Context, memory: Any | None, rng: torch.Generator) -> tuple[TokenTree, Any]:
        step_function = self.step_function(context, memory)
        tree = self.step_tree(step_function, TreeRequest.of(context, self.stops, rng).limit_depth(self.frames))
        return tree, step_function.release()


def teacher_forced_tokens(batch: Batch, frames: int) -> Tensor:
    """Return the newest input token of each frame, tokens_BAT: the root, then the labels before it.

    anchor a, root x[a+1]   ->   x[a+1]  x[a+2]  x[a+3] ...        (past the end of a text: its last token)
    """
    following_BAT1 = gather_following(batch.tokens_BL[..., None], batch.anchors_BA, batch.position_ids_BL, frames + 1)
    return torch.cat([batch.roots_BA[..., None], following_BAT1[:, :, 2:, 0]], dim=-1)


def decoder_layer(base: BaseLM, like_base: bool, input_norm: bool, mlp: bool = True) -> tuple[CausalBlock, str]:
    """Return a decoder layer, initialised from one of the base's where their outputs agree, and a phrase on how.

    mlp: False for Kangaroo's, which ends with the attention.

    like_base: with the rotary frequencies, head norms, biases and activation of the base's layers. False, which older
    run directories mean by leaving it out, is a plain Llama layer.
    """
    config = base_block_config(base.lm, base.context_length)
    config = config if like_base else config.as_plain_llama()
    block = CausalBlock(config, input_norm=input_norm).to(base.device)
    if not mlp:
        block.mlp = None
        del block.mlp_norm
    return block, init_from_base_layer(block, config, block, base.lm)[1]


class LevelAttention:
    """Position ids and attention masks of the levels of a tree whose tokens are read into a KV cache.

    A draft token attends to the text, to the draft tokens above it and to itself:

    level 1: a b          level 2, one below b, one below a:        a b | c d
             1 0                                                    0 1 | 1 0
             0 1                                                    1 0 | 0 1
    """

    def __init__(self, cache: Any, device: torch.device) -> None:
        self.cache = cache
        self.level = -1
        self.seen_KR = torch.ones(1, 0, dtype=torch.bool, device=device)  # R: draft tokens of all levels so far

    def next_level(self, rows_K: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return position_ids_K and seen_KM of the next level, which continues these rows of the one before.

        The first level is the root, which is read with the text: None.
        """
        self.level += 1
        if self.level == 0:
            return None
        position_ids_K, seen_KM, self.seen_KR = self.cache.append_level(self.level, self.seen_KR, rows_K)
        return position_ids_K, seen_KM

    def drop(self) -> None:
        """Drop the rows of all levels from the cache."""
        self.cache.drop_levels(self.seen_KR.shape[1])
