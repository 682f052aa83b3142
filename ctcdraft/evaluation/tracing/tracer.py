"""A few questions once more, untimed, to see inside the passes: frames, tree, verdict, and why the draft died there.

As with the stopwatch nothing of this is in the loop: a double stands where the loop expects a drafter and a verifier.

What token ids look like, one by one. It knows a tokenizer; a text is never decoded here for anybody's use.
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
from ctcdraft.drafters.conditioning import ConditionedFrames
from ctcdraft.drafters.trees.sampled_labels import conditioned_probs
from ctcdraft.errors import check_int
from ctcdraft.evaluation.runner import turn_prompt, turn_seed
from ctcdraft.evaluation.setup import EvaluationSetup
from ctcdraft.evaluation.stock_generate import StockGenerate
from ctcdraft.evaluation.tracing.records import Trace, TraceAnswer, TraceFrames, TraceStep
from ctcdraft.models.base_model import BaseLM
from ctcdraft.progress import Progress

CHUNK_ROWS = 64  # read from states to laws at once


@dataclass(frozen=True)
class TraceSettings:
    """How much is looked at. questions: their first turns, 0 for none. tokens: of an answer, at most. words: of every
    frame, and of the base, the most probable ones."""

    questions: int
    tokens: int
    words: int

    def __post_init__(self) -> None:
        check_int(self.questions, "explorer.questions", least=0)
        check_int(self.tokens, "explorer.tokens", least=2)
        check_int(self.words, "explorer.words")

    def trace_answers(
        self, setup: EvaluationSetup, prompts: Mapping[int, Prompt], progress: Progress | None = None
    ) -> Trace:
        """Every contestant's answers to these questions; those that decode outside our loop cannot be looked into."""
        spelling = TokenText(setup.base.tokenizer)
        answers = []
        for index, prompt in prompts.items():
            prompt_L, _ = turn_prompt(setup.base, prompt, [])
            for name, drafter in setup.contestants.items():
                if isinstance(drafter, StockGenerate):
                    continue
                settings = setup.settings_of(name)
                settings = replace(settings, max_new_tokens=min(self.tokens, settings.max_new_tokens))
                tracer = Tracer(drafter, settings.verify, self.words)
                tokens, passes, noise = tracer.answer(setup.base, prompt_L, settings, turn_seed(setup.seed, index, 0))
                token_texts = token_pieces(setup.base.tokenizer, tokens)
                if progress is not None:
                    progress.advance()
                answers.append(
                    TraceAnswer(prompt.id, prompt.category, name, prompt.turns[0], token_texts, passes, noise)
                )
        return Trace({word: spelling(word) for word in sorted(token_ids_of(answers))}, tuple(answers))


def token_ids_of(answers: Sequence[TraceAnswer]) -> set[int]:
    passes = [one for answer in answers for one in answer.passes]
    framed = {token for one in passes if one.frames is not None for token in one.frames.words}
    return framed | {token for one in passes for token in (*one.tokens, one.bonus, *(best for best, _ in one.base))}


