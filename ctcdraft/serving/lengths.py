"""Draft lengths of a batch: as many draft tokens as pay for their time, none where drafting does not pay.

A step with Q requests whose forward pass has n tokens commits Q + sum of p tokens in expectation, p the calibrated
probability that a draft token is accepted with all tokens before it (as in `drafters/acceptance.py`). Where a step
takes `base + slope * n` seconds and the draft `draft`, the lengths maximise

    (Q + sum of p) / (base + slope * n + draft)

and a request may get none. Times are measured while serving, for groups of similar Q, because they depend on
hardware, model and load. Whether to draft at all is decided from the measured tokens per second of steps with and
without drafts; the slower kind is tried again for a few steps, ever more rarely while it stays the slower one. Steps
with prefill are not measured, and a trial that meets nothing else ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ctcdraft.drafters.acceptance import AcceptanceModel
from ctcdraft.drafters.adaptive import RECENT_DECAY, recent_ratio

DECAY = 0.95  # of measured times, per step: about the latest twenty count
FIRST_PLAIN, FIRST_DRAFTED = 4, 8  # steps of each kind that are measured before anything is decided
DRAFTED_TRIAL, PLAIN_TRIAL = 3, 2  # steps for which the slower kind is tried again
LEAST_WAIT, MOST_WAIT = 64, 4096  # measured steps between two trials
MAX_UNMEASURED = 32  # steps of a trial in a row
MAX_OUTLIER, MAX_OUTLIERS = 4.0, 3  # a step that takes so many times the usual was interrupted, unless so many in a row


@dataclass
class Rate:
    """Decayed sums of tokens and seconds over steps of one kind."""

    steps: int = 0
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.steps += 1
        self.weight, self.tokens = DECAY * self.weight + 1, DECAY * self.tokens + tokens
        self.seconds = DECAY * self.seconds + seconds

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean(self) -> float:
        return self.seconds / max(self.weight, 1.0)


@dataclass
class StepTime:
    """Decayed least squares of the seconds of a step, without its draft, on its tokens."""

    sums: np.ndarray = field(default_factory=lambda: np.zeros(5))  # of 1, n, n n, t, n t

    def add(self, tokens: int, seconds: float) -> None:
        new = np.array([1.0, tokens, tokens * tokens, seconds, tokens * seconds])
        self.sums = DECAY ** (1 / 4) * self.sums + new

    @property
    def mean(self) -> float:
        return float(self.sums[3] / max(self.sums[0], 1.0))

    def line(self) -> tuple[float, float]:
        """Return base and slope in seconds; the slope is not negative, and 0 while only one size was measured."""
        one, n, nn, t, nt = self.sums
        spread = one * nn - n * n
        slope = max(0.0, (one * nt - n * t) / spread) if spread > 1e-6 * one * nn else 0.0
        return max(0.0, (t - slope * n) / max(one, 1.0)), slope


@dataclass
class Regime:
    """What is measured with similar numbers of requests, and whether to draft there."""

    plain: Rate = field(default_factory=Rate)
    drafted: Rate = field(default_factory=Rate)
    time: StepTime = field(default_factory=StepTime)
    draft: Rate = field(default_factory=Rate)  # its tokens are draft tokens
    drafting: bool = False
    settled: bool = False  # whether the kind of the steps is the faster one, not one that is tried
    left: int = FIRST_PLAIN  # measured steps until the next decision
    wait: int = LEAST_WAIT
    unmeasured: int = 0  # steps since the latest measured one
    outliers: int = 0  # interrupted steps in a row

    def next_step_drafts(self) -> bool:
        self.unmeasured += 1
        if not self.settled and self.unmeasured > MAX_UNMEASURED:
            self.settled = self.is_known
            self.drafting, self.left = self.is_known and self.pays, self.wait
        return self.drafting

    @property
    def is_known(self) -> bool:
        return self.plain.steps >= FIRST_PLAIN and self.drafted.steps >= FIRST_DRAFTED

    @property
    def pays(self) -> bool:
        return self.drafted.per_second > self.plain.per_second

    def observe(self, read: int, committed: int, seconds: float, draft_tokens: int, draft_seconds: float) -> None:
        """Add a step; with draft_seconds = 0 it had no draft."""
        self.unmeasured = 0
        usual = self.time.mean + (self.draft.mean if draft_seconds else 0.0)
        self.outliers += 1
        if usual and seconds + draft_seconds > MAX_OUTLIER * usual and self.outliers < MAX_OUTLIERS:
            return
        self.outliers = 0
        self.time.add(read, seconds)
        if draft_seconds:
            self.draft.add(draft_tokens, draft_seconds)
        (self.drafted if draft_seconds else self.plain).add(committed, seconds + draft_seconds)
        self.left -= 1
        if self.left <= 0:
            self.decide()

    def decide(self) -> None:
        if not self.is_known:
            self.drafting = self.plain.steps >= FIRST_PLAIN
            self.left = FIRST_DRAFTED if self.drafting else FIRST_PLAIN
            return
        pays = self.pays
        if self.drafting == pays and self.settled:  # the wait is over: try the slower kind
            self.settled, self.drafting, self.left = False, not pays, PLAIN_TRIAL if pays else DRAFTED_TRIAL
        else:
            self.wait = LEAST_WAIT if pays else min(4 * self.wait, MOST_WAIT)
            self.settled, self.drafting, self.left = True, pays, self.wait

    def measured_lengths(self, chances_QK: np.ndarray, requests: int) -> np.ndarray:
        """Return the lengths_Q that maximise tokens per second, given acceptance probabilities."""
        base, slope = self.time.line()
        best_N = np.sort(chances_QK, axis=None)[::-1]  # no token before one that precedes it in its own chain
        tokens_N = requests + np.concatenate([[0.0], best_N.cumsum()])
        times_N = base + self.draft.mean + slope * (requests + np.arange(len(tokens_N)))
        kept = int((tokens_N / np.maximum(times_N, 1e-9)).argmax())
        return (chances_QK >= best_N[kept - 1]).sum(axis=1) if kept else np.zeros(len(chances_QK), dtype=int)


class DraftLengths:
    """The lengths of all drafts of one engine, and its measured times and acceptance."""

    def __init__(self, acceptance: AcceptanceModel, adaptive: bool) -> None:
        self.acceptance, self.adaptive = acceptance, adaptive
        self.regimes: dict[int, Regime] = defaultdict(Regime)
        # By request: decayed sums of accepted and of expected draft tokens, and the probabilities of the latest draft.
        self.recent: dict[Hashable, tuple[float, float]] = {}
        self.expected: dict[Hashable, np.ndarray] = {}

    def regime(self, requests: int) -> Regime:
        # 1, 2, 3 to 5, 6 to 11, 12 to 23: a batch of 4, 8 or 16 of which a request just ended stays in its group.
        return self.regimes[(4 * requests // 3).bit_length()]

    def wants_draft(self, requests: int) -> bool:
        return not self.adaptive or self.regime(requests).next_step_drafts()

    def choose(self, ids: Sequence[Hashable], probs_QK: np.ndarray, rooms_Q: np.ndarray, requests: int) -> np.ndarray:
        """Return the lengths_Q of the drafts of these requests.

        Args:
            probs_QK: path probabilities under the head; 0 where nothing is drafted.
            rooms_Q: greatest lengths.
            requests: all requests of the step, those without a draft too.
        """
        possible_QK = (probs_QK > 0) & (np.arange(probs_QK.shape[1]) < rooms_Q[:, None])
        if not self.adaptive:
            return possible_QK.sum(axis=1)
        chances_QK, usual_QK = self.chances(ids, probs_QK)
        lengths_Q = self.regime(requests).measured_lengths(np.where(possible_QK, chances_QK, 0.0), requests)
        lengths_Q = np.minimum(lengths_Q, possible_QK.sum(axis=1))
        self.expected.update(zip(ids, usual_QK, strict=True))
        return lengths_Q

    def chances(self, ids: Sequence[Hashable], probs_QK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the acceptance probabilities_QK, and the same without regard to what was recently accepted."""
        depths_N = np.tile(np.arange(1, probs_QK.shape[1] + 1), len(probs_QK))
        inputs_NX = AcceptanceModel.inputs(probs_QK.ravel(), depths_N, np.ones(len(depths_N)), 0.0)
        logits_QK = (inputs_NX @ np.asarray(self.acceptance.weights)).reshape(probs_QK.shape)
        recent_Q = np.array([recent_ratio(*self.recent.get(one, (0.0, 0.0))) for one in ids])
        shifted_QK = logits_QK + self.acceptance.weights[-1] * recent_Q[:, None]
        odds_2QK = np.exp(np.clip([shifted_QK, logits_QK], -500, 500))
        chances_QK, usual_QK = np.minimum.accumulate(odds_2QK / (1 + odds_2QK), axis=2)
        return chances_QK, usual_QK

    def observe_request(self, one: Hashable, drafted: int, accepted: int) -> None:
        """Add the outcome of a request's latest draft, of which the engine may have dropped the end."""
        if (expected_K := self.expected.pop(one, None)) is None:
            return
        accepted_sum, expected_sum = self.recent.get(one, (0.0, 0.0))
        expected = float(expected_K[:drafted].sum())
        self.recent[one] = RECENT_DECAY * accepted_sum + accepted, RECENT_DECAY * expected_sum + expected

    def forget(self, ids: Iterable[Hashable]) -> None:
        """Drop what is known of requests that ended."""
        for one in ids:
            self.recent.pop(one, None)
            self.expected.pop(one, None)

    def observe_step(
        self, requests: int, read: int, committed: int, seconds: float, draft_seconds: float | None
    ) -> None:
        """Add a step without prefill.

        Args:
            read, committed: tokens of all requests in the forward pass, and of those the ones that stay.
            seconds: without the time of its draft; draft_seconds: None if none was computed.
        """
        self.regime(requests).observe(read, committed, seconds, read - requests, draft_seconds or 0.0)
