"""Old names of classes and config keys, understood in files and on command lines written before they were renamed.

Run directories, published heads and commands outlive the layout of the package. Whatever reads one of them passes its
values through `current`, or its arguments through `current_argument`, before anything is looked up. A rename is one
entry of `MOVED` (a class or function), `KEYS` (a key, with all keys below it) or `OPTIONS` (an option of a group).
Members that a drafter of one's own may use by a previous name are refused by the classes that have them.
"""

from __future__ import annotations

import re
from typing import Any

MOVED = (  # old module, present module, names as OLD:PRESENT or as they were; all of ctcdraft
    ("base", "models.loading", "load_base"),
    ("corpus.answers", "corpus.generation.transformers", "TransformersAnswers"),
    ("corpus.answers_served", "corpus.generation.openai", "ServedAnswers"),
    ("corpus.answers_vllm", "corpus.generation.vllm", "VllmAnswers"),
    ("corpus.cleaning", "corpus.filters", "Alternation Cleaning Duplicates Empties Language Length Roles"),
    ("corpus.cleaning", "corpus.filters", "Controls:ControlTokens"),
    ("corpus.leakage", "corpus.decontamination", "Leakage:Decontamination"),
    ("corpus.sources", "corpus.sources", "several:mixture"),
    ("corpus.states", "corpus.hidden_states", "Live:OnlineHiddenStates Stored:OfflineHiddenStates"),
    ("decoding.loop", "decoding.settings", "Settings:DecodingSettings"),
    ("decoding.rejection", "decoding.verification", "Rejection k_sequential multi_round"),
    ("decoding.typical", "decoding.lossy_acceptance", "Typical:TypicalAcceptance"),
    ("decoding.verification", "decoding.lossy_acceptance", "TypicalAcceptance"),
    ("decoding.verify", "decoding.verification", "match"),
    ("drafters.block", "drafters.parallel", "BlockDrafter:ParallelDrafter"),
    ("drafters.choices", "drafters.trees.static", "AlongTheBest:GreedyPathTree Choices:StaticTree"),
    ("drafters.controls", "drafters.controls", "Junk:RandomDrafter"),
    ("drafters.direct", "drafters.trees.per_frame", "Direct:PerFrameTree SparseTree:StaticPerFrameTree likely_choices"),
    ("drafters.drawn", "drafters.trees.sampled", "Drawn:SampledChains"),
    ("drafters.drawn_paths", "drafters.trees.sampled", "DrawnLabels:SampledLabels DrawnWords:SampledTokens"),
    ("drafters.grow", "drafters.trees.dynamic", "Grow:DynamicTree"),
    ("drafters.paths", "drafters.trees.ctc", "Collapse PrefixSearch"),
    ("drafters.transducer", "drafters.trees.sampled", "DrawnTransductions:SampledTransductions"),
    ("drafters.transducer", "drafters.trees.ctc", "TransducerSearch"),
    ("drafters.trees.sampled_chains", "drafters.trees.sampled", "SampledChains"),
    ("drafters.trees.sampled_labels", "drafters.trees.sampled", "SampledLabels SampledTokens"),
    ("drafters.trees.transducer", "drafters.trees.sampled", "SampledTransductions"),
    ("drafters.trees.transducer", "drafters.trees.ctc", "TransducerSearch"),
    ("evaluation.latency", "evaluation.latency", "Latency:LatencyBenchmark"),
    ("evaluation.outside", "evaluation.contestants", "StockGenerate"),
    ("evaluation.replay_session", "evaluation.replay.evaluation", "Replay:ReplayEvaluation"),
    ("evaluation.sizing", "evaluation.replay.tree_size", "Sizing:TreeSizeSearch"),
    ("evaluation.stock_generate", "evaluation.contestants", "StockGenerate"),
    ("evaluation.tracing.tracer", "evaluation.tracer", "TraceSettings"),
    ("evaluation.watching", "evaluation.tracer", "Explorer:TraceSettings"),
    ("nn.correction", "nn.logit_correction", "GRU:GRUCorrection Markov:MarkovCorrection"),
    ("nn.residual", "nn.bodies", "FeedForwardBody ResidualBody"),
    ("objectives.distill", "objectives.distillation", "Distill kl total_variation"),
    ("objectives.prefix_ctc", "objectives.ctc", "PrefixCTC"),
    ("objectives.transducer", "objectives.ctc", "PrefixTransducer Transducer"),
    ("objectives.weighted", "objectives.base", "WeightedSum"),
    ("objectives.weighted_sum", "objectives.base", "WeightedSum"),
    ("shape", "models.meta", "shaped_base:random_weights_base"),
    ("training.adapting", "training.lora", "Adapter:LoRAAdapter"),
    ("training.logger", "training.loggers", "TensorBoardLogger WandbLogger"),
    ("training.zero", "training.deepspeed", "DeepSpeedEngine"),
)
TARGETS = {  # what a `_target_` named -> what it names now
    f"ctcdraft.{old}.{name.partition(':')[0]}": f"ctcdraft.{new}.{name.rpartition(':')[2]}"
    for old, new, names in MOVED
    for name in names.split()
}
KEYS = {  # old dotted key -> its present one, under the same parent
    "drafter.paths": "drafter.tree",
    "drafter.growth": "drafter.tree",
    "drafter.tree.words": "drafter.tree.children",
    "drafter.tree.words_per_frame": "drafter.tree.tokens_per_frame",
    "objective.states": "objective.hidden_states",
    "objective.words": "objective.tokens",
    "states": "hidden_states",
    "trainer.rows": "trainer.batch_size",
    "trainer.anchors": "trainer.anchors_per_sequence",
    "trainer.pack": "trainer.pack_length",
    "trainer.accumulate": "trainer.gradient_accumulation_steps",
    "trainer.warmup": "trainer.warmup_steps",
    "trainer.final_share": "trainer.min_lr_ratio",
    "trainer.clip_norm": "trainer.max_grad_norm",
    "trainer.keep": "trainer.save_total_limit",
    "trainer.patience": "trainer.max_nonfinite_steps",
    "trainer.threads": "trainer.num_threads",
    "base.taps": "base.aux_layers",
    "base.fixed": "base.static_shapes",
    "base.quantised": "base.quantization",
    "explorer": "trace",
    "sizing.timed_tokens": "sizing.timed_steps",
    "trace.words": "trace.tokens_per_frame",
}
OPTIONS = {  # old config group -> its old options -> their present names; the group itself is renamed by KEYS
    "drafter/paths": {
        "chain": "per_frame_chain",
        "direct": "per_frame",
        "drawn": "sampled",
        "drawn_chains": "sampled3",
        "drawn_transductions": "sampled_transducer",
        "drawn_words": "sampled_per_frame",
    },
    "drafter/growth": {
        "along_the_best63": "greedy_path63",
        "best": "dynamic",
        "drawn": "sampled_sequential",
        "exact": "top_n",
    },
    "states": {"live": "online", "stored": "offline"},
}
CONTEXT_MEMBERS = {"fresh_KD": "new_states_KD", "law": "logits_processor", "room": "remaining_tokens"}
DRAFT_HEAD_MEMBERS = {  # what a draft head of one's own may have defined -> what it defines now
    "choose_words": "set_draft_vocab",
    "draws": "samples_drafts",
    "figures": "metrics",
    "frames_apart": "per_frame_weights",
    "guesses_states": "predicts_hidden_states",
    "nested": "has_nested_trees",
    "off_the_shelf": "usable_untrained",
    "own_parameters": "trainable_parameters",
    "own_state": "trainable_state_dict",
    "reads_states": "uses_hidden_states",
    "reads_taps": "uses_aux_hidden_states",
    "ready": "for_inference",
    "says_some": "has_draft_vocab",
    "settle": "after_load",
    "share_said": "vocab_coverage",
}
SWEPT = "hydra.sweeper.params."  # before a key that is swept
ARGUMENT_PATTERN = re.compile(r"([+~]*)([\w./]+)(@[\w.:]*)?(=.*)?", re.DOTALL)  # +key@package=value


