"""Draft lengths of a batch: as many draft tokens as pay for their time, none where drafting does not pay.

A step with Q requests whose forward pass has n tokens commits Q + sum of p tokens in expectation, p the calibrated
probability that a draft token is accepted with all tokens before it (as in `drafters/tree_policy.py`). Where a step
takes `base + slope * n` seconds and the draft `draft`, the lengths maximise

    (Q + sum of p) / (base + slope * n + draft)

and a request may get none. Times are measured while serving, for each order of magnitude of Q, because they depend on
hardware, model and load. Whether to draft at all is decided from the measured tokens per second of steps with and
without drafts; the slower kind is tried again for a few steps, ever more rarely while it stays the slower one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ctcdraft.drafters.adaptive import RECENT_DECAY, recent_ratio
from ctcdraft.drafters.tree_policy import AcceptanceModel

DECAY = 0.95  # of measured times, per step: about the latest twenty count
FIRST_PLAIN, FIRST_DRAFTED = 4, 8  # steps of each kind that are measured before anything is decided
DRAFTED_TRIAL, PLAIN_TRIAL = 3, 2  # steps for which the slower kind is tried again
LEAST_WAIT, MOST_WAIT = 64, 4096  # steps between two trials
MAX_OUTLIER = 4.0  # a step that takes so many times the usual was interrupted
MAX_REQUESTS_KNOWN = 4096


@dataclass
class Rate:
    """Decayed sums of tokens and seconds over steps of one kind."""

    steps: int = 0
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        if self.weight and seconds > MAX_OUTLIER * self.seconds / self.weight:
            return
        self.steps += 1
        self.weight, self.tokens = DECAY * self.weight + 1, DECAY * self.tokens + tokens
        self.seconds = DECAY * self.seconds + seconds

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class StepTime:
    """Decayed least squares of the seconds of a step, without its draft, on its tokens."""

    sums: np.ndarray = field(default_factory=lambda: np.zeros(5))  # of 1, n, n n, t, n t

    def add(self, tokens: int, seconds: float) -> None:
        if self.sums[0] and seconds > MAX_OUTLIER * self.sums[3] / self.sums[0]:
            return
        new = np.array([1.0, tokens, tokens * tokens, seconds, tokens * seconds])
        self.sums = DECAY ** (1 / 4) * self.sums + new

    def line(self) -> tuple[float, float]:
        """Return base and slope in seconds; the slope is not negative, and 0 while only one size was measured."""
        one, n, nn, t, nt = self.sums
        spread = one * nn - n * n
        slope = max(0.0, (one * nt - n * t) / spread) if spread > 1e-6 * one * nn else 0.0
        return max(0.0, (t - slope * n) / max(one, 1.0)), slope


@dataclass
class Regime:
    """What is measured at one order of magnitude of the number of requests, and whether to draft there."""

    plain: Rate = field(default_factory=Rate)
    drafted: Rate = field(default_factory=Rate)
    time: StepTime = field(default_factory=StepTime)
    draft: Rate = field(default_factory=Rate)  # its tokens are draft tokens
    drafting: bool = False
    left: int = FIRST_PLAIN  # steps until the next decision
    wait: int = LEAST_WAIT

    def next_step_drafts(self) -> bool:
        if self.left == 0:
            self.decide()
        self.left -= 1
        return self.drafting

    def decide(self) -> None:
        if self.plain.steps < FIRST_PLAIN or self.drafted.steps < FIRST_DRAFTED:
            self.drafting = self.plain.steps >= FIRST_PLAIN
            self.left = FIRST_DRAFTED if self.drafting else FIRST_PLAIN
            return
        pays = self.drafted.per_second > self.plain.per_second
        if self.drafting == pays:  # the wait is over: try the slower kind
            self.drafting, self.left = not pays, PLAIN_TRIAL if pays else DRAFTED_TRIAL
        else:
            self.wait = LEAST_WAIT if pays else min(4 * self.wait, MOST_WAIT)
            self.drafting, self.left = pays, self.wait

    def measured_lengths(self, chances_QK: np.ndarray, requests: int) -> np.ndarray:
        """Return the lengths_Q that maximise tokens per second, given acceptance probabilities."""
        base, slope = self.time.line()
        draft = self.draft.seconds / max(self.draft.weight, 1.0)
        best_N = np.sort(chances_QK, axis=None)[::-1]  # no token before one that precedes it in its own chain
        tokens_N = requests + np.concatenate([[0.0], best_N.cumsum()])
        times_N = base + draft + slope * (requests + np.arange(len(tokens_N)))
        kept = int((tokens_N / np.maximum(times_N, 1e-9)).argmax())
        return (chances_QK >= best_N[kept - 1]).sum(axis=1) if kept else np.zeros(len(chances_QK), dtype=int)


class DraftLengths:
    """The lengths of all drafts of one engine, and its measured times and acceptance."""

    def __init__(self, acceptance: AcceptanceModel, adaptive: bool) -> None:
        self.acceptance, self.adaptive = acceptance, adaptive
        self.drafting = True  # whether the latest step with a choice drafts
        self.regimes: dict[int, Regime] = defaultdict(Regime)
        # By request: decayed sums of accepted draft tokens and of those that were expected, and the latest expectation.
        self.recent: dict[Hashable, tuple[float, float]] = {}
        self.expected: dict[Hashable, float] = {}

    def regime(self, requests: int) -> Regime:
        return self.regimes[requests.bit_length()]

    def wants_draft(self, requests: int) -> bool:
        self.drafting = not self.adaptive or self.regime(requests).next_step_drafts()
        return self.drafting

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
        for number, (one, length) in enumerate(zip(ids, lengths_Q.tolist(), strict=True)):
            self.expected[one] = float(usual_QK[number, :length].sum())
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

    def observe_request(self, one: Hashable, accepted: int) -> None:
        """Add the outcome of a request's latest draft."""
        if (expected := self.expected.pop(one, None)) is None:
            return
        if len(self.recent) > MAX_REQUESTS_KNOWN:  # proposers are not called for requests that ended
            self.recent.clear()
        accepted_sum, expected_sum = self.recent.get(one, (0.0, 0.0))
        self.recent[one] = RECENT_DECAY * accepted_sum + accepted, RECENT_DECAY * expected_sum + expected

    def observe_step(
        self, requests: int, read: int, committed: int, seconds: float, draft_seconds: float | None
    ) -> None:
        """Add a step without prefill.

        Args:
            read, committed: tokens of all requests in the forward pass, and of those the ones that stay.
            seconds: without the time of its draft; draft_seconds: None if none was computed.
        """
        regime = self.regime(requests)
        regime.time.add(read, seconds)
        if draft_seconds is None:
            regime.plain.add(committed, seconds)
        else:
            regime.draft.add(read - requests, draft_seconds)
            regime.drafted.add(committed, seconds + draft_seconds)
