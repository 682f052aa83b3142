"""Divergences in half precision: rounding or a fault, decided in float32.

Two right computations of the same logits differ in half precision, and so do tokens at near ties. Decoding again in
float32 would prove little, because there the text soon takes another course. So both responses are decoded once more
while their trees are recorded, and the base in float32 reads the same trees behind the same accepted tokens:

    recorded   logits that chose the first token that differs, in half precision, by the steps of the response
    repeated   the same in float32, with the depths and ancestors that were read
    plain      logits of one forward pass over the text alone, in half precision and in float32

`noise` is the difference between both plain ones, a root mean square over the vocabulary. The divergence is rounding
if the tokens are a near tie by plain (float32), or recorded has one beyond the cut of top-k or top-p; and if, for both
responses, repeated equals plain up to noise / 16, so that trees, mask, position ids and cache rows are right; recorded
equals it up to twice the noise, and at both tokens up to TOKEN_RATIO times; and the token is the best one by recorded.
Everything else is a fault. On the embedded base in bfloat16 recorded is 0.8 to 1.2 times the noise away, repeated 1e-4.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ctcdraft.decoding.loop import generate, uses_fixed_shapes
from ctcdraft.decoding.sampling import GumbelNoise
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.static_cache import StaticCache
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.static_prompt import padded_size
from ctcdraft.decoding.static_step import seen_rows
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.evaluation.contestants import EvaluationSetup, StockGenerate
from ctcdraft.evaluation.records import AUTOREGRESSIVE
from ctcdraft.evaluation.replay.drafts import DraftTree
from ctcdraft.hardware import device_memory_bytes
from ctcdraft.models.stats import ModelStats

NOISE_RATIO = 2.0  # of the errors of two computations in half precision
TOKEN_RATIO = 6.0  # of the error of one logit: five standard deviations where a computation errs by 1.2 times the noise
EXACT_SHARE = 1 / 16  # of that noise; rounding in float32 is 2**-13 of that in float16, 2**-16 of that in bfloat16


class Recording:
    """The steps of a response up to one of its tokens, and the logits that chose this token."""

    def __init__(self, tokens: Sequence[int], position: int) -> None:
        self.tokens, self.position = tokens, position
        self.steps: list[tuple[TokenTree, list[int]]] = []  # trees and their accepted nodes
        self.read = 0  # index of the token that is the next root
        self.node = 0  # of the last tree, whose logits chose the token
        self.logits_V: Tensor | None = None
        self.follows_text = True  # every tree had the newest token as its root

    @property
    def rows(self) -> int:
        return self.read + max(len(tree) for tree, _ in self.steps)

    def add(self, tree: TokenTree, logits_NV: Tensor) -> None:
        """Record a step, unless the token is chosen already."""
        if self.logits_V is not None or not self.follows_text:
            return
        drafted = DraftTree.of(tree)
        if drafted.tokens[:1] != [self.tokens[self.read]]:
            self.follows_text = False
            return
        path = drafted.path_along(self.tokens[self.read + 1 :])
        # Copies, because steps of fixed shapes write to the same memory each time.
        copied = TokenTree(tree.tokens_N.clone(), tree.parents_N.clone(), tree.height)
        vars(copied).update({key: vars(tree)[key].clone() for key in ("depths_N", "ancestors_NN") if key in vars(tree)})
        self.steps.append((copied, path))
        if self.position <= self.read + len(path):
            self.node = path[self.position - self.read - 1]
            self.logits_V = logits_NV[self.node].clone()
        self.read += len(path)


class RecordedBase:
    """A base whose forward passes over trees are recorded."""

    def __init__(self, base: Any, recording: Recording) -> None:
        self._base, self._recording = base, recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def read_tree(self, tree: TokenTree, cache: Any) -> Any:
        output = self._base.read_tree(tree, cache)
        self._recording.add(tree, output.logits_NV)
        return output


@torch.inference_mode()
def is_rounding(
    setup: EvaluationSetup, name: str, prompt_L: Tensor, both: tuple[Sequence[int], Sequence[int]], seed: int
) -> bool | None:
    """Return whether rounding explains the first difference of a response to autoregression's.

    None where the base cannot be copied to float32: it is quantised, spread over devices, or too large.
    both: the tokens of the response, and of autoregression's.
    """
    position = next((index for index, pair in enumerate(zip(*both, strict=False)) if pair[0] != pair[1]), None)
    if position is None:
        return False  # one is the beginning of the other: a length does not round
    if not fits_in_float32(setup):
        return None
    try:
        judge = Judge(setup, prompt_L, both[1][:position], (both[0][position], both[1][position]), seed)
        near = judge.is_near_tie()
        # The passes over a prompt are not recorded; they differ where one is padded.
        if position == 0 or any(isinstance(setup.contestants[each], StockGenerate) for each in (name, AUTOREGRESSIVE)):
            return near
        sound = [judge.is_sound(each, tokens) for each, tokens in zip((name, AUTOREGRESSIVE), both, strict=True)]
        if False in sound or (near is False and not judge.is_cut):
            return False
        return None not in sound or near  # None: kernels are not deterministic, and the steps are of another text
    except torch.OutOfMemoryError:
        return None


def fits_in_float32(setup: EvaluationSetup) -> bool:
    """Return whether a copy of the base in float32 is possible beside the base."""
    base, size = setup.base, ModelStats.of(setup.base)
    if base.quantization is not None or base.layer_devices is not None:
        return False
    memory = device_memory_bytes(str(base.device))
    return memory is None or size.weight_bytes + 4 * size.parameters < 0.9 * memory


class Judge:
    """Compares the logits that chose one of two tokens after a text with plain forward passes over it."""

    def __init__(self, setup: EvaluationSetup, prompt_L: Tensor, agreed: Sequence[int], chosen: Any, seed: int) -> None:
        self.setup, self.prompt_L, self.position, self.seed = setup, prompt_L, len(agreed), seed
        self.exact = copy.deepcopy(setup.base).float()
        self.exact.static_shapes = None  # nothing is compiled or captured for it
        self.text_L = torch.cat([prompt_L, torch.tensor(agreed, dtype=prompt_L.dtype, device=prompt_L.device)])
        outputs = (base.read(self.text_L, base.new_cache(len(self.text_L))) for base in (self.exact, setup.base))
        self.plain_V, half_V = (output.logits_NV[0].float() for output in outputs)
        self.noise = difference(half_V, self.plain_V)
        self.is_cut = False  # by top-k or top-p, one of the tokens was beyond the cut of recorded logits
        self.chosen_2 = torch.tensor(chosen, device=half_V.device)
        largest_2 = self.plain_V[self.chosen_2].abs()  # of a vocabulary: their own rounding is more than that of most
        self.tolerance_2 = TOKEN_RATIO * self.noise + torch.finfo(setup.base.dtype).eps * largest_2

    def is_sound(self, name: str, tokens: Sequence[int]) -> bool | None:
        """Return whether a contestant's choice after the text is right, up to rounding, for what it has read.

        None if decoding again gives other tokens.
        """
        settings, drafter = self.setup.settings_of(name), self.setup.contestants[name]
        recording = Recording(tokens, self.position)
        again = decode_recorded(self.setup, drafter, self.prompt_L, settings, self.seed, recording)
        if again[: self.position + 1] != tuple(tokens[: self.position + 1]):
            return None
        if recording.logits_V is None:  # another root than the newest token
            return False
        fixed = uses_fixed_shapes(self.setup.base, drafter, settings)
        repeat = repeat_fixed_shapes if fixed else repeat_exact_shapes
        repeated_V, scores_V = repeat(self.exact, recording, self.prompt_L), self.scores(recording.logits_V)
        self.is_cut |= not bool(scores_V[self.chosen_2].isfinite().all())
        apart_2 = (recording.logits_V.float() - self.plain_V)[self.chosen_2].abs()
        return (
            difference(repeated_V, self.plain_V) <= EXACT_SHARE * self.noise
            and difference(recording.logits_V, self.plain_V) <= NOISE_RATIO * self.noise
            and bool((apart_2 <= self.tolerance_2).all())
            and float(scores_V[tokens[self.position]]) >= float(scores_V.max()) - EXACT_SHARE * self.noise
        )

    def scores(self, logits_V: Tensor) -> Tensor:
        return scores(self.setup.settings, logits_V[None], len(self.text_L), self.seed)[0]

    def is_near_tie(self) -> bool | None:
        """Return whether rounding can exchange the two tokens; None if one is beyond the cut of top-k or top-p."""
        ours, theirs = self.scores(self.plain_V)[self.chosen_2].tolist()
        # Scores are logits / T plus Gumbel noise: at T < 1 rounding errors are magnified by 1 / T.
        apart = abs(ours - theirs) * (min(self.setup.settings.temperature, 1.0) or 1.0)
        return apart <= float(self.tolerance_2.sum()) if apart < torch.inf else None


def scores(settings: DecodingSettings, logits_1V: Tensor, length: int, seed: int) -> Tensor:
    """Return what the token after a text of this length is chosen by: logits, or warped ones with Gumbel noise."""
    if settings.temperature == 0:
        return logits_1V
    position_1 = torch.tensor([length], device=logits_1V.device)
    return settings.process_logits(logits_1V) + GumbelNoise(seed).gumbel(position_1, logits_1V.shape[-1])


def difference(left_V: Tensor, right_V: Tensor) -> float:
    return float((left_V.double() - right_V.double()).square().mean().sqrt())


def decode_recorded(
    setup: EvaluationSetup, drafter: Any, prompt_L: Tensor, settings: DecodingSettings, seed: int, recording: Recording
) -> tuple[int, ...]:
    """Decode a response again, its steps recorded; return its tokens."""
    base: Any = RecordedBase(setup.base, recording)
    if uses_fixed_shapes(base, drafter, settings):
        base.static_shapes = shapes = StaticShapes()
        longest = min(settings.max_new_tokens, base.context_length - len(prompt_L))
        # No graphs, whose replay calls no base.
        shapes.decoder(base, drafter, settings, len(prompt_L) + longest).graphs.error = "recorded"
    return generate(base, drafter, prompt_L, settings, base.stop_token_ids, seed).tokens


def repeat_exact_shapes(base: Any, recording: Recording, prompt_L: Tensor) -> Tensor:
    """Return the logits_V that choose the recording's token, with its trees read by this base."""
    cache = base.new_cache(len(prompt_L) + recording.rows)
    base.read(prompt_L, cache)
    for tree, path in recording.steps:
        start = cache.length
        output = base.read_tree(tree, cache)
        cache.keep_path(start, torch.tensor(path, device=base.device))
    return output.logits_NV[recording.node]


def repeat_fixed_shapes(base: Any, recording: Recording, prompt_L: Tensor) -> Tensor:
    """Do the same with the cache of fixed shapes."""
    cache = StaticCache(base.layers, len(prompt_L) + recording.rows, base.context_length, base.device)
    if (size := padded_size(len(prompt_L))) is None:
        base.read(prompt_L, cache.exact)
        cache.adopt_prompt()
    else:
        base.read_padded(F.pad(prompt_L, (0, size - len(prompt_L))), prompt_L.new_tensor([len(prompt_L)]), cache)
    for tree, path in recording.steps:
        cache.visible = min(seen_rows(int(cache.length_1) + len(tree)), cache.capacity)
        output = base.read_tree(tree, cache)
        cache.keep_path(torch.tensor(path, device=base.device), torch.tensor([len(path)], device=base.device))
    return output.logits_NV[recording.node]
