"""Responses by vLLM's offline LLM class in this process, from token ids to token ids.

vLLM holds weights of its own beside the base model's, which is needed for its tokenizer and fingerprint only:
device=cpu keeps the base model off the accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ctcdraft.corpus.generation.requests import GenerateFn, Request, Response, ResponseGenerator, Skipped, SkipReason
from ctcdraft.corpus.generation.response_check import refuse_mismatched_responses
from ctcdraft.distributed import from_environment
from ctcdraft.errors import InputError, check_int
from ctcdraft.models.base_model import BaseLM


@dataclass(frozen=True)
class VllmAnswers(ResponseGenerator):
    """vLLM on the weights at `path`; it batches the requests of each of our batches by itself."""

    path: str
    dtype: str
    gpu_memory_utilization: float
    enforce_eager: bool  # false: vLLM compiles the model first, which takes minutes on a CPU
    # With defaults, as configs of older runs lack them.
    revision: str | None = field(default=None, kw_only=True)
    checked: int = field(default=8, kw_only=True)  # responses of the first batch that are verified with the base

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self.checked, "answers.checked", least=0)

    def start(self, base: BaseLM) -> GenerateFn:
        if (processes := from_environment().world_size) > 1:  # whose process group vLLM would take for its own
            raise InputError(
                f"answers=vllm cannot run in {processes} processes of torchrun; start one process per device, with "
                "CUDA_VISIBLE_DEVICES and shard=i/N, or give answers=openai and the address of a server"
            )
        # The engine in this process, not in a child: one whose parent was killed goes on and keeps the accelerator.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm
        except ImportError as error:
            raise InputError(
                f"answers=vllm needs the package vllm ({error}); pip install 'ctcdraft[vllm]', or use another answers="
            ) from error
        # A seeded request whose prompt is read in chunks ends the engine on a CPU (vLLM 0.32), whose generators have no
        # offset to set back.
        whole = self.temperature > 0 and not torch.accelerator.is_available()
        llm = vllm.LLM(
            model=self.path,
            revision=self.revision,
            dtype=self.dtype,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enforce_eager=self.enforce_eager,
            enable_chunked_prefill=False if whole else None,
            max_model_len=base.context_length,
            generation_config="vllm",  # not that of the model, which may set top-k and penalties
        )
        return LoadedVllm(base, self, llm, vllm.SamplingParams)


@dataclass
class LoadedVllm:
    """vLLM with the weights; the responses of its first batch are verified with the base model's probabilities."""

    base: BaseLM
    answers: VllmAnswers
    llm: Any
    sampling_params: Any
    verified: bool = False

    def __call__(self, requests: Sequence[Request]) -> list[Response | Skipped]:
        answers = self.answers
        prompts = [{"prompt_token_ids": list(request.tokens)} for request in requests]
        params = [
            self.sampling_params(
                temperature=answers.temperature,
                top_p=1.0,
                seed=request.random_key(answers.seed) % 2**31,
                max_tokens=answers.max_response_tokens(self.base, request),
                stop_token_ids=sorted(self.base.stop_token_ids),
                detokenize=False,
            )
            for request in requests
        ]
        outputs = [output.outputs[0] for output in self.llm.generate(prompts, params, use_tqdm=False)]
        if not self.verified:
            pairs = zip(requests, outputs, strict=True)
            answered = [(list(request.tokens), list(one.token_ids)) for request, one in pairs if one.token_ids]
            first = answered[: answers.checked]
            refuse_mismatched_responses(self.base, first, answers.temperature, f"vLLM with {answers.path}")
            self.verified = True
        empty = Skipped(SkipReason.EMPTY_RESPONSE)
        return [Response(list(one.token_ids)) if one.token_ids else empty for one in outputs]
