"""Tracing: a few questions decoded once more, untimed, recording frames, tree and verification of every step.

As in profiling, the decoding loop has no hooks: a Tracer takes the position of the drafter and of the verifier.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ctcdraft.corpus.types import Prompt
from ctcdraft.decoding.loop import Context, generate
from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import TokenTree, VerifyResult
from ctcdraft.drafters.trees.request import ConditionedFrames, TreeRequest
from ctcdraft.evaluation.contestants import EvaluationSetup, StockGenerate
from ctcdraft.evaluation.runner import turn_prompt, turn_seed
from ctcdraft.evaluation.trace import FrameTables, Trace, TraceAnswer, TraceFrames, TraceStep
from ctcdraft.models.base_model import BaseLM
from ctcdraft.progress import Progress

CHUNK_ROWS = 64  # hidden states to logits at once
REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete character decodes to


@dataclass(frozen=True)
class TraceSettings:
    """How much is traced, the config's `trace`."""

    questions: int  # of which the first turn is traced
    tokens: int  # most tokens of an answer
    tokens_per_frame: int  # most probable tokens to record of every frame and of the base model

    def trace_answers(
        self, setup: EvaluationSetup, prompts: Mapping[int, Prompt], progress: Progress | None = None
    ) -> Trace:
        """Return the traces of these questions for every contestant that decodes with our loop."""
        tokenizer, answers = setup.base.tokenizer, []
        for index, prompt in prompts.items():
            prompt_L, _ = turn_prompt(setup.base, prompt, [])
            for name, drafter in setup.contestants.items():
                if isinstance(drafter, StockGenerate):
                    continue
                settings = setup.settings_of(name)
                settings = replace(settings, max_new_tokens=min(self.tokens, settings.max_new_tokens))
                tracer = Tracer(drafter, settings.verify, self.tokens_per_frame)
                tokens, passes, noise = tracer.answer(setup.base, prompt_L, settings, turn_seed(setup.seed, index, 0))
                pieces = token_pieces(tokenizer, tokens)
                if progress is not None:
                    progress.advance()
                answers.append(TraceAnswer(prompt.id, prompt.category, name, prompt.turns[0], pieces, passes, noise))
        ids: set[int] = set()
        for step in (step for answer in answers for step in answer.passes):
            ids.update(step.tokens, [step.bonus], (token for token, _ in step.base))
            ids.update(step.frames.tokens if step.frames is not None else ())
        return Trace(token_texts(tokenizer, sorted(ids)), tuple(answers))


class Tracer:
    """A drafter and a verifier that record every decoding step of one answer."""

    def __init__(self, drafter: Any, verify: Any, top_k: int) -> None:
        self.top_k = top_k
        self.passes: list[TraceStep] = []
        self.base_top2: dict[int, tuple[Tensor, Tensor]] = {}  # the base model's best tokens and scores, by position
        self._verify = verify
        self._drafter, self._tree_builder = with_frame_tree(drafter, self.frame_tree)
        self._last_frames: tuple[Tensor, ConditionedFrames | None] | None = None
        self._last_depth = 0

    def answer(
        self, base: BaseLM, prompt_L: Tensor, settings: DecodingSettings, seed: int
    ) -> tuple[tuple[int, ...], tuple[TraceStep, ...], float | None]:
        """Return the answer's tokens, its steps, and `margin_noise`."""
        generation = generate(base, self, prompt_L, replace(settings, verify=self.verify), base.stop_token_ids, seed)
        counts = [step.committed for step in generation.passes]
        # The first verification belongs to the prefill, which is no decoding step.
        passes = tuple(replace(step, committed=count) for step, count in zip(self.passes[1:], counts, strict=True))
        return generation.tokens, passes, self.margin_noise(base, prompt_L, generation.tokens, settings)

    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]:
        self._last_frames, self._last_depth = None, context.depth
        return self._drafter.draft(context, memory, rng)

    def frame_tree(
        self, log_probs_TC: Tensor, request: TreeRequest, conditioned: ConditionedFrames | None = None
    ) -> TokenTree:
        self._last_frames = log_probs_TC, conditioned
        return self._tree_builder(log_probs_TC, request, conditioned)

    def verify(
        self, tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int
    ) -> VerifyResult:
        result = self._verify(tree, log_probs_NV, noise, root_position)
        path = result.path_K[: int(result.length)].tolist()
        if self.passes:  # not for the prefill
            for depth, node in enumerate(path):
                best = log_probs_NV[node].double().topk(min(2, log_probs_NV.shape[1]))
                self.base_top2[root_position + depth] = best.indices, best.values
        self.passes.append(self.trace_step(tree, path, int(result.bonus), log_probs_NV[path[-1]]))
        return result

    def trace_step(self, tree: TokenTree, path: list[int], bonus: int, log_probs_V: Tensor) -> TraceStep:
        tokens = tuple(tree.tokens_N.tolist())
        best = log_probs_V.double().softmax(0).topk(min(self.top_k, len(log_probs_V)))
        best_probs = map(round_significant, best.values.tolist())
        frames = None
        if self._last_frames is not None:
            reads = getattr(self._tree_builder, "interprets_as", "tokens")
            accepted, required = [tokens[node] for node in path[1:]], {*tokens[1:], bonus}
            frames = TraceFrames(reads, *trace_frames(*self._last_frames, accepted, required, self.top_k))
        return TraceStep(
            tokens=tokens,
            parents=tuple(tree.parents_N.tolist()),
            path=tuple(path),
            bonus=bonus,
            committed=0,  # known once the answer is finished
            depth=self._last_depth,
            base=tuple(zip(best.indices.tolist(), best_probs, strict=True)),
            frames=frames,
        )

    def margin_noise(
        self, base: BaseLM, prompt_L: Tensor, tokens: Sequence[int], settings: DecodingSettings
    ) -> float | None:
        """Return the largest difference of a top-2 margin in the steps and in one forward pass; None without steps."""
        text_L = torch.cat([prompt_L, torch.tensor(tokens, device=prompt_L.device)])
        positions = [position for position in self.base_top2 if position < len(text_L)]
        if not positions or not len(self.base_top2[positions[0]][0]) > 1:
            return None
        states_LD = base.hidden_states(text_L[None], torch.ones_like(text_L)[None])[0]
        worst = 0.0
        for part in (positions[first : first + CHUNK_ROWS] for first in range(0, len(positions), CHUNK_ROWS)):
            whole_RV = settings.process_logits(base.head(states_LD[part][:, : base.width])).double()
            tokens_R2, scores_R2 = map(torch.stack, zip(*(self.base_top2[position] for position in part), strict=True))
            difference_R = (whole_RV.gather(1, tokens_R2) - scores_R2).diff(dim=1).abs()
            difference_R = difference_R[difference_R.isfinite()]  # tokens cut by top-k have no finite score
            worst = max(worst, float(difference_R.max()) if len(difference_R) else 0.0)
        return worst