class Tracer:
    """Stands in for one drafter and its verifier while they answer one prompt.

    rows: by the position they stand at, the base's two best words as a pass read them, with their scores.
    """

    def __init__(self, drafter: Any, verify: Any, top_k: int) -> None:
        self.top_k = top_k
        self.passes: list[TraceStep] = []
        self.base_top2: dict[int, tuple[Tensor, Tensor]] = {}
        self._verify = verify
        self._tree_builder: Any = getattr(drafter, "paths", None)
        if self._tree_builder is not None:
            drafter = copy.copy(drafter)  # shallow: the weights are shared, the original keeps its own paths
            drafter.__dict__["paths"] = self.paths
        self._drafter = drafter
        self._last_frames: tuple[Tensor, ConditionedFrames | None] | None = None
        self._last_depth = 0

    def answer(
        self, base: BaseLM, prompt_L: Tensor, settings: DecodingSettings, seed: int
    ) -> tuple[tuple[int, ...], tuple[TraceStep, ...], float | None]:
        """The answer's tokens, its passes, and the noise of the base's margins."""
        generation = generate(base, self, prompt_L, replace(settings, verify=self.verify), base.stop_token_ids, seed)
        counts = [step.committed for step in generation.passes]
        # The prefill has its verdict too, and is no pass.
        passes = tuple(replace(one, committed=count) for one, count in zip(self.passes[1:], counts, strict=True))
        return generation.tokens, passes, self.margin_noise(base, prompt_L, generation.tokens, settings)

    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]:
        self._last_frames, self._last_depth = None, context.depth
        return self._drafter.draft(context, memory, rng)

    def paths(self, log_probs_TC: Tensor, *arguments: Any) -> TokenTree:
        conditioned = next((one for one in arguments if isinstance(one, ConditionedFrames)), None)
        self._last_frames = log_probs_TC, conditioned
        return self._tree_builder(log_probs_TC, *arguments)

    def verify(
        self, tree: TokenTree, log_probs_NV: Tensor, noise: GumbelNoise | None, root_position: int
    ) -> VerifyResult:
        verdict = self._verify(tree, log_probs_NV, noise, root_position)
        path = verdict.path_K[: int(verdict.length)].tolist()
        if self.passes:  # behind the prefill
            for depth, node in enumerate(path):
                best = log_probs_NV[node].double().topk(min(2, log_probs_NV.shape[1]))
                self.base_top2[root_position + depth] = best.indices, best.values
        self.passes.append(self.trace_step(tree, path, int(verdict.bonus), log_probs_NV[path[-1]]))
        return verdict

    def trace_step(self, tree: TokenTree, path: list[int], bonus: int, log_probs_V: Tensor) -> TraceStep:
        tokens = tuple(tree.tokens_N.tolist())
        accepted = [tokens[node] for node in path[1:]]
        best = log_probs_V.double().softmax(0).topk(min(self.top_k, len(log_probs_V)))
        frames = self._last_frames and trace_frames(*self._last_frames, accepted, {*tokens[1:], bonus}, self.top_k)
        if frames is not None:
            frames = replace(frames, reads=getattr(self._tree_builder, "interprets_as", "words"))
        return TraceStep(
            tokens=tokens,
            parents=tuple(tree.parents_N.tolist()),
            path=tuple(path),
            bonus=bonus,
            committed=0,
            depth=self._last_depth,
            base=tuple(
                (token, round_significant(p))
                for token, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ),
            frames=frames,
        )

    def margin_noise(
        self, base: BaseLM, prompt_L: Tensor, tokens: Sequence[int], settings: DecodingSettings
    ) -> float | None:
        """The greatest difference between a margin as a pass read it and as one reading of the whole text does."""
        text_L = torch.cat([prompt_L, torch.tensor(tokens, device=prompt_L.device)])
        places = [place for place in self.base_top2 if place < len(text_L)]
        if not places or not len(self.base_top2[places[0]][0]) > 1:
            return None
        states_LD = base.hidden_states(text_L[None], torch.ones_like(text_L)[None])[0]
        worst = 0.0
        for part in (places[first : first + CHUNK_ROWS] for first in range(0, len(places), CHUNK_ROWS)):
            whole_RV = settings.process_logits(base.head(states_LD[part][:, : base.width])).double()
            tokens_R2, scores_R2 = (torch.stack([self.base_top2[place][which] for place in part]) for which in (0, 1))
            difference_R = (whole_RV.gather(1, tokens_R2) - scores_R2).diff(dim=1).abs()
            difference_R = difference_R[difference_R.isfinite()]  # a word that top-k cut has no score to compare
            worst = max(worst, float(difference_R.max()) if len(difference_R) else 0.0)
        return worst


def trace_frames(
    log_probs_TC: Tensor, conditioned: ConditionedFrames | None, accepted: Sequence[int], matter: set[int], top_k: int
) -> TraceFrames:
    """The frames, of each frame's best words and of those that matter. accepted: what listening frames have heard."""
    if conditioned is None:
        probs_KTC = log_probs_TC.double().exp()[None]
    else:
        tables = [conditioned_probs(conditioned)]
        for token in accepted:
            token_1 = torch.tensor([token], device=log_probs_TC.device)
            conditioned = conditioned.extend(token_1, torch.zeros_like(token_1))
            tables.append(conditioned_probs(conditioned))
        probs_KTC = torch.cat(tables).double()
    best = probs_KTC[..., :-1].topk(min(top_k, probs_KTC.shape[-1] - 1), dim=-1).indices.unique().tolist()
    chosen = sorted(matter.union(best))
    columns = torch.tensor([*chosen, probs_KTC.shape[-1] - 1], device=probs_KTC.device)
    tables_KTW = probs_KTC[..., columns].tolist()
    frame_probs = tuple(tuple(tuple(map(round_significant, row)) for row in table) for table in tables_KTW)
    return TraceFrames("", tuple(chosen), frame_probs)


def round_significant(probability: float) -> float:
    """To three significant digits: a page shows no more, and the file is a third as long."""
    return float(f"{probability:.3g}")


REPLACEMENT_CHARACTER = "\ufffd"  # what half a character decodes to


class TokenText:
    """One word by itself, with the space it begins with: some tokenizers drop it at the beginning of a text, so every
    word is decoded behind another."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self.skip = tokenizer.decode(self.before)

    def __call__(self, token: int) -> str:
        both = self.tokenizer.decode([*self.before, token])
        return both[len(self.skip) :] if both.startswith(self.skip) else self.tokenizer.decode([token])


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """A text in as many pieces as it has tokens; a character that several make belongs to the last of them."""
    made, before = [], ""
    for place in range(len(tokens)):
        text = tokenizer.decode(list(tokens[: place + 1]))
        if text.endswith(REPLACEMENT_CHARACTER) and place + 1 < len(tokens):
            made.append("")
            continue
        made.append(text[len(before) :])
        before = text
    return tuple(made)
