"""A few questions once more, untimed, to see inside the passes: frames, tree, verdict, and why the draft died there.

As with the stopwatch nothing of this is in the loop: a double stands where the loop expects a drafter and a verifier.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ctcdraft.base import BaseLM
from ctcdraft.corpus.conversations import Prompt
from ctcdraft.decoding.loop import Context, Settings, generate
from ctcdraft.decoding.sampling import Noise
from ctcdraft.decoding.tree import TokenTree, Verdict
from ctcdraft.drafters.drawn_paths import heard_frames
from ctcdraft.drafters.listening import Listening
from ctcdraft.errors import whole
from ctcdraft.evaluation.measure import Arena, asked, turn_seed
from ctcdraft.evaluation.outside import StockGenerate
from ctcdraft.evaluation.seen import Seen, SeenAnswer, SeenFrames, SeenPass
from ctcdraft.evaluation.words import Spelling, pieces
from ctcdraft.progress import Progress

ROWS = 64  # read from states to laws at once


@dataclass(frozen=True)
class Explorer:
    """How much is looked at. questions: their first turns, 0 for none. tokens: of an answer, at most. words: of every
    frame, and of the base, the most probable ones."""

    questions: int
    tokens: int
    words: int

    def __post_init__(self) -> None:
        whole(self.questions, "explorer.questions", least=0)
        whole(self.tokens, "explorer.tokens", least=2)
        whole(self.words, "explorer.words")

    def look(self, arena: Arena, prompts: Mapping[int, Prompt], progress: Progress | None = None) -> Seen:
        """Every contestant's answers to these questions; those that decode outside our loop cannot be looked into."""
        spelling = Spelling(arena.base.tokenizer)
        answers = []
        for index, prompt in prompts.items():
            prompt_L, _ = asked(arena.base, prompt, [])
            for name, drafter in arena.contestants.items():
                if isinstance(drafter, StockGenerate):
                    continue
                settings = arena.settings_of(name)
                settings = replace(settings, max_new_tokens=min(self.tokens, settings.max_new_tokens))
                watch = Watch(drafter, settings.verify, self.words)
                tokens, passes, noise = watch.answer(arena.base, prompt_L, settings, turn_seed(arena.seed, index, 0))
                said = pieces(arena.base.tokenizer, tokens)
                if progress is not None:
                    progress.advance()
                answers.append(SeenAnswer(prompt.id, prompt.category, name, prompt.turns[0], said, passes, noise))
        return Seen({word: spelling(word) for word in sorted(words_of(answers))}, tuple(answers))


def words_of(answers: Sequence[SeenAnswer]) -> set[int]:
    passes = [one for answer in answers for one in answer.passes]
    framed = {word for one in passes if one.frames is not None for word in one.frames.words}
    return framed | {word for one in passes for word in (*one.tokens, one.bonus, *(best for best, _ in one.base))}