def with_frame_tree(drafter: Any, frame_tree: Any) -> tuple[Any, Any]:
    """Return the drafter with this tree builder, and the one it had; None where it has none.

    Of an adaptive drafter that of the drafter within, of a merged one that of its first part.
    """
    if (builder := getattr(drafter, "frame_tree", None)) is not None:
        drafter = copy.copy(drafter)  # shallow: weights are shared, the original keeps its tree builder
        drafter.__dict__["frame_tree"] = frame_tree
        return drafter, builder
    for name in ("drafter", "first"):
        if (part := getattr(drafter, name, None)) is not None:
            part, builder = with_frame_tree(part, frame_tree)
            if builder is not None:
                drafter = copy.copy(drafter)
                drafter.__dict__[name] = part  # of a module this comes before the registered part
            return drafter, builder
    return drafter, None


def trace_frames(
    log_probs_TC: Tensor, conditioned: ConditionedFrames | None, accepted: Sequence[int], required: set[int], top_k: int
) -> tuple[tuple[int, ...], FrameTables]:
    """Return each frame's best tokens together with those in `required`, and their probabilities in every frame."""
    if conditioned is None:
        probs_KTC = log_probs_TC.double().exp()[None]
    else:
        tables = [conditioned.probs()]
        for token in accepted:  # one more table per accepted token
            token_1 = torch.tensor([token], device=log_probs_TC.device)
            conditioned = conditioned.extend(token_1, torch.zeros_like(token_1))
            tables.append(conditioned.probs())
        probs_KTC = torch.cat(tables).double()
    blank = probs_KTC.shape[-1] - 1
    best = probs_KTC[..., :-1].topk(min(top_k, blank), dim=-1).indices.unique().tolist()
    chosen = sorted(required.union(best))
    columns = torch.tensor([*chosen, blank], device=probs_KTC.device)
    tables_KTW = probs_KTC[..., columns].tolist()
    probs = tuple(tuple(tuple(map(round_significant, row)) for row in table) for table in tables_KTW)
    return tuple(chosen), probs


def round_significant(probability: float) -> float:
    return float(f"{probability:.3g}")  # the page shows no more, and the file is a third as long


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> dict[int, str]:
    """Return the text of single tokens, with their leading space."""
    # Some tokenizers drop the space at the beginning of a text, so every token is decoded after another one.
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    skip, texts = tokenizer.decode(before), {}
    for token in tokens:
        both = tokenizer.decode([*before, token])
        texts[token] = both[len(skip) :] if both.startswith(skip) else tokenizer.decode([token])
    return texts


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """Return a piece of text per token; a character of several tokens belongs to the last of them."""
    pieces, before = [], ""
    for position in range(len(tokens)):
        text = tokenizer.decode(list(tokens[: position + 1]))
        if text.endswith(REPLACEMENT_CHARACTER) and position + 1 < len(tokens):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        before = text
    return tuple(pieces)
