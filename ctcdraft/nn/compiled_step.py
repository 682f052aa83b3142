"""Parts of a small head's decoding step as machine code (numba), where that is possible and faster; its body's is in
compiled_body.py.

Everywhere else (training, accelerators, large or unusual heads, no numba) the tensor operations run, which are the slow
twin: a small head's weights are multiplied in less time than its sixty tensor operations take to be called.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

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

    def versions(self) -> list[int]:
        return [weight._version for weight in self.weights]


class CachedArrays(NamedTuple):
    """What `LogitCorrection.arrays` returns, and the weights it was made from."""

    arrays: Sequence[Any]
    held: HeldWeights
    versions: list[int]

    @classmethod
    def of(cls, correction: Any) -> CachedArrays | None:
        weights = correction.out.weight, *correction.recurrent_weights()
        is_ready = correction.out.weight.T.is_contiguous() and all(weight.dtype == torch.float32 for weight in weights)
        if not is_ready or not correction.is_cacheable(*correction.parameters()):
            return None
        if (table_VG := correction.projected_tokens()) is None:
            return None
        held, (out, recurrent, bias) = HeldWeights(correction), (weight.detach() for weight in weights)
        arrays = table_VG.numpy(), recurrent.numpy(), bias.numpy(), out.T.numpy()
        return cls(arrays, held, held.versions())

    def are_current(self) -> bool:
        return self.held.are_current() and self.held.versions() == self.versions


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
