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

from ctcdraft.errors import InputError, first_line
from ctcdraft.renamed import current

# configs/objective/distill.yaml looks its distance up by name, so `path` beside this target is checked too.
GET_METHOD = "hydra.utils.get_method"
CORPUS_TARGETS = {
    "ctcdraft.corpus.filters.Alternation",
    "ctcdraft.corpus.filters.Cleaning",
    "ctcdraft.corpus.filters.ControlTokens",
    "ctcdraft.corpus.filters.Duplicates",
    "ctcdraft.corpus.filters.Empties",
    "ctcdraft.corpus.filters.Language",
    "ctcdraft.corpus.filters.Length",
    "ctcdraft.corpus.filters.Roles",
    "ctcdraft.corpus.decontamination.Decontamination",
    "ctcdraft.corpus.sources.gsm8k",
    "ctcdraft.corpus.sources.project_prompts",
    "ctcdraft.corpus.sources.mixture",
    "ctcdraft.corpus.sources.sharegpt",
}
ALLOWED_TARGETS: Mapping[str, Collection[str]] = {  # by node of a run's config
    "base": {"ctcdraft.models.loading.load_base", "ctcdraft.models.meta.random_weights_base"},
    "drafter": {
        "ctcdraft.drafters.autoregressive.Autoregressive",
        "ctcdraft.drafters.parallel.ParallelDrafter",
        "ctcdraft.drafters.cascade.Cascade",
        "ctcdraft.drafters.trees.static.GreedyPathTree",
        "ctcdraft.drafters.trees.static.StaticTree",
        "ctcdraft.drafters.controls.RandomDrafter",
        "ctcdraft.drafters.controls.Oracle",
        "ctcdraft.drafters.trees.per_frame.PerFrameTree",
        "ctcdraft.drafters.trees.per_frame.StaticPerFrameTree",
        "ctcdraft.drafters.trees.per_frame.likely_choices",
        "ctcdraft.drafters.draft_model.DraftModel",
        "ctcdraft.drafters.trees.sampled_chains.SampledChains",
        "ctcdraft.drafters.trees.sampled_labels.SampledLabels",
        "ctcdraft.drafters.trees.sampled_labels.SampledTokens",
        "ctcdraft.drafters.eagle.Eagle",
        "ctcdraft.drafters.trees.dynamic.DynamicTree",
        "ctcdraft.drafters.hydra.Hydra",
        "ctcdraft.drafters.trees.ctc.Collapse",
        "ctcdraft.drafters.trees.ctc.PrefixSearch",
        "ctcdraft.drafters.prompt_lookup.PromptLookup",
        "ctcdraft.drafters.cascade.Staged",
        "ctcdraft.drafters.trees.transducer.SampledTransductions",
        "ctcdraft.drafters.trees.transducer.TransducerSearch",
        "ctcdraft.evaluation.stock_generate.StockGenerate",
        "ctcdraft.nn.bodies.AttentionBody",
        "ctcdraft.nn.logit_correction.GRUCorrection",
        "ctcdraft.nn.logit_correction.MarkovCorrection",
        "ctcdraft.nn.bodies.FeedForwardBody",
        "ctcdraft.nn.bodies.ResidualBody",
    },
    "objective": {
        GET_METHOD,
        "ctcdraft.objectives.cross_entropy.CrossEntropy",
        "ctcdraft.objectives.ctc.CTC",
        "ctcdraft.objectives.distillation.Distill",
        "ctcdraft.objectives.distillation.kl",
        "ctcdraft.objectives.distillation.total_variation",
        "ctcdraft.objectives.eagle.Eagle",
        "ctcdraft.objectives.eagle.EagleCTC",
        "ctcdraft.objectives.ctc.PrefixCTC",
        "ctcdraft.objectives.ctc.PrefixTransducer",
        "ctcdraft.objectives.ctc.Transducer",
        "ctcdraft.objectives.weighted_sum.WeightedSum",
    },
    "decoding": {
        "ctcdraft.decoding.settings.DecodingSettings",
        "ctcdraft.decoding.rejection.Rejection",
        "ctcdraft.decoding.rejection.k_sequential",
        "ctcdraft.decoding.rejection.multi_round",
        "ctcdraft.decoding.verification.TypicalAcceptance",
        "ctcdraft.decoding.verification.match",
    },
    "corpus": CORPUS_TARGETS,
    "prompts": CORPUS_TARGETS,
    "answers": {
        "ctcdraft.corpus.generation.transformers.TransformersAnswers",
        "ctcdraft.corpus.generation.openai.ServedAnswers",
        "ctcdraft.corpus.generation.vllm.VllmAnswers",
    },
    "states": {"ctcdraft.corpus.hidden_states.OnlineHiddenStates", "ctcdraft.corpus.hidden_states.OfflineHiddenStates"},
    "engine": {
        "ctcdraft.training.engine.MuonEngine",
        "ctcdraft.training.engine.TorchEngine",
        "ctcdraft.training.deepspeed.DeepSpeedEngine",
    },
    "adapt": {"ctcdraft.training.lora.LoRAAdapter"},
    "logger": {"ctcdraft.training.loggers.TensorBoardLogger", "ctcdraft.training.loggers.WandbLogger"},
}
EVALUATED_NODES = ("base", "drafter", "objective")  # the nodes of a run's config that an evaluation instantiates
PARTIAL_TARGETS = {  # targets that configs/ use with _partial_: true
    *ALLOWED_TARGETS["adapt"],
    *ALLOWED_TARGETS["engine"],
    *ALLOWED_TARGETS["logger"],
    *ALLOWED_TARGETS["states"],
    "ctcdraft.corpus.sources.gsm8k",
    "ctcdraft.corpus.sources.sharegpt",
    "ctcdraft.decoding.rejection.k_sequential",
    "ctcdraft.decoding.rejection.multi_round",
    "ctcdraft.decoding.verification.match",
    "ctcdraft.nn.bodies.AttentionBody",
    "ctcdraft.nn.logit_correction.GRUCorrection",
    "ctcdraft.nn.logit_correction.MarkovCorrection",
    "ctcdraft.nn.bodies.FeedForwardBody",
    "ctcdraft.nn.bodies.ResidualBody",
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
        nodes: the nodes that will be instantiated, whose names are checked; None for all.
    """
    config, values = read_yaml(file)
    for node, value in values.items():
        instantiated = nodes is None or node in nodes
        refuse_foreign({node: value}, file, ALLOWED_TARGETS.get(node, ()) if instantiated else None, trust)
    return config


def read_resumed_config(file: Path, trust: Collection[str] = ()) -> Any:
    """Return the config.yaml of a run directory with all names checked: resuming instantiates every node."""
    return read_run_config(file, trust, nodes=None)


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
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values: Any = current(OmegaConf.to_container(OmegaConf.load(file), resolve=False), place)
        config = OmegaConf.create(values)
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
                if value["_target_"] == GET_METHOD:
                    refuse_name(value.get("path"), f"{where}.path", file, set(allowed) - {GET_METHOD}, trust)


def refuse_directives(node: dict[Any, Any], where: str, file: Path, trust: Collection[str]) -> None:
    """Raise InputError for a Hydra directive, such as _args_, that no shipped config uses at this place."""
    for key in [key for key in node if isinstance(key, str) and key.startswith("_") and key.endswith("_")]:
        value = node[key]
        may_be_partial = node.get("_target_") in (*PARTIAL_TARGETS, *trust)
        if key == "_target_" or (key == "_convert_" and value == "all"):
            continue
        if key != "_partial_" or not (value is False or (value is True and may_be_partial)):
            raise InputError(
                f"{file} has {where}.{key}: {printable(value)}, which no config of ctcdraft uses; leave it out"
            )


def refuse_name(name: Any, where: str, file: Path, allowed: Collection[str], trust: Collection[str]) -> None:
    """Raise InputError for a name to be called that is neither allowed nor trusted."""
    if not isinstance(name, str):
        raise InputError(
            f"{file} has {where}: {printable(name)}, which is not the name of a class; give one as module.Class"
        )
    if name not in allowed and name not in trust:
        raise InputError(
            f"{file} wants to call {printable(name)} ({where}), and a file may only call classes of ctcdraft; if it is "
            f"a class of your own, add trust=[{printable(name)}]"
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