class Watch:
    """Stands in for one drafter and its verifier while they answer one prompt.

    rows: by the position they stand at, the base's two best words as a pass read them, with their scores.
    """

    def __init__(self, drafter: Any, verify: Any, words: int) -> None:
        self.words = words
        self.passes: list[SeenPass] = []
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._verify = verify
        self._paths: Any = getattr(drafter, "paths", None)
        if self._paths is not None:
            drafter = copy.copy(drafter)  # shallow: the weights are shared, the original keeps its own paths
            drafter.__dict__["paths"] = self.paths
        self._drafter = drafter
        self._frames: tuple[Tensor, Listening | None] | None = None
        self._depth = 0

    def answer(
        self, base: BaseLM, prompt_L: Tensor, settings: Settings, seed: int
    ) -> tuple[tuple[int, ...], tuple[SeenPass, ...], float | None]:
        """The answer's tokens, its passes, and the noise of the base's margins."""
        said = generate(base, self, prompt_L, replace(settings, verify=self.verify), base.stop_token_ids, seed)
        counts = [step.committed for step in said.passes]
        # The prefill has its verdict too, and is no pass.
        passes = tuple(replace(one, committed=count) for one, count in zip(self.passes[1:], counts, strict=True))
        return said.tokens, passes, self.noise(base, prompt_L, said.tokens, settings)

    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> tuple[TokenTree, Any]:
        self._frames, self._depth = None, context.depth
        return self._drafter.draft(context, memory, rng)

    def paths(self, log_probs_TC: Tensor, *heard: Any) -> TokenTree:
        listening = next((one for one in heard if isinstance(one, Listening)), None)
        self._frames = log_probs_TC, listening
        return self._paths(log_probs_TC, *heard)

    def verify(self, tree: TokenTree, log_probs_NV: Tensor, noise: Noise | None, root_position: int) -> Verdict:
        verdict = self._verify(tree, log_probs_NV, noise, root_position)
        path = verdict.path_K[: int(verdict.length)].tolist()
        if self.passes:  # behind the prefill
            for depth, node in enumerate(path):
                best = log_probs_NV[node].double().topk(min(2, log_probs_NV.shape[1]))
                self.rows[root_position + depth] = best.indices, best.values
        self.passes.append(self.seen(tree, path, int(verdict.bonus), log_probs_NV[path[-1]]))
        return verdict

    def seen(self, tree: TokenTree, path: list[int], bonus: int, law_V: Tensor) -> SeenPass:
        tokens = tuple(tree.tokens_N.tolist())
        accepted = [tokens[node] for node in path[1:]]
        best = law_V.double().softmax(0).topk(min(self.words, len(law_V)))
        frames = self._frames and framed(*self._frames, accepted, {*tokens[1:], bonus}, self.words)
        if frames is not None:
            frames = replace(frames, reads=getattr(self._paths, "reads", "words"))
        return SeenPass(
            tokens=tokens,
            parents=tuple(tree.parents_N.tolist()),
            path=tuple(path),
            bonus=bonus,
            committed=0,
            depth=self._depth,
            base=tuple((word, rounded(p)) for word, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)),
            frames=frames,
        )

    def noise(self, base: BaseLM, prompt_L: Tensor, tokens: Sequence[int], settings: Settings) -> float | None:
        """The greatest difference between a margin as a pass read it and as one reading of the whole text does."""
        text_L = torch.cat([prompt_L, torch.tensor(tokens, device=prompt_L.device)])
        places = [place for place in self.rows if place < len(text_L)]
        if not places or not len(self.rows[places[0]][0]) > 1:
            return None
        states_LD = base.hidden_states(text_L[None], torch.ones_like(text_L)[None])[0]
        worst = 0.0
        for part in (places[first : first + ROWS] for first in range(0, len(places), ROWS)):
            whole_RV = settings.process_logits(base.head(states_LD[part][:, : base.width])).double()
            words_R2, scores_R2 = (torch.stack([self.rows[place][which] for place in part]) for which in (0, 1))
            apart_R = (whole_RV.gather(1, words_R2) - scores_R2).diff(dim=1).abs()
            apart_R = apart_R[apart_R.isfinite()]  # a word that top-k cut has no score to compare
            worst = max(worst, float(apart_R.max()) if len(apart_R) else 0.0)
        return worst


def framed(
    log_probs_TC: Tensor, listening: Listening | None, accepted: Sequence[int], matter: set[int], words: int
) -> SeenFrames:
    """The frames, of each frame's best words and of those that matter. accepted: what listening frames have heard."""
    if listening is None:
        heard_KTC = log_probs_TC.double().exp()[None]
    else:
        tables = [heard_frames(listening)]
        for word in accepted:
            word_1 = torch.tensor([word], device=log_probs_TC.device)
            listening = listening.extend(word_1, torch.zeros_like(word_1))
            tables.append(heard_frames(listening))
        heard_KTC = torch.cat(tables).double()
    best = heard_KTC[..., :-1].topk(min(words, heard_KTC.shape[-1] - 1), dim=-1).indices.unique().tolist()
    chosen = sorted(matter.union(best))
    columns = torch.tensor([*chosen, heard_KTC.shape[-1] - 1], device=heard_KTC.device)
    tables_KTW = heard_KTC[..., columns].tolist()
    heard = tuple(tuple(tuple(map(rounded, row)) for row in table) for table in tables_KTW)
    return SeenFrames("", tuple(chosen), heard)


def rounded(probability: float) -> float:
    """To three significant digits: a page shows no more, and the file is a third as long."""
    return float(f"{probability:.3g}")
