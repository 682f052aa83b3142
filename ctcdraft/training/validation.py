"""Validation by decoding: mean acceptance length (tau) on held-out prompts, measured by the evaluation's own loop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ctcdraft.corpus.lines import cut_spans
from ctcdraft.corpus.token_store import Column, Row, TokenSequences
from ctcdraft.corpus.types import first_turn_key
from ctcdraft.decoding.loop import Drafter, generate
from ctcdraft.decoding.settings import DecodeStep, DecodingSettings, conditional_acceptance_rates
from ctcdraft.distributed import ALONE, Distributed
from ctcdraft.models.base_model import BaseLM


@dataclass(frozen=True)
class DecodingValidation:
    """Decodes a few prompts that are not trained on; each process decodes its share of them."""

    base: BaseLM
    prompts: Sequence[Tensor]
    settings: DecodingSettings
    processes: Distributed = ALONE

    def metrics(self, drafter: Drafter) -> dict[str, float]:
        """Return tau, and as alpha/1, alpha/2, ... the conditional acceptance rate of every depth reached.

        tau is the ratio of tokens to forward passes over all prompts together.
        """
        steps: list[DecodeStep] = []
        for index in range(self.processes.rank, len(self.prompts), self.processes.world_size):
            prompt_L = self.prompts[index].to(self.base.device)
            steps += generate(self.base, drafter, prompt_L, self.settings, self.base.stop_token_ids, index).passes
        steps = [step for share in self.processes.all_gather_object(steps) for step in share]
        tau = sum(step.committed for step in steps) / len(steps) if steps else 0.0
        rates = enumerate(conditional_acceptance_rates(steps), 1)
        return {"tau": tau} | {f"alpha/{depth}": rate for depth, rate in rates if rate is not None}


def split_held_out(rows: Sequence[Row], prompts: int, max_length: int) -> tuple[TokenSequences, list[Tensor]]:
    """Return rows to train on, and the prompts (token ids) of held-out conversations.

    All turns of a prompt are held out together, and of prompts with hashed ids all that have the same first turn. A row
    without two tokens of a response within max_length is left out.
    """
    ids = sorted({first_turn_key(row.id) for row in rows}, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = set(ids[: min(prompts, len(ids) // 2)])
    kept, first_turns, beyond = [], {}, 0
    for index, row in enumerate(rows):
        if first_turn_key(row.id) not in held_out:
            spans = cut_spans(row.spans, max_length)
            beyond += len(row.spans) - len(spans)
            if any(end - start >= 2 for start, end, _ in spans):  # a root and a label
                kept.append(index)
        elif row.turn == 0:
            first_turns[first_turn_key(row.id)] = row
    # Behind its last response a row has nothing to train on.
    rows_kept = TokenSequences(
        Column(rows, kept, lambda row: row.tokens_L[: cut_spans(row.spans, max_length)[-1][1]].long()),
        Column(rows, kept, lambda row: cut_spans(row.spans, max_length)),
        beyond,
    )
    return rows_kept, [row.tokens_L[: row.spans[0][0]].long() for row in first_turns.values()]
