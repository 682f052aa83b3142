"""The entry point for vLLM, hooks of its V1 model runner, and memory for a head's cache.

`register` runs in every process of vLLM. It replaces the faulty sampling function of CPU builds and lets a wrong
configuration fail with one sentence before processes are started. The runner's hooks are installed when a proposer is
constructed: they hand over hidden states right after the target's forward pass, so that no state is lost in a step
that drafts nothing, and the numbers of the step before vLLM asks for drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from ctcdraft.errors import InputError
from ctcdraft.serving import cpu_sampling, speculators
from ctcdraft.serving.configuration import SERVED_VERSIONS, read_options, refuse_other_head, refuse_unserved
from ctcdraft.serving.scheduling import drop_drafts_for_prompts, skip_drafts_for_prompts

PROPOSER = "ctcdraft.serving.CTCProposer"


def register() -> None:
    """Prepare a process of vLLM: the entry point in the group vllm.general_plugins.

    Versions other than those in `configuration.SERVED_VERSIONS` are refused where a head is served.
    """
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
        if is_served(config):
            refuse_unserved(config)
            refuse_other_head(config)
        return config

    create_engine_config.checks_ctcdraft = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
    if vllm.__version__.startswith(SERVED_VERSIONS):
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore

        Scheduler.schedule = drop_drafts_for_prompts(Scheduler.schedule, is_adaptive)
        EngineCore.post_step = skip_drafts_for_prompts(EngineCore.post_step, is_adaptive)


def is_served(vllm_config: Any) -> bool:
    """Return whether a head of this package drafts."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method == "custom_class" and speculative.model == PROPOSER


def is_adaptive(vllm_config: Any) -> bool:
    """Return whether a head of this package drafts as much as pays."""
    return is_served(vllm_config) and read_options(vllm_config).adaptive


def print_input_errors_alone() -> None:
    """Let an InputError that ends a server be its one sentence, without a traceback through vLLM."""
    stock = sys.excepthook

    def excepthook(kind: Any, error: BaseException, traceback: Any) -> None:
        if isinstance(error, InputError):
            print(f"ctcdraft: {error}", file=sys.stderr)
        else:
            stock(kind, error, traceback)

    sys.excepthook = excepthook


def has_ctc_proposer(runner: Any) -> bool:
    """Return whether the drafter of a model runner is the one of this package; an engine may have none."""
    return hasattr(getattr(runner, "drafter", None), "record")


def end_of(request: Any, max_model_len: int) -> tuple[int, tuple[int | None, ...]]:
    """Return the tokens of prompt and answer with which vLLM ends a request, and the tokens at which it does."""
    params = request.sampling_params
    stops = params.eos_token_id, *(params.stop_token_ids or ())
    return min(request.num_prompt_tokens + params.max_tokens, max_model_len), stops


def install_hooks() -> None:
    """Let the model runner hand states and step numbers to a drafter that takes them; other drafters stay stock."""
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, "hands_over_states", False):
        return
    forward, propose = GPUModelRunner._model_forward, GPUModelRunner.propose_draft_token_ids
    take, update_length = GPUModelRunner.take_draft_token_ids, GPUModelRunner.update_max_model_len
    set_aux_layers = GPUModelRunner._setup_eagle3_aux_hidden_state_outputs

    def _model_forward(self: Any, *arguments: Any, **named: Any) -> Any:
        output = forward(self, *arguments, **named)
        slots = get_forward_context().slot_mapping
        if slots and has_ctc_proposer(self):
            last, others = output if self.use_aux_hidden_state_outputs else (output, ())
            self.drafter.record((last, *others), named["positions"], slots)
        return output

    def propose_draft_token_ids(self: Any, *arguments: Any, **named: Any) -> Any:
        if has_ctc_proposer(self):
            spec_decode, common = arguments[6:8]
            count = common.num_reqs
            drafted = [0] * count if spec_decode is None else spec_decode.num_draft_tokens
            starts = common.query_start_loc_cpu[: count + 1].tolist()
            ids = tuple(self.input_batch.req_ids[:count])
            limits, stops = zip(*(end_of(self.requests[one], self.max_model_len) for one in ids), strict=True)
            self.drafter.begin_step(ids, starts, drafted, common.block_table_tensor, limits, stops)
        return propose(self, *arguments, **named)

    def take_draft_token_ids(self: Any) -> Any:
        if has_ctc_proposer(self):
            self.drafter.complete()
        return take(self)

    def _setup_eagle3_aux_hidden_state_outputs(self: Any) -> None:
        if not has_ctc_proposer(self):
            return set_aux_layers(self)
        if self.drafter.aux_layers:
            self.use_aux_hidden_state_outputs = True
            self.get_model().set_aux_hidden_state_layers(self.drafter.aux_layers)
        return update_max_model_len(self, self.max_model_len)

    def update_max_model_len(self: Any, max_model_len: int) -> None:
        update_length(self, max_model_len)
        # vLLM drafts nothing at all while one request is within reach of the end of its context; the proposer knows
        # how much room each request has.
        if has_ctc_proposer(self):
            self.effective_drafter_max_model_len = max_model_len + self.num_spec_tokens

    GPUModelRunner._model_forward = _model_forward
    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids
    GPUModelRunner.take_draft_token_ids = take_draft_token_ids
    GPUModelRunner.update_max_model_len = update_max_model_len
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
