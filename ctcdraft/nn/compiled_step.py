"""The decoding step of an attention body and its head as machine code (numba), where that is possible and faster.

Everywhere else (training, accelerators, large or unusual heads, no numba) the tensor operations run, which are the slow
twin: a small head's weights are multiplied in less time than its sixty tensor operations take to be called.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ctcdraft.machine_code import load_kernels

MAX_ROWS = 32  # of one step: with more, torch's products are faster
MAX_WEIGHTS = 2**20  # of one matrix, for the same reason; several threads of torch are not used by these heads
MAX_HEAD_WEIGHTS = 2**22  # of the lm_head


def step_kernels() -> Any:
    """Return the module of compiled loops, imported by the first step; None without numba."""
    return load_kernels("ctcdraft.nn.step_kernels")


def takes_machine_code(x_XD: Tensor) -> bool:
    """Return whether these are a few rows of float32 on a CPU, without gradients and autocast."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    few = x_XD.is_cpu and x_XD.dtype == torch.float32 and x_XD.numel() <= MAX_ROWS * x_XD.shape[-1]
    return few and step_kernels() is not None


class BodyArrays:
    """A body's weights as arrays, views that follow what is written to the weights in place."""

    def __init__(self, body: Any) -> None:
        self.parts = parts_of(body)
        self.addresses = addresses(body, self.parts)
        layers = [part for part in self.parts if part.weight.ndim == 2]
        weights, blocks = [body.slots_TD, *(part.weight for part in self.parts)], [body.block, *body.deeper]
        shape = body.shape
        is_plain = not body.root_row and not shape.qk_norm and not shape.qkv_bias and shape.activation == "silu"
        small = all(type(layer) is nn.Linear and layer.weight.numel() <= MAX_WEIGHTS for layer in layers)
        # The layout of `to_column_major_`; others would be compiled again, to slow code.
        ready = all(weight.is_cpu and weight.dtype == torch.float32 for weight in weights)
        self.usable = is_plain and small and ready and all(layer.weight.T.is_contiguous() for layer in layers)
        if self.usable:
            self.fill(body, blocks)

    def fill(self, body: Any, blocks: list[Any]) -> None:
        def transposed(*layers: Any) -> list[Any]:
            return [layer.weight.detach().T.numpy() for layer in layers]

        def plain(weight: Tensor) -> Any:
            return weight.detach().numpy()

        self.blocks = []
        for block in blocks:
            attention, mlp = block.attention, block.mlp
            arrays = [plain(block.attention_norm.weight)]
            arrays += transposed(attention.query, attention.key, attention.value, attention.out)
            arrays += [plain(block.mlp_norm.weight), *transposed(mlp.gate, mlp.up, mlp.down)]
            self.blocks.append(step_kernels().BlockWeights(*arrays))
        (self.project_DD,) = transposed(body.project)
        self.norm_D, self.slots_TD = plain(body.norm.weight), plain(body.slots_TD)
        self.root = self.norm_D, self.project_DD  # not used without a root
        if body.root_project is not None:
            self.root = plain(body.root_norm.weight), *transposed(body.root_project)
        self.own_text = transposed(*body.own_text)
        self.rotation = tuple(table_PE.numpy() for table_PE in body.rotary.tables(torch.device("cpu")))

    def are_current(self, body: Any) -> bool:
        """Return whether the body has the same layers, with weights stored where they were."""
        parts = parts_of(body)
        same = len(parts) == len(self.parts) and all(map(operator.is_, parts, self.parts))
        return same and addresses(body, parts) == self.addresses


def parts_of(body: Any) -> list[Any]:
    """Return the norms and linear layers of a body."""
    parts = [body.norm, body.project, *body.own_text]
    for block in [body.block, *body.deeper]:
        attention, mlp = block.attention, block.mlp
        parts += [block.attention_norm, attention.query, attention.key, attention.value, attention.out]
        parts += [block.mlp_norm, mlp.gate, mlp.up, mlp.down]
    return parts if body.root_project is None else [*parts, body.root_norm, body.root_project]


def addresses(body: Any, parts: list[Any]) -> list[int]:
    return [body.slots_TD.data_ptr(), *(part.weight.data_ptr() for part in parts)]


def body_arrays(body: Any) -> BodyArrays | None:
    """Return the arrays of a body whose step can be machine code, else None."""
    if body.arrays is None or not body.arrays.are_current(body):
        body.arrays = BodyArrays(body)
    return body.arrays if body.arrays.usable else None


def compiled_step(body: Any, states_BKE: Tensor, root_BAD: Tensor, memory: Any) -> Tensor | None:
    """Return `AttentionBody.step` by machine code; None where that is not possible."""
    rows, start = states_BKE.shape[1] + body.frames, memory.length
    # The first step of a text allocates the cache, and has many rows.
    if start + rows > memory.capacity or memory.buffers[0] is None or not takes_machine_code(states_BKE):
        return None
    if (arrays := body_arrays(body)) is None:
        return None
    kernels, epsilon = step_kernels(), body.shape.epsilon
    states_KE = states_BKE[0].contiguous().numpy()
    root_RD = root_BAD[0, : 1 if body.root_project is not None else 0].contiguous().numpy()
    text_KD, slots_TD = kernels.start_slots(
        states_KE, arrays.project_DD, root_RD, *arrays.root, arrays.slots_TD, epsilon
    )
    normed_KE = kernels.norm_layers(states_KE, text_KD.shape[1], epsilon) if arrays.own_text else states_KE
    for layer, (weights, (keys, values)) in enumerate(zip(arrays.blocks, memory.layer_buffers, strict=True)):
        cached = keys[0].numpy(), values[0].numpy()
        causal, own_KD = body.block.attention.causal, text_KD
        if arrays.own_text:
            own_KD = text_KD + kernels.product(normed_KE, arrays.own_text[layer])
        slots_TD = kernels.step_block(own_KD, slots_TD, weights, arrays.rotation, cached, start, causal, epsilon)
    memory.crop(start + len(text_KD))
    return torch.from_numpy(kernels.rms_norm(slots_TD, arrays.norm_D, epsilon))[None, None]


def compiled_logits(head: Any, states_XD: Tensor) -> Tensor | None:
    """Return `BlankHead.forward` by machine code; None where that is not possible."""
    if not takes_machine_code(states_XD):
        return None
    lm_head = head.words
    weight = lm_head.weight
    if type(lm_head) is not nn.Linear or lm_head.bias is not None or weight.numel() > MAX_HEAD_WEIGHTS:
        return None
    if not (weight.is_cpu and weight.dtype == head.blank_D.dtype == torch.float32 and weight.is_contiguous()):
        return None
    states_YD = states_XD.reshape(-1, states_XD.shape[-1]).contiguous().numpy()
    blank_D, bias = head.blank_D.detach().numpy(), float(head.blank_bias)
    logits_YC = step_kernels().class_logits(states_YD, weight.detach().numpy(), blank_D, np.float32(bias))
    return torch.from_numpy(logits_YC).view(*states_XD.shape[:-1], -1)
