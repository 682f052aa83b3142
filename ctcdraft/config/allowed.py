"""Allow-list of the classes that a config file from elsewhere may instantiate: run directories, published heads, YAMLs.

Hydra calls whatever a `_target_` names, and importing its module already runs code. A file that others may have written
is therefore read as plain values and checked here, at every depth, before Hydra sees it: each name must be on the list
of its config node, interpolations are refused (`${oc.env:...}` would read the environment), and so are keys by which
other libraries load code. `trust` lists further names, given on the command line or by the caller; `trust` in a file is
ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ctcdraft.errors import InputError, first_line
from ctcdraft.renamed import current

# configs/objective/distill.yaml looks its distance up by name, so `path` beside this target is checked too.
GET_METHOD = "hydra.utils.get_method"


def _targets(package: str, names: str) -> set[str]:
    return {f"ctcdraft.{package}.{name}" for name in names.split()}


BODIES = _targets(
    "nn",
    "bodies.AttentionBody bodies.FeedForwardBody bodies.ResidualBody slot_bodies.DFlashBody peagle_body.PEagleBody",
)
CORRECTIONS = _targets(
    "nn", "frame_correction.FrameGRUCorrection logit_correction.GRUCorrection logit_correction.MarkovCorrection"
)
DATASETS = _targets("corpus.sources", "gsm8k project_prompts sharegpt")
VERIFIERS = _targets("decoding.verification", "k_sequential match multi_round")
PAST_RESPONSES = "ctcdraft.corpus.prepared.past_responses"
CORPUS_TARGETS = {
    *DATASETS,
    *_targets("corpus", "sources.mixture decontamination.Decontamination"),
    *_targets("corpus.filters", "Alternation Cleaning ControlTokens Duplicates Empties Language Length Roles"),
}
ALLOWED_TARGETS: Mapping[str, Collection[str]] = {  # by node of a run's config
    "base": _targets("models", "loading.load_base meta.random_weights_base"),
    "drafter": {
        *BODIES,
        *CORRECTIONS,
        *_targets(
            "drafters",
            "autoregressive.Autoregressive controls.Oracle controls.RandomDrafter draft_model.DraftModel eagle.Eagle "
            "eagle3.Eagle3 early_exit.EarlyExit early_exit.Kangaroo hydra.Hydra merged.Merged parallel.ParallelDrafter "
            "prompt_lookup.PromptLookup redrafter.ReDrafter suffix.SuffixDecoding",
        ),
        PAST_RESPONSES,
        *_targets(
            "drafters.trees",
            "ctc.Collapse ctc.PrefixSearch ctc.TransducerSearch dynamic.DynamicTree per_frame.PerFrameTree "
            "per_frame.StaticPerFrameTree per_frame.likely_choices sampled.SampledChains sampled.SampledLabels "
            "sampled.SampledTokens sampled.SampledTransductions static.GreedyPathTree static.StaticTree",
        ),
        *_targets("evaluation", "contestants.StockGenerate transformers_dflash.TransformersDFlash"),
    },
    "objective": {
        GET_METHOD,
        *_targets(
            "objectives",
            "cross_entropy.CrossEntropy ctc.CTC ctc.PrefixCTC ctc.PrefixTransducer ctc.Transducer distillation.Distill "
            "distillation.DistillWithLabels distillation.kl distillation.total_variation eagle.Eagle eagle.EagleCTC "
            "base.WeightedSum prefix_distillation.PrefixDistill",
        ),
    },
    "decoding": {
        *VERIFIERS,
        *_targets("decoding", "settings.DecodingSettings verification.Rejection"),
        *_targets("decoding.lossy_acceptance", "RelaxedAcceptance TypicalAcceptance"),
    },
    "corpus": CORPUS_TARGETS,
    "prompts": CORPUS_TARGETS,
    "answers": _targets("corpus.generation", "openai.ServedAnswers transformers.TransformersAnswers vllm.VllmAnswers"),
    "hidden_states": _targets("corpus.hidden_states", "OfflineHiddenStates OnlineHiddenStates"),
    "engine": _targets("training", "deepspeed.DeepSpeedEngine engine.MuonEngine engine.TorchEngine"),
    "adapt": _targets("training", "lora.LoRAAdapter"),
    "logger": _targets("training", "loggers.TensorBoardLogger loggers.WandbLogger"),
}
# A draft head has its weights in its own folder; these read other folders or ask the hub.
HEAD_TARGETS = {*ALLOWED_TARGETS["drafter"]} - {
    PAST_RESPONSES,
    *_targets("drafters", "draft_model.DraftModel"),
    *_targets("evaluation", "contestants.StockGenerate transformers_dflash.TransformersDFlash"),
}
EVALUATED_NODES = ("base", "drafter", "objective")  # the nodes of a run's config that an evaluation instantiates
PARTIAL_TARGETS = {  # targets that configs/ use with _partial_: true
    *(name for node in ("adapt", "engine", "logger", "hidden_states") for name in ALLOWED_TARGETS[node]),
    *BODIES,
    *CORRECTIONS,
    *DATASETS,
    *VERIFIERS,
    PAST_RESPONSES,
}
# Keys that make transformers, vLLM or DeepSpeed import code from a folder, a hub or an arbitrary module.
CODE_LOADING_KEYS = {
    "allow_all_kernels",
    "auto_map",
    "custom_generate",
    "kernel_config",
    "lower_precision_safe_modules",
    "trust_remote_code",
    "use_kernels",
}
# transformers takes any other value as a repository, whose compiled kernels it downloads and loads.
ALLOWED_ATTENTIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
ATTENTION_KEYS = {"attention", "attn_implementation", "_attn_implementation"}


def parse_trust(value: Any) -> tuple[str, ...]:
    """Return the class names of `trust=[module.Class, ...]`; none for None and []."""
    names = [value] if isinstance(value, str) else list(value or ())
    for name in names:
        if not isinstance(name, str) or "." not in name or not all(map(str.isidentifier, name.split("."))):
            raise InputError(f"trust must list classes with their modules, as in trust=[module.Class], got {name}")
    return tuple(names)


def read_run_config(file: Path, trust: Collection[str] = (), nodes: Collection[str] | None = EVALUATED_NODES) -> Any:
    """Return the config.yaml of a run directory, checked.

    Args:
        nodes: the nodes that will be instantiated, whose names are checked; None for all, as resuming needs.
    """
    config, values = read_yaml(file)
    for node, value in values.items():
        instantiated = nodes is None or node in nodes
        refuse_foreign({node: value}, file, ALLOWED_TARGETS.get(node, ()) if instantiated else None, trust)
    return config


def read_drafter_config(file: Path, trust: Collection[str] = ()) -> Any:
    """Return the config of a YAML file that describes a drafter, checked."""
    config, values = read_yaml(file, "drafter")
    refuse_foreign(values, file, ALLOWED_TARGETS["drafter"], trust)
    return config


def read_yaml(file: Path, place: str = "") -> tuple[Any, dict[str, Any]]:
    """Return the config in a YAML file, and its plain values with interpolations unresolved.

    Args:
        place: the key that the file's content has in a whole config, for the lookup of renamed keys.
    """
    try:
        values: Any = current(OmegaConf.to_container(OmegaConf.load(file), resolve=False), place)
        config = OmegaConf.create(values)
    # RecursionError: YAML nests without a limit, and an alias may refer to the node that contains it.
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise InputError(f"cannot read {file} ({first_line(error)}); give a YAML file of keys and values") from error
    if not isinstance(values, dict):
        raise InputError(f"{file} holds a list; give a YAML file of keys and values")
    return config, values


def refuse_foreign(values: Any, file: Path, allowed: Collection[str] | None, trust: Collection[str]) -> None:
    """Raise InputError for the first value that could run code which is neither on the allow-list nor trusted.

    Args:
        values: plain values, without interpolations resolved.
        allowed: the names that may be called; None where nothing here is instantiated, so that names do not matter.
    """
    for where, key, value in walk_values(values):
        if not isinstance(value, str | int | float | bool | None | dict | list):
            raise InputError(f"{file} holds a {type(value).__name__} as {where}; write it as text or a number")
        if any("${" in text for text in (key, value) if isinstance(text, str)):
            raise InputError(f"{file} interpolates {printable(value)} ({where}); write the value itself into the file")
        if key in CODE_LOADING_KEYS or (key in ATTENTION_KEYS and value not in ALLOWED_ATTENTIONS):
            raise InputError(f"{file} sets {where}, which loads code from outside this package; leave it out")
        if isinstance(value, dict):
            refuse_directives(value, where, file, trust)
            if "_target_" in value and allowed is not None:
                refuse_name(value["_target_"], f"{where}._target_", file, allowed, trust)
                if value["_target_"] == GET_METHOD:  # it returns the function of that name, which is then called
                    refuse_name(value.get("path"), f"{where}.path", file, set(allowed) - {GET_METHOD}, trust)


def refuse_directives(node: dict[Any, Any], where: str, file: Path, trust: Collection[str]) -> None:
    """Raise InputError for a Hydra directive, such as _args_, that no shipped config uses at this place."""
    for key in [key for key in node if isinstance(key, str) and key.startswith("_") and key.endswith("_")]:
        value = node[key]
        may_be_partial = node.get("_target_") in (*PARTIAL_TARGETS, *trust)
        if key == "_target_" or (key == "_convert_" and value == "all"):
            continue
        if key != "_partial_" or not (value is False or (value is True and may_be_partial)):
            unused = f"{where}.{key}: {printable(value)}"
            raise InputError(f"{file} has {unused}, which no config of ctcdraft uses; leave it out")


def refuse_name(name: Any, where: str, file: Path, allowed: Collection[str], trust: Collection[str]) -> None:
    text = printable(name)
    if not isinstance(name, str):
        raise InputError(f"{file} has {where}: {text}, which is not the name of a class; give one as module.Class")
    if name not in allowed and name not in trust:
        raise InputError(
            f"{file} wants to call {text} ({where}), and a file may only call classes of ctcdraft; if it is a class of "
            f"your own, add trust=[{text}]"
        )


def walk_values(node: Any, where: str = "", key: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Yield every value with its dotted path and its key, the outermost first; items of a list have no key."""
    yield where, key, node
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from walk_values(value, f"{where}.{printable(name)}".lstrip("."), name)
    elif isinstance(node, Sequence) and not isinstance(node, str | bytes):
        for number, value in enumerate(node):
            yield from walk_values(value, f"{where}[{number}]")


def printable(value: Any) -> str:
    """Return a value from a file as text that can neither break a line nor send escape codes to the terminal."""
    text = str(value)
    return text if text.isprintable() and len(text) < 200 else repr(text[:200])