def current(values: Any, place: str = "") -> Any:
    """Return plain values in which old keys, and what `_target_` (and `path` of a called function) name, are present.

    Args:
        values: the content of a file, or of one of its nodes.
        place: dotted key of that node: a YAML that holds a drafter alone is read with `place="drafter"`.
    """
    if isinstance(values, list):
        return [current(value, place) for value in values]
    if not isinstance(values, dict):
        return values
    target = values.get("_target_")
    is_own = not isinstance(target, str) or target.startswith("ctcdraft.")  # a class of a user keeps its keys
    renamed: dict[Any, Any] = {}
    for key, value in values.items():
        if key == "defaults":  # of a drafter's YAML: its groups lie beside the list, not below it
            renamed[key] = current(value, place)
            continue
        name = re.sub(r"^(override )?/?", "", str(key))  # as it may stand in a defaults list
        override = str(key)[: len(str(key)) - len(name)]
        dotted = f"{place}.{name}" if place else name
        if key in ("_target_", "path") and isinstance(value, str):
            value = TARGETS.get(value, value)
        if is_own and (new := current_name(dotted)):
            if isinstance(value, str):  # the name of an option instead of its content
                value = current_option(dotted.replace(".", "/"), value)
            dotted = f"{place}.{new}" if place else new
            key = override + new
        renamed[key] = current(value, dotted)
    return renamed


