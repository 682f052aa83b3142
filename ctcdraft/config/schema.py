"""Types and ranges of the config keys, checked on a composed config before torch is imported.

`SCHEMA` has one row for each key whose value can be judged by itself. A key that a config does not have is skipped, so
one table serves train.py, evaluate.py and data/prepare.py. Rules that involve several keys, the files or the base model
are checked where those are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ctcdraft.distributed import Shard
from ctcdraft.errors import InputError, check_float, check_int, check_temperature

WANDB_MODES = ("online", "offline", "shared", "disabled")


def check_bool(value: Any, key: str) -> None:
    # Hydra reads no, off and 0 as other values, all of which but 0 would count as true.
    if not isinstance(value, bool):
        raise InputError(f"{key} must be true or false, got {value}")


def check_bool_or_null(value: Any, key: str) -> None:
    if value is not None:
        check_bool(value, key)


def check_text_or_null(value: Any, key: str) -> None:
    if not isinstance(value, str | None):
        raise InputError(f"{key} must be a name or null, got {value}")


def check_list(value: Any, key: str, *, null: bool = False) -> None:
    if (value is not None or not null) and (isinstance(value, str) or not isinstance(value, Sequence)):
        raise InputError(f"{key} must be a list, as in {key}=[A,B], got {value}")


def check_wandb_mode(value: Any, key: str) -> None:
    if value not in (None, *WANDB_MODES):
        raise InputError(f"{key} must be null or one of {', '.join(WANDB_MODES)}, got {value}")


def check_betas(value: Any, key: str) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InputError(f"{key} must be two numbers, as in {key}=[0.9,0.95], got {value}")
    for beta in value:
        check_float(beta, key, least=0, below=1)


def check_tree_size(value: Any, key: str) -> None:
    if value not in ("auto", "adaptive"):  # of evaluate.py alone; DecodingSettings refuses them elsewhere
        if isinstance(value, str):
            raise InputError(f"{key} must be an integer >= 1 (in evaluate.py also auto or adaptive), got {value}")
        check_int(value, key)


positive_int, non_negative_int = check_int, partial(check_int, least=0)
positive_int_or_null = partial(check_int, null=True)
positive, non_negative = partial(check_float, above=0), partial(check_float, least=0)
positive_or_null = partial(check_float, above=0, null=True)

DRAFTER_SWITCHES = """
    own_heads own_head like_base mlp layer_norms feed_normed prefix_layer prefix_norm prompt_only remember
    body.causal body.like_base body.own_text body.root_input body.root_predicts body.root_row correction.own_embedding
"""
SCHEMA: dict[str, Callable[[Any, str], object]] = {
    "seed": non_negative_int,
    "shard": lambda value, key: Shard.parse(value),
    "threads": positive_int_or_null,
    "timeout_minutes": positive,
    "show": non_negative_int,
    "show_labels": positive_int,
    "warm_up_tokens": non_negative_int,
    "timing.questions": non_negative_int,
    "timing.alone": non_negative_int,
    "plan.flops": positive_or_null,
    "plan.bandwidth": positive_or_null,
    "plan.memory": positive_or_null,
    "plan.link": positive_or_null,
    "plan.processes": positive_int_or_null,
    "trainer.steps": positive_int,
    "trainer.batch_size": positive_int,
    "trainer.anchors_per_sequence": positive_int_or_null,
    "trainer.pack_length": positive_int_or_null,
    "trainer.gradient_accumulation_steps": positive_int,
    "trainer.max_length": positive_int,
    "trainer.learning_rate": positive,
    "trainer.warmup_steps": positive_int,
    "trainer.min_lr_ratio": non_negative,
    "trainer.betas": check_betas,
    "trainer.weight_decay": non_negative,
    "trainer.max_grad_norm": positive,
    "trainer.clip_value": positive_or_null,
    "trainer.compile": check_text_or_null,
    "trainer.checkpoint_every": positive_int,
    "trainer.checkpoint_minutes": positive_or_null,
    "trainer.save_total_limit": positive_int,
    "trainer.max_nonfinite_steps": positive_int,
    "trainer.probe_every": positive_int,
    "trainer.probe_prompts": non_negative_int,
    "trainer.num_threads": positive_int_or_null,
    "trainer.prefetch": check_bool,
    "logger.wandb.mode": check_wandb_mode,
    "drafter.frames": positive_int,
    "objective.labels": positive_int,
    "decoding.max_new_tokens": positive_int,
    "decoding.nodes": check_tree_size,
    "decoding.temperature": check_temperature,
    "decoding.top_k": non_negative_int,
    "decoding.top_p": partial(check_float, above=0, most=1),
    "answers.batch_size": positive_int,
    "answers.max_new_tokens": positive_int,
    "answers.samples": positive_int,
    "answers.temperature": check_temperature,
    "hidden_states.rows": positive_int,
    "hidden_states.limit_gb": positive,
    "adapt.rank": positive_int,
    "adapt.alpha": positive_int,
    "adapt.learning_rate": positive,
    "adapt.weight": non_negative,
    "trace.questions": non_negative_int,
    "trace.tokens": partial(check_int, least=2),
    "trace.tokens_per_frame": positive_int,
    "sizing.prompts": positive_int,
    "sizing.timed": positive_int,
    "sizing.timed_steps": positive_int,
    "sizing.repeats": positive_int,
    "sizing.shown": non_negative_int,
    **dict.fromkeys(("measure.nodes", "sizing.nodes", "sizing.adaptive_nodes"), check_list),
    **dict.fromkeys(("benchmark.contexts", "benchmark.nodes"), check_list),
    **dict.fromkeys(("differences", "drafter.acceptance"), partial(check_list, null=True)),
    **dict.fromkeys(("overwrite", "plan_only", "answers.enforce_eager"), check_bool),
    **dict.fromkeys(("decoding.lossless", "decoding.token_for_token"), check_bool),
    # Null in evaluate.py: as the run has it.
    **dict.fromkeys(("base.static_shapes", "base.compiled", "base.zero3"), check_bool_or_null),
    **dict.fromkeys(map("drafter.{}".format, DRAFTER_SWITCHES.split()), check_bool),
    "trainer.autocast": check_bool,  # last: its default asks torch what the device supports, an import of seconds
}


def check_config(config: Any) -> None:
    """Raise InputError for the first key whose value has the wrong type or is out of range.

    Args:
        config: the composed config of an entry point, or a part of one with its keys at the same places.
    """
    from omegaconf import OmegaConf

    absent = object()
    for key, check in SCHEMA.items():
        value = OmegaConf.select(config, key, default=absent)
        if value is not absent:
            check(value, key)


def as_list(value: Any, key: str) -> list[Any]:
    """Return a list value as it is and a single string as a list of one; raise InputError for anything else."""
    if isinstance(value, str):
        return [value]
    check_list(value, key)
    return list(value)
