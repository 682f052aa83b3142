"""A small language model as drafter (Leviathan et al. 2023; trees as in SpecInfer, Miao et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ctcdraft.batch import Batch
from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.loop import Context
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.sequential import LevelAttention, SequentialDrafter
from ctcdraft.drafters.trees.request import StepTreeBuilder
from ctcdraft.errors import InputError, check_int
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.fingerprint import tokenizer_hash
from ctcdraft.models.loading import load_base
from ctcdraft.nn.heads import TokenEmissions, TokenHead
from ctcdraft.nn.masks import gather_following


@dataclass(frozen=True)
class DraftModelMemory:
    """The tokens that the draft model has read, and their keys and values."""

    tokens_L: Tensor
    cache: KVCache

    def common_length(self, tokens_L: Tensor) -> int:
        """Return the length of the common prefix with another text, at most its length - 1."""
        # One token at least is left to be read: the distributions come from the forward pass over the newest one.
        size = min(len(self.tokens_L), len(tokens_L) - 1)
        return int((self.tokens_L[:size] == tokens_L[:size]).cumprod(dim=0).sum())


class LanguageModelDrafter(SequentialDrafter):
    """A causal language model that reads tokens alone: the text, then its own draft level by level.

    shared: it consists of modules of the base.
    """

    fixed_shapes = True
    uses_hidden_states = False
    lm: BaseLM

    def __init__(self, base: BaseLM, lm: BaseLM, shared: bool, frames: int, tree: StepTreeBuilder) -> None:
        super().__init__(frames, tree, base.stop_token_ids)
        if shared:
            # No submodule: converting the drafter to another dtype would destroy the weights of a quantised base.
            self.__dict__["lm"] = lm
        else:
            self.lm = lm
        self.vocabulary, self.base_context = base.vocabulary, base.context_length
        self.teacher = TokenHead(base.head)  # of the base it needs no more: distributions to distil, in training
        self.head = TokenHead(lm.head)

    @property
    def cached_layers(self) -> int:
        """Return the number of layers with keys and values."""
        return self.lm.layers

    def train(self, mode: bool = True) -> Self:
        # Never with dropout: its random numbers are in no checkpoint, and resuming must equal not having stopped.
        super().train(mode)
        self.lm.eval()
        return self

    def forward(self, batch: Batch) -> TokenEmissions:
        longest = int(batch.position_ids_BL.max()) + 1
        if longest > self.lm.context_length:
            raise InputError(
                f"a text of {longest} tokens exceeds the context length {self.lm.context_length} of the draft model "
                f"{self.lm.name}; lower trainer.max_length"
            )
        # roots_BA equal the text in a real batch; they are written over it so that a shifted root changes the output.
        root_positions_BA = (batch.anchors_BA + 1).clamp(max=batch.tokens_BL.shape[1] - 1)
        tokens_BL = batch.tokens_BL.scatter(1, root_positions_BA, batch.roots_BA)
        states_BLD = self.text_states(tokens_BL, batch.position_ids_BL)
        states_BATD = gather_following(states_BLD, batch.anchors_BA, batch.position_ids_BL, self.frames + 1)
        # It reads the root, not the base's hidden state at the anchor: frame t is at the position after the anchor's.
        return TokenEmissions(states_BATD[:, :, 1:], self.teacher, own=self.head)

    def text_states(self, tokens_BL: Tensor, position_ids_BL: Tensor) -> Tensor:
        """Return the hidden states_BLD that the lm_head reads, of packed texts in training."""
        packed = self.lm.packed_inputs(position_ids_BL)
        return self.lm.lm.base_model(input_ids=tokens_BL, use_cache=False, **packed).last_hidden_state

    def read(self, tokens_K: Tensor, position_ids_K: Tensor, seen_KM: Tensor | None, cache: Any) -> Tensor:
        """Return the same hidden states_KD in decoding; see BaseLM.read_rows."""
        return self.lm.read_rows(tokens_K, position_ids_K, seen_KM, cache)

    def step_function(self, context: Context, memory: DraftModelMemory | None) -> DraftModelStepFunction:
        if context.padded:
            # It has read the text but for the newest tokens: draft tokens are dropped after every draft.
            if memory is not None:
                return DraftModelStepFunction(self, context, context.new_tokens_K, memory.cache)
            cache = context.new_cache(self.cached_layers, context.nodes * self.frames, self.lm.context_length)
            whole = context.reading_all()
            return DraftModelStepFunction(self, whole, whole.new_tokens_K, cache)
        memory = memory or self.empty_memory(context)
        memory.cache.crop(memory.common_length(context.tokens_L))
        return DraftModelStepFunction(self, context, context.tokens_L[memory.cache.length :], memory.cache)

    def empty_memory(self, context: Context) -> DraftModelMemory:
        rows = len(context.tokens_L) + context.remaining_tokens + context.nodes * self.frames
        return DraftModelMemory(context.tokens_L[:0], KVCache(self.cached_layers, rows))

    def draft(self, context: Context, memory: DraftModelMemory | None, rng: torch.Generator) -> Any:
        # The deepest draft token is not read, but its parent is, at a position within the model's context.
        if not context.padded and self.exceeds_context(context):
            return TokenTree.only_root(context.root), memory
        return super().draft(context, memory, rng)

    def exceeds_context(self, context: Context) -> bool:
        return len(context.tokens_L) + min(context.depth, self.frames) > self.lm.context_length + 1

    def why_not_captured(self) -> str | None:
        if self.lm.context_length < self.base_context:
            return "the draft model's context is shorter than the base's"
        return super().why_not_captured()


class DraftModel(LanguageModelDrafter):
    """A small language model with the base's tokenizer, used as it is or distilled from the base.

    `train.py drafter=draft_model objective=distill` trains it as DistillSpec does (Zhou et al. 2024). lora_rank: rank
    of the trained low-rank updates of its layers; None trains all weights.
    """

    usable_untrained = True

    def __init__(
        self, base: BaseLM, path: str | None, lora_rank: int | None, frames: int, tree: StepTreeBuilder
    ) -> None:
        if path is None:
            raise InputError("drafter.path= is missing; give a Hugging Face folder or hub id with the base's tokenizer")
        super().__init__(base, load_draft_model(path, base), False, frames, tree)
        self.initialised = f"from {self.lm.name}"
        if lora_rank is None:
            self.lm.lm.requires_grad_(True)
        else:
            add_lora(self.lm.lm, lora_rank)
            self.initialised += f" with LoRA of rank {lora_rank}"


class DraftModelStepFunction:
    """Reads the new tokens of the text, then draft tokens level by level; `release` drops the latter from the cache."""

    def __init__(self, drafter: LanguageModelDrafter, context: Context, new_tokens_K: Tensor, cache: KVCache) -> None:
        self.drafter = drafter
        self.tokens_L = context.tokens_L
        self.cache = cache
        new = cache.append(len(new_tokens_K), new_tokens_K.device, count_1=context.count_1)
        states_KD = drafter.read(new_tokens_K, new.position_ids_N, new.seen_by_text(), cache)
        new.close()
        self.logits_KV = drafter.head(context.newest(states_KD[None])[0])
        self.levels = LevelAttention(cache, new_tokens_K.device)

    def __call__(self, tokens_K: Tensor, rows_K: Tensor) -> Tensor:
        if level := self.levels.next_level(rows_K):
            position_ids_K, seen_KM = level
            self.logits_KV = self.drafter.head(self.drafter.read(tokens_K, position_ids_K, seen_KM, self.cache))
        # Models of one tokenizer may pad their lm_head to different sizes; no token has those rows.
        log_probs_KV = self.logits_KV[:, : self.drafter.vocabulary].float().log_softmax(dim=-1)
        return F.pad(log_probs_KV, (0, self.drafter.vocabulary - log_probs_KV.shape[1]), value=-torch.inf)

    def release(self) -> DraftModelMemory:
        self.levels.drop()
        return DraftModelMemory(self.tokens_L, self.cache)


def load_draft_model(path: str, base: BaseLM) -> BaseLM:
    """Return the draft model in float32 on the base's device; both must have the same tokenizer."""
    lm = load_base(path, "float32", str(base.device))
    if tokenizer_hash(lm.tokenizer) != tokenizer_hash(base.tokenizer):
        raise InputError(
            f"the draft model {lm.name} has another tokenizer ({len(lm.tokenizer)} tokens) than the base {base.name} "
            f"({len(base.tokenizer)}), so its token ids have other meanings; take a model of the base's own family"
        )
    return lm


def add_lora(lm: Any, rank: int) -> None:
    """Freeze the model and add trainable low-rank updates, zero at first, to all its linear layers."""
    import peft

    check_int(rank, "drafter.lora_rank")
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(lm, settings)
