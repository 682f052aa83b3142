"""Old names of classes and config keys, understood in files and on command lines written before they were renamed.

Run directories, published heads and commands outlive the layout of the package. Whatever reads one of them passes its
values through `current`, or its arguments through `current_argument`, before anything is looked up.
"""

from __future__ import annotations

import re
from typing import Any

TARGETS = {  # what a `_target_` named -> what it names now
    "ctcdraft.base.load_base": "ctcdraft.models.loading.load_base",
    "ctcdraft.corpus.answers.TransformersAnswers": "ctcdraft.corpus.generation.transformers.TransformersAnswers",
    "ctcdraft.corpus.answers_served.ServedAnswers": "ctcdraft.corpus.generation.openai.ServedAnswers",
    "ctcdraft.corpus.answers_vllm.VllmAnswers": "ctcdraft.corpus.generation.vllm.VllmAnswers",
    "ctcdraft.corpus.cleaning.Alternation": "ctcdraft.corpus.filters.Alternation",
    "ctcdraft.corpus.cleaning.Cleaning": "ctcdraft.corpus.filters.Cleaning",
    "ctcdraft.corpus.cleaning.Controls": "ctcdraft.corpus.filters.ControlTokens",
    "ctcdraft.corpus.cleaning.Duplicates": "ctcdraft.corpus.filters.Duplicates",
    "ctcdraft.corpus.cleaning.Empties": "ctcdraft.corpus.filters.Empties",
    "ctcdraft.corpus.cleaning.Language": "ctcdraft.corpus.filters.Language",
    "ctcdraft.corpus.cleaning.Length": "ctcdraft.corpus.filters.Length",
    "ctcdraft.corpus.cleaning.Roles": "ctcdraft.corpus.filters.Roles",
    "ctcdraft.corpus.leakage.Leakage": "ctcdraft.corpus.decontamination.Decontamination",
    "ctcdraft.corpus.sources.several": "ctcdraft.corpus.sources.mixture",
    "ctcdraft.corpus.states.Live": "ctcdraft.corpus.hidden_states.OnlineHiddenStates",
    "ctcdraft.corpus.states.Stored": "ctcdraft.corpus.hidden_states.OfflineHiddenStates",
    "ctcdraft.decoding.loop.Settings": "ctcdraft.decoding.settings.DecodingSettings",
    "ctcdraft.decoding.typical.Typical": "ctcdraft.decoding.verification.TypicalAcceptance",
    "ctcdraft.decoding.verify.match": "ctcdraft.decoding.verification.match",
    "ctcdraft.drafters.block.BlockDrafter": "ctcdraft.drafters.parallel.ParallelDrafter",
    "ctcdraft.drafters.choices.AlongTheBest": "ctcdraft.drafters.trees.static.GreedyPathTree",
    "ctcdraft.drafters.choices.Choices": "ctcdraft.drafters.trees.static.StaticTree",
    "ctcdraft.drafters.controls.Junk": "ctcdraft.drafters.controls.RandomDrafter",
    "ctcdraft.drafters.direct.Direct": "ctcdraft.drafters.trees.per_frame.PerFrameTree",
    "ctcdraft.drafters.direct.SparseTree": "ctcdraft.drafters.trees.per_frame.StaticPerFrameTree",
    "ctcdraft.drafters.direct.likely_choices": "ctcdraft.drafters.trees.per_frame.likely_choices",
    "ctcdraft.drafters.drawn.Drawn": "ctcdraft.drafters.trees.sampled_chains.SampledChains",
    "ctcdraft.drafters.drawn_paths.DrawnLabels": "ctcdraft.drafters.trees.sampled_labels.SampledLabels",
    "ctcdraft.drafters.drawn_paths.DrawnWords": "ctcdraft.drafters.trees.sampled_labels.SampledTokens",
    "ctcdraft.drafters.grow.Grow": "ctcdraft.drafters.trees.dynamic.DynamicTree",
    "ctcdraft.drafters.paths.Collapse": "ctcdraft.drafters.trees.ctc.Collapse",
    "ctcdraft.drafters.paths.PrefixSearch": "ctcdraft.drafters.trees.ctc.PrefixSearch",
    "ctcdraft.drafters.staged.Staged": "ctcdraft.drafters.cascade.Staged",
    "ctcdraft.drafters.transducer.DrawnTransductions": "ctcdraft.drafters.trees.transducer.SampledTransductions",
    "ctcdraft.drafters.transducer.TransducerSearch": "ctcdraft.drafters.trees.transducer.TransducerSearch",
    "ctcdraft.evaluation.latency.Latency": "ctcdraft.evaluation.latency.LatencyBenchmark",
    "ctcdraft.evaluation.outside.StockGenerate": "ctcdraft.evaluation.stock_generate.StockGenerate",
    "ctcdraft.evaluation.replay_session.Replay": "ctcdraft.evaluation.replay.evaluation.ReplayEvaluation",
    "ctcdraft.evaluation.sizing.Sizing": "ctcdraft.evaluation.replay.tree_size.TreeSizeSearch",
    "ctcdraft.evaluation.watching.Explorer": "ctcdraft.evaluation.tracing.tracer.TraceSettings",
    "ctcdraft.nn.correction.GRU": "ctcdraft.nn.logit_correction.GRUCorrection",
    "ctcdraft.nn.correction.Markov": "ctcdraft.nn.logit_correction.MarkovCorrection",
    "ctcdraft.nn.residual.FeedForwardBody": "ctcdraft.nn.bodies.FeedForwardBody",
    "ctcdraft.nn.residual.ResidualBody": "ctcdraft.nn.bodies.ResidualBody",
    "ctcdraft.objectives.distill.Distill": "ctcdraft.objectives.distillation.Distill",
    "ctcdraft.objectives.distill.kl": "ctcdraft.objectives.distillation.kl",
    "ctcdraft.objectives.distill.total_variation": "ctcdraft.objectives.distillation.total_variation",
    "ctcdraft.objectives.prefix_ctc.PrefixCTC": "ctcdraft.objectives.ctc.PrefixCTC",
    "ctcdraft.objectives.transducer.PrefixTransducer": "ctcdraft.objectives.ctc.PrefixTransducer",
    "ctcdraft.objectives.transducer.Transducer": "ctcdraft.objectives.ctc.Transducer",
    "ctcdraft.objectives.weighted.WeightedSum": "ctcdraft.objectives.weighted_sum.WeightedSum",
    "ctcdraft.shape.shaped_base": "ctcdraft.models.meta.random_weights_base",
    "ctcdraft.training.adapting.Adapter": "ctcdraft.training.lora.LoRAAdapter",
    "ctcdraft.training.logger.TensorBoardLogger": "ctcdraft.training.loggers.TensorBoardLogger",
    "ctcdraft.training.logger.WandbLogger": "ctcdraft.training.loggers.WandbLogger",
    "ctcdraft.training.zero.DeepSpeedEngine": "ctcdraft.training.deepspeed.DeepSpeedEngine",
}


def current(values: Any) -> Any:
    """Return plain values in which every old `_target_` (and `path` of a called function) has its present name."""
    if isinstance(values, dict):
        return {
            key: TARGETS.get(value, value) if key in ("_target_", "path") and isinstance(value, str) else current(value)
            for key, value in values.items()
        }
    if isinstance(values, list):
        return [current(value) for value in values]
    return values


def current_argument(argument: str) -> str:
    """Return a command-line argument in which an old class name has its present name."""
    return re.sub(r"\bctcdraft(?:\.\w+)+", lambda found: TARGETS.get(found[0], found[0]), argument)
