"""A run small enough for a test: random base model, random token ids as corpus, a CTC head of six frames."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import torch

from ctcdraft.corpus.batches import Batches
from ctcdraft.corpus.lines import mask_spans
from ctcdraft.corpus.token_store import TokenSequences
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.verification import match
from ctcdraft.distributed import Distributed
from ctcdraft.drafters.parallel import ParallelDrafter
from ctcdraft.drafters.trees.ctc import Collapse, PrefixSearch, TransducerSearch
from ctcdraft.drafters.trees.per_frame import PerFrameTree, StaticPerFrameTree, likely_choices
from ctcdraft.nn.bodies import AttentionBody, FeedForwardBody, ResidualBody
from ctcdraft.nn.logit_correction import GRUCorrection, MarkovCorrection
from ctcdraft.objectives.ctc import CTC
from ctcdraft.training.engine import OptimizerSettings, TorchEngine
from ctcdraft.training.loggers import MACHINE_METRICS
from ctcdraft.training.trainer import Trainer, TrainerSettings
from ctcdraft.training.validation import DecodingValidation

DECODING = DecodingSettings(
    max_new_tokens=12, nodes=8, temperature=0.0, top_k=0, top_p=1.0, verify=match, lossless=True
)


def random_sequences(count: int = 10, length: int = 30, vocabulary: int = 40) -> TokenSequences:
    rng = torch.Generator().manual_seed(1)
    tokens = [torch.randint(5, 5 + vocabulary, (length - i,), generator=rng) for i in range(count)]
    return TokenSequences(tokens, [[(6, len(row), True)] for row in tokens])


def masked_sequences(tokens, masks, ended) -> TokenSequences:
    """Return sequences whose responses are the ones of a mask, which are easier to count with than spans."""
    spans = [mask_spans(mask.tolist(), whole) for mask, whole in zip(masks, ended, strict=True)]
    return TokenSequences(tokens, spans)


def ctc_head(base, frames: int = 6) -> ParallelDrafter:
    return block_head(base, partial(AttentionBody, root_input=True, causal=False), PrefixSearch(16), frames=frames)


def block_head(base, body, paths, correction=None, frames: int = 6) -> ParallelDrafter:
    torch.manual_seed(0)
    return ParallelDrafter(base, frames, body, paths, correction)


def block_heads(base) -> list[ParallelDrafter]:
    """Return parallel drafters of other parts, perturbed because they are initialised to the identity."""
    attention = partial(AttentionBody, root_input=True, causal=False, blocks=2)
    choices = likely_choices(20, frames=6, ranks=5, first=0.6, rank_decay=0.4, frame_decay=0.9)
    heads = [
        block_head(base, attention, PrefixSearch(16), partial(GRUCorrection, rank=8)),
        block_head(base, attention, TransducerSearch(), partial(GRUCorrection, rank=8)),
        block_head(base, attention, PerFrameTree(None), partial(MarkovCorrection, rank=8)),
        block_head(base, partial(ResidualBody, blocks=1), StaticPerFrameTree(choices)),
        block_head(base, partial(FeedForwardBody, inner=None), PerFrameTree(1)),
        block_head(base, attention, Collapse(20, 5, 0.4), partial(GRUCorrection, rank=8)),
    ]
    for head in heads:
        for value in head.trainable_parameters():
            value.data += 0.2 * torch.randn_like(value)
    return heads


def logged_metrics(run) -> list[dict]:
    """Return the logged metrics of every step, without those of the machine."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert all(line[name] >= 0 for line in lines for name in MACHINE_METRICS)
    return [{name: value for name, value in line.items() if name not in MACHINE_METRICS} for line in lines]


class Sometimes:
    """The CTC objective, with NaN as its value in the calls `bad`, and a gradient of NaN in call `steep`."""

    labels, supervises = 3, "alignments"

    def __init__(self, *bad: int, steep: int = 0) -> None:
        self.real, self.bad, self.steep, self.calls = CTC(3), set(bad), steep, 0

    def __call__(self, emissions, batch):
        loss = self.real(emissions, batch)
        self.calls += 1
        if self.calls in self.bad:
            return replace(loss, value=loss.value * torch.nan)
        slope = (emissions.states_BATD.sum() * 0).abs().sqrt()
        return replace(loss, value=loss.value + slope) if self.calls == self.steep else loss


SINGLE_PROCESS = Distributed()


def make_trainer(
    run,
    base,
    steps: int,
    labels: int = 3,
    drafter=None,
    objective=None,
    accumulate=1,
    checkpoint_every=5,
    checkpoint_minutes=None,
    keep=2,
    patience=3,
    engine=TorchEngine,
    engine_options=None,
    distributed=SINGLE_PROCESS,
    rows=None,
    rows_per_step=4,
    prompt_count=1,
    **changes,
) -> Trainer:
    drafter = (drafter or ctc_head(base)).train()
    objective = objective or CTC(labels)
    batches = Batches(
        rows or random_sequences(), base, rows_per_step=rows_per_step, anchors=8, labels=objective.labels, seed=0,
        per_step=accumulate, processes=distributed,
    )  # fmt: skip
    values = {
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "min_lr_ratio": 0.1,
        "betas": (0.9, 0.95),
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "clip_value": None,
        "autocast": False,
    }
    optimizer = OptimizerSettings(steps=steps, **values | changes)
    engine = engine(drafter, drafter.trainable_parameters(), optimizer, distributed, **engine_options or {})
    prompts = [torch.arange(10, 16), torch.arange(20, 24), torch.arange(30, 37)]
    validation = DecodingValidation(base, prompts[:prompt_count], DECODING, distributed)
    settings = TrainerSettings(
        steps=steps, gradient_accumulation_steps=accumulate, probe_every=6, checkpoint_every=checkpoint_every,
        checkpoint_minutes=checkpoint_minutes, save_total_limit=keep, max_nonfinite_steps=patience,
    )  # fmt: skip
    return Trainer(run, drafter, objective, batches, engine, validation, settings)
