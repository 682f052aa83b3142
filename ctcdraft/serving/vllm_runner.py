"""vLLM as this package sees it: the entry point, hooks of the V1 model runner, checks, and memory for a head's cache.

`register` runs in every process of vLLM. It replaces the faulty sampling function of CPU builds and lets a wrong
configuration fail with one sentence before processes are started. The runner's hooks are installed when a proposer is
constructed: they hand over hidden states right after the target's forward pass, so that no state is lost in a step
that drafts nothing, and the numbers of the step before vLLM asks for drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ctcdraft.errors import InputError
from ctcdraft.serving import cpu_sampling, speculators

SERVED_VERSIONS = ("0.32.",)  # whose internals were read and tested
PROPOSER = "ctcdraft.serving.CTCProposer"
LENGTHS = ("adaptive", "full")


@dataclass(frozen=True)
class Options:
    """The values of additional_config["ctcdraft"]."""

    head: str
    adaptive: bool
    values: dict[str, Any]  # config.json of the head


def register() -> None:
    """Prepare a process of vLLM: the entry point in the group vllm.general_plugins."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    cpu_sampling.install(vllm.__version__)
    stock = EngineArgs.create_engine_config
    if getattr(stock, "checks_ctcdraft", False):
        return
    print_input_errors_alone()

    def create_engine_config(self: Any, *arguments: Any, **named: Any) -> Any:
        speculators.resolve(self, PROPOSER)
        config = stock(self, *arguments, **named)
        speculative = config.speculative_config
        if speculative is not None and speculative.method == "custom_class" and speculative.model == PROPOSER:
            refuse_unserved(config)
            refuse_other_head(config)
        return config

    create_engine_config.checks_ctcdraft = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def print_input_errors_alone() -> None:
    """Let an InputError that ends a server be its one sentence, without a traceback through vLLM."""
    stock = sys.excepthook

    def excepthook(kind: Any, error: BaseException, traceback: Any) -> None:
        if isinstance(error, InputError):
            print(f"ctcdraft: {error}", file=sys.stderr)
        else:
            stock(kind, error, traceback)

    sys.excepthook = excepthook


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
        f"decode_context_parallel_size={parallel.decode_context_parallel_size} shards the KV cache; use 1": (
            parallel.decode_context_parallel_size > 1
        ),
        f"{model.model} has a sliding window, which frees blocks that the head reads; serve it without a head": (
            bool(sliding) or "sliding_attention" in (getattr(text, "layer_types", None) or ())
        ),
        f"kv_cache_dtype={cache.cache_dtype} is quantised; use auto": (
            cache.cache_dtype not in ("auto", "float32", "bfloat16", "float16")
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


def install_hooks() -> None:
    """Let the model runner hand states and step numbers to a drafter that takes them; other drafters stay stock."""
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, "hands_over_states", False):
        return
    forward, propose = GPUModelRunner._model_forward, GPUModelRunner.propose_draft_token_ids
    take = GPUModelRunner.take_draft_token_ids
    set_aux_layers = GPUModelRunner._setup_eagle3_aux_hidden_state_outputs

    def _model_forward(self: Any, *arguments: Any, **named: Any) -> Any:
        output = forward(self, *arguments, **named)
        slots = get_forward_context().slot_mapping
        if slots and hasattr(self.drafter, "record"):
            last, others = output if self.use_aux_hidden_state_outputs else (output, ())
            self.drafter.record((last, *others), named["positions"], slots)
        return output

    def propose_draft_token_ids(self: Any, *arguments: Any, **named: Any) -> Any:
        if hasattr(self.drafter, "record"):
            spec_decode, common = arguments[6:8]
            count = common.num_reqs
            drafted = [0] * count if spec_decode is None else spec_decode.num_draft_tokens
            starts = common.query_start_loc_cpu[: count + 1].tolist()
            ids = tuple(self.input_batch.req_ids[:count])
            self.drafter.begin_step(ids, starts, drafted, common.block_table_tensor)
        return propose(self, *arguments, **named)

    def take_draft_token_ids(self: Any) -> Any:
        if hasattr(self.drafter, "record"):
            self.drafter.complete()
        return take(self)

    def _setup_eagle3_aux_hidden_state_outputs(self: Any) -> None:
        if not hasattr(getattr(self, "drafter", None), "record"):
            return set_aux_layers(self)
        if self.drafter.aux_layers:
            self.use_aux_hidden_state_outputs = True
            self.get_model().set_aux_hidden_state_layers(self.drafter.aux_layers)
        # vLLM drafts nothing at all while one request is within reach of the end of its context; the proposer knows
        # how much room each request has.
        self.effective_drafter_max_model_len = self.max_model_len + self.num_spec_tokens
        return None

    GPUModelRunner._model_forward = _model_forward
    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids
    GPUModelRunner.take_draft_token_ids = take_draft_token_ids
    GPUModelRunner._setup_eagle3_aux_hidden_state_outputs = _setup_eagle3_aux_hidden_state_outputs
    GPUModelRunner.hands_over_states = True


def add_cache_layers(vllm_config: Any, blocks: int, shape: Any) -> Sequence[Any]:
    """Register a layer per block of a head that vLLM allocates a KV cache for, beside those of the target.

    They are counted in the memory of a block, and have the block tables and slots of the target's layers.

    Args:
        shape: BlockConfig of the head.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class HeadCache(nn.Module, AttentionLayerBase):
        """The KV cache of one block of a head; computes nothing."""

        def __init__(self, like: Any, layer_name: str) -> None:
            super().__init__()
            self.like, self.layer_name = (like,), layer_name  # in a tuple: not a submodule
            self.num_heads, self.impl = like.num_heads, like.impl

        def get_attn_backend(self) -> Any:
            return self.like[0].get_attn_backend()

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return self.like[0].get_kv_cache_spec(vllm_config)

    layers = vllm_config.compilation_config.static_forward_context
    attention = [layer for layer in layers.values() if isinstance(layer, Attention)]
    added = []
    for number in range(blocks):
        spec = attention[-1].get_kv_cache_spec(vllm_config)
        if (spec.num_kv_heads, spec.head_size) != (shape.kv_heads, shape.head_width):
            raise InputError(
                f"the head has {shape.kv_heads} key-value heads of width {shape.head_width}, and vLLM's KV cache "
                f"{spec.num_kv_heads} of {spec.head_size}; serve it without a head"
            )
        # vLLM takes the only number of a name for that of the layer.
        added.append(HeadCache(attention[-1], f"ctcdraft.layers.{len(attention) + number}.cache"))
        layers[added[-1].layer_name] = added[-1]
    return added
