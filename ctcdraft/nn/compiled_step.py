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
MAX_LOGITS = 2**18  # of all frames


def step_kernels() -> Any:
    """Return the module of compiled loops, imported by the first step; None without numba."""
    return load_kernels("ctcdraft.nn.step_kernels")


def takes_machine_code(x_XD: Tensor) -> bool:
    """Return whether these are a few rows of float32 on a CPU, without gradients and autocast."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    few = x_XD.is_cpu and x_XD.dtype == torch.float32 and x_XD.numel() <= MAX_ROWS * x_XD.shape[-1]
    return few and step_kernels() is not None


class HeldWeights:
    """The layers and weights of a module, to notice that one was replaced or is stored elsewhere.

    Asked at every step, so the modules' own dictionaries are read: their attributes take several times longer.
    """

    def __init__(self, module: nn.Module) -> None:
        places = [place for part in module.modules() for place in (part._modules, part._parameters)]
        self.places: list[dict[str, Any]] = [place for place in places if place]
        self.values = self.contents()
        self.weights = [value for value in self.values if isinstance(value, Tensor)]
        self.addresses = [weight.data_ptr() for weight in self.weights]

    def contents(self) -> list[Any]:
        return [value for place in self.places for value in place.values()]

    def are_current(self) -> bool:
        values = self.contents()
        same = len(values) == len(self.values) and all(map(operator.is_, values, self.values))
        return same and [weight.data_ptr() for weight in self.weights] == self.addresses


class BodyArrays:
    """A body's weights as arrays, views that follow what is written to the weights in place."""

    def __init__(self, body: Any) -> None:
        self.held = HeldWeights(body)
        blocks = [body.block, *body.deeper]
        layers = [part for part in parts_of(body) if part.weight.ndim == 2]
        weights = [body.slots_TD, *(part.weight for part in parts_of(body))]
        shape = body.shape
        is_plain = not body.root_row and not shape.qk_norm and not shape.qkv_bias and shape.activation == "silu"
        # Other layouts would be compiled again, to slow code.
        self.usable = is_plain and all(map(is_ready, weights)) and all(map(is_ready_linear, layers))
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


def parts_of(body: Any) -> list[Any]:
    """Return the norms and linear layers of a body."""
    parts = [body.norm, body.project, *body.own_text]
    for block in [body.block, *body.deeper]:
        attention, mlp = block.attention, block.mlp
        parts += [block.attention_norm, attention.query, attention.key, attention.value, attention.out]
        parts += [block.mlp_norm, mlp.gate, mlp.up, mlp.down]
    return parts if body.root_project is None else [*parts, body.root_norm, body.root_project]


def body_arrays(body: Any) -> BodyArrays | None:
    """Return the arrays of a body whose step can be machine code, else None."""
    if body.arrays is None or not body.arrays.held.are_current():
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


def compiled_fusion(fusion: Any, states_BLD: Tensor) -> Tensor | None:
    """Return `AuxStateFusion.forward` by machine code; None where that is not possible."""
    if not takes_machine_code(states_BLD) or len(states_BLD) != 1:
        return None
    mix, norms = fusion.mix, [norm.weight for norm in fusion.norms]
    if not all(map(is_ready, norms)) or not is_ready_linear(mix):
        return None
    states_KE, norms_LD = states_BLD[0].contiguous().numpy(), tuple(norm.detach().numpy() for norm in norms)
    mix_ED, epsilon = mix.weight.detach().T.numpy(), fusion.norms[0].eps
    return torch.from_numpy(step_kernels().fuse_layers(states_KE, norms_LD, mix_ED, epsilon))[None]


def compiled_gru_start(first: Any, arrays: Any, anchor_XD: Tensor, root_X: Tensor) -> Tensor | None:
    """Return `GRUCorrection.start` at one root by machine code; None where that is not possible.

    arrays: those of `LogitCorrection.arrays`.
    """
    if root_X.numel() != 1 or not takes_machine_code(anchor_XD) or not is_ready_linear(first):
        return None
    table_VG, recurrent_GR, bias_G, _ = arrays
    anchor_1D, first_DR = anchor_XD.reshape(1, -1).contiguous().numpy(), first.weight.detach().T.numpy()
    memory_1R = step_kernels().start_gru(
        anchor_1D, first_DR, first.bias.detach().numpy(), table_VG[int(root_X)], recurrent_GR, bias_G
    )
    return torch.from_numpy(memory_1R).view(*root_X.shape, -1)


def compiled_log_softmax(logits_TC: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return log_probs_TC, and as probabilities probs_TV and blank_T, by machine code; None where not possible."""
    if not takes_machine_code(logits_TC) or logits_TC.numel() > MAX_LOGITS:
        return None
    kernels = load_kernels("ctcdraft.array_kernels")
    log_probs_TC, probs_TV, blank_T = map(torch.from_numpy, kernels.log_softmax(logits_TC.contiguous().numpy()))
    return log_probs_TC, probs_TV, blank_T


def is_ready(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.float32


def is_ready_linear(layer: Any) -> bool:
    """Return whether a layer has few weights, in the layout of `to_column_major_`."""
    weight = layer.weight
    small = type(layer) is nn.Linear and weight.numel() <= MAX_WEIGHTS
    return small and is_ready(weight) and weight.T.is_contiguous()