def current_argument(argument: str) -> str:
    """Return a command-line argument in which an old key, option or class name has its present name.

    drafter/paths=direct   ->   drafter/tree=per_frame          +drafter.growth.width=3   ->   +drafter.tree.width=3
    """
    if override := ARGUMENT_PATTERN.fullmatch(argument):
        prefix, key, package, value = override.groups("")
        # Every name in the value, as options also stand in sweeps, quotes and lists: choice(direct,'chain').
        value = re.sub(r"[\w-]+", lambda option: current_option(key, option[0]), value)
        package = re.sub(r"[\w.]+", lambda place: current_package(place[0]), package)
        argument = f"{prefix}{current_key(key)}{package}{value}"
    return re.sub(r"\bctcdraft(?:\.\w+)+", lambda name: TARGETS.get(name[0], name[0]), argument)


def current_package(place: str) -> str:
    """Return the place of `group@PLACE` by its present name; a config may hold a whole drafter below another key."""
    parts = place.split(".")
    for start in range(len(parts)):
        below = ".".join(parts[start:])
        if (new := current_key(below)) != below:
            return ".".join([*parts[:start], new])
    return place


def current_key(key: str) -> str:
    """Return a dotted key, or a config group, by its present name; the longest known beginning decides."""
    if key.startswith(SWEPT):
        return SWEPT + current_key(key.removeprefix(SWEPT))
    parts = re.split(r"([./])", key)  # names at even places, separators between them
    for size in range(len(parts), 0, -2):
        if new := current_name(".".join(parts[:size:2])):
            renamed = "".join([*parts[: size - 1], new, *parts[size:]])
            return current_key(renamed)  # drafter.paths.words is drafter.tree.words, which is drafter.tree.children
    return key


def current_name(key: str) -> str | None:
    """Return the present last name of a dotted key that was renamed; None for others."""
    key = re.sub(r"^objective\.parts\.[^.]+", "objective", key)  # parts of a sum are objectives
    new = KEYS.get(key)
    return new and new.rpartition(".")[2]


def current_option(group: str, option: str) -> str:
    """Return an option of a group (by its old or present name) as it is called now."""
    return OPTIONS.get(group, {}).get(option, option)
