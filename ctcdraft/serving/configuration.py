"""What a configuration of vLLM says of a head, and the configurations in which no head is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError

SERVED_VERSIONS = ("0.32.",)  # whose internals were read and tested
LENGTHS = ("adaptive", "full")


@dataclass(frozen=True)
class Options:
    """The values of additional_config["ctcdraft"]."""

    head: str
    adaptive: bool
    values: dict[str, Any]  # config.json of the head


def read_options(vllm_config: Any) -> Options:
    """Return the options; raise InputError for wrong ones, and for a head that is not served."""
    from ctcdraft.serving.served_head import head_config

    given = (vllm_config.additional_config or {}).get("ctcdraft")
    if not isinstance(given, dict) or not isinstance(given.get("head"), str):
        raise InputError(
            'the folder of the head is missing; give --additional-config \'{"ctcdraft": {"head": FOLDER}}\', got '
            f"{vllm_config.additional_config}"
        )
    if unknown := set(given) - {"head", "length"}:
        raise InputError(f"additional_config.ctcdraft has no {', '.join(sorted(unknown))}; its keys are head, length")
    length = given.get("length", LENGTHS[0])
    if length not in LENGTHS:
        raise InputError(f"additional_config.ctcdraft.length must be one of {', '.join(LENGTHS)}, got {length}")
    return Options(given["head"], length == LENGTHS[0], head_config(Path(given["head"])))


def refuse_unserved(vllm_config: Any) -> None:
    """Raise InputError for a configuration of vLLM in which a head cannot be served."""
    import vllm

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text, cache = model.hf_text_config, vllm_config.cache_config
    sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    reasons = {
        f"vLLM {vllm.__version__} is not known; install {' or '.join(v + '*' for v in SERVED_VERSIONS)}": (
            not vllm.__version__.startswith(SERVED_VERSIONS)
        ),
        f"tensor_parallel_size={parallel.tensor_parallel_size} shards the lm_head; use 1": (
            parallel.tensor_parallel_size > 1
        ),
        f"pipeline_parallel_size={parallel.pipeline_parallel_size} keeps hidden states apart from the head; use 1": (
            parallel.pipeline_parallel_size > 1
        ),
        "context parallelism shards the KV cache; use prefill_ and decode_context_parallel_size=1": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        f"{model.model} has a sliding window, which frees blocks that the head reads; serve it without a head": (
            bool(sliding) or "sliding_attention" in (getattr(text, "layer_types", None) or ())
        ),
        f"kv_cache_dtype={cache.cache_dtype} is not the dtype of the model; use auto": (
            cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch."))
        ),
        f"{model.model} has layers without attention to the whole text; serve it without a head": (
            model.is_hybrid or model.is_attention_free or model.use_mla or model.attention_chunk_size is not None
        ),
        "KV caches that are transferred or offloaded do not hold the head's keys and values; serve without": (
            vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None
        ),
        f"{model.model} has position ids of several dimensions; serve it without a head": model.uses_mrope,
        "LoRA adapters change the hidden states from request to request; serve without --enable-lora": (
            vllm_config.lora_config is not None
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise InputError(f"no head is served here: {reason}")


def refuse_other_head(vllm_config: Any) -> None:
    """Raise InputError for a head that does not fit the model, before weights are loaded."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    from ctcdraft.serving.served_head import load_served_head

    options, model = read_options(vllm_config), vllm_config.model_config
    head = load_served_head(Path(options.head), options.values, model.model, model.revision, warn)
    served_class, _ = ModelRegistry.resolve_model_cls(model.architectures, model)
    if len(head.layer_order) > 1 and not supports_eagle3(served_class):
        raise InputError(
            f"the head in {options.head} reads auxiliary layers, which vLLM's {served_class.__name__} does not give; "
            "train one with base.aux_layers=[last]"
        )
    if model.max_model_len > (positions := head.positions):
        raise InputError(
            f"max_model_len={model.max_model_len} is more than the {positions} positions of the head in "
            f"{options.head}; lower --max-model-len"
        )


def warn(sentence: str) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.ctcdraft").warning(sentence)
