"""The decoding step of a body whose frames are rows behind the text, as machine code (numba); see compiled_step.py."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ctcdraft.nn.compiled_step import HeldWeights, is_ready, is_ready_linear, step_kernels, takes_machine_code


class BodyArrays:
    """A body's weights as arrays, views that follow what is written to the weights in place.

    A subclass has the arrays of what precedes the blocks: `weights`, `parts` and `fill` name them, `start` uses them.
    """

    def __init__(self, body: Any) -> None:
        self.held, self.epsilon = HeldWeights(body), body.shape.epsilon
        blocks = [body.block, *body.deeper]
        parts = [*self.parts(body), body.norm, *(part for block in blocks for part in parts_of_block(block))]
        layers = [part for part in parts if part.weight.ndim == 2]
        is_plain = self.takes(body) and not body.shape.qkv_bias and body.shape.activation == "silu"
        # Other layouts would be compiled again, to slow code.
        weights = [*self.weights(body), *(part.weight for part in parts)]
        self.usable = is_plain and all(map(is_ready, weights)) and all(map(is_ready_linear, layers))
        if self.usable:
            self.fill(body)
            self.blocks, self.norm_D = [block_weights(block) for block in blocks], plain(body.norm.weight)
            self.rotation = tuple(table_PE.numpy() for table_PE in body.rotary.tables(torch.device("cpu")))

    def takes(self, body: Any) -> bool:
        return True

    @abstractmethod
    def weights(self, body: Any) -> list[Tensor]:
        """Return the parameters of the body itself."""

    @abstractmethod
    def parts(self, body: Any) -> list[Any]:
        """Return the norms and linear layers before the blocks."""

    @abstractmethod
    def fill(self, body: Any) -> None: ...

    @abstractmethod
    def start(self, states_KE: Any, root_AD: Any) -> tuple[Any, Any]:
        """Return the text that each block reads, and the rows of the first one."""


class AttentionArrays(BodyArrays):
    """Of `AttentionBody`."""

    def takes(self, body: Any) -> bool:
        return not body.root_row

    def weights(self, body: Any) -> list[Tensor]:
        return [body.slots_TD]

    def parts(self, body: Any) -> list[Any]:
        root = [] if body.root_project is None else [body.root_norm, body.root_project]
        return [body.project, *body.own_text, *root]

    def fill(self, body: Any) -> None:
        self.project_DD, self.slots_TD = transposed(body.project), plain(body.slots_TD)
        self.root_rows, self.root = 0, (plain(body.norm.weight), self.project_DD)  # not used without a root
        if body.root_project is not None:
            self.root_rows, self.root = 1, (plain(body.root_norm.weight), transposed(body.root_project))
        self.own_text = [transposed(own) for own in body.own_text]
        self.ones_E = np.ones(body.shape.state_layers * body.shape.width, np.float32)
        self.layers = body.layers

    def start(self, states_KE: Any, root_AD: Any) -> tuple[Any, Any]:
        kernels = step_kernels()
        given = self.project_DD, root_AD[: self.root_rows], *self.root, self.slots_TD, self.epsilon
        text_KD, slots_TD = kernels.start_slots(states_KE, *given)
        if not self.own_text:
            return [text_KD] * self.layers, slots_TD
        normed_KE = kernels.norm_inputs(states_KE, self.ones_E, text_KD.shape[1], self.epsilon)
        return [text_KD + kernels.product(normed_KE, own_ED) for own_ED in self.own_text], slots_TD


class DFlashArrays(BodyArrays):
    """Of `DFlashBody`."""

    def weights(self, body: Any) -> list[Tensor]:
        return [body.mask_D]

    def parts(self, body: Any) -> list[Any]:
        return [body.fc, body.text_norm]

    def fill(self, body: Any) -> None:
        self.text_weights, self.mask_D = (transposed(body.fc), plain(body.text_norm.weight)), plain(body.mask_D)
        self.rows, self.layers = body.rows, body.layers

    def start(self, states_KE: Any, root_AD: Any) -> tuple[Any, Any]:
        given = *self.text_weights, root_AD, self.mask_D, self.rows, self.epsilon
        text_KD, rows_RD = step_kernels().start_block(states_KE, *given)
        return [text_KD] * self.layers, rows_RD


class PEagleArrays(BodyArrays):
    """Of `PEagleBody`, whose text goes through all blocks as the masks do."""

    def weights(self, body: Any) -> list[Tensor]:
        return [body.mask_D, body.mask_state_E]

    def parts(self, body: Any) -> list[Any]:
        return [body.fc]

    def fill(self, body: Any) -> None:
        self.weights_of_pairs = transposed(body.fc), plain(body.mask_D), plain(body.mask_state_E)[None]
        width = body.shape.width
        inputs = [2 * width, *[width] * (body.layers - 1)]
        self.masks, self.no_texts = body.rows - 1, [np.empty((0, one), np.float32) for one in inputs]

    def start(self, states_KE: Any, root_AD: Any) -> tuple[Any, Any]:
        return self.no_texts, step_kernels().start_pairs(states_KE, *self.weights_of_pairs, self.masks)


def plain(weight: Tensor) -> Any:
    return weight.detach().numpy()


def transposed(layer: Any) -> Any:
    return layer.weight.detach().T.numpy()


def parts_of_block(block: Any) -> list[Any]:
    """Return the norms and linear layers of a block."""
    attention, mlp = block.attention, block.mlp
    return [
        *norms_of(block.attention_norm), attention.query, attention.key, attention.value, attention.out,
        block.mlp_norm, mlp.gate, mlp.up, mlp.down, *norms_of(attention.query_norm), *norms_of(attention.key_norm),
    ]  # fmt: skip


def norms_of(norm: Any) -> list[Any]:
    """Return the norms of several vectors side by side, or the only one, or none."""
    return [] if isinstance(norm, nn.Identity) else list(getattr(norm, "norms", [norm]))


def block_weights(block: Any) -> Any:
    def joined(norm: Any) -> Any:
        arrays = [plain(each.weight) for each in norms_of(norm)]
        return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.float32), *arrays])

    attention, mlp = block.attention, block.mlp
    layers = (attention.query, attention.key, attention.value, attention.out), (mlp.gate, mlp.up, mlp.down)
    return step_kernels().BlockWeights(
        joined(block.attention_norm),
        *map(transposed, layers[0]),
        plain(block.mlp_norm.weight),
        *map(transposed, layers[1]),
        joined(attention.query_norm),
        joined(attention.key_norm),
    )


def body_arrays(body: Any) -> BodyArrays | None:
    """Return the arrays of a body whose step can be machine code, else None."""
    if body.arrays is None or not body.arrays.held.are_current():
        body.arrays = body.make_arrays(body)
    return body.arrays if body.arrays.usable else None


def compiled_step(body: Any, states_BKE: Tensor, root_BAD: Tensor, memory: Any) -> Tensor | None:
    """Return `SlotBody.step` by machine code; None where that is not possible."""
    rows, start = states_BKE.shape[1] + body.rows, memory.length
    # The first step of a text allocates the cache, and has many rows.
    if start + rows > memory.capacity or memory.buffers[0] is None or not takes_machine_code(states_BKE):
        return None
    if (arrays := body_arrays(body)) is None:
        return None
    kernels, epsilon, block = step_kernels(), arrays.epsilon, body.block
    how = block.attention.causal, block.norm_text, epsilon
    states_KE = states_BKE[0].contiguous().numpy()
    texts, rows_RD = arrays.start(states_KE, root_BAD[0].contiguous().numpy())
    for text_KD, weights, (keys, values) in zip(texts, arrays.blocks, memory.layer_buffers, strict=True):
        cached = keys[0].numpy(), values[0].numpy()
        rows_RD = kernels.step_block(text_KD, rows_RD, weights, arrays.rotation, cached, start, *how)
    memory.crop(start + len(states_KE))
    return torch.from_numpy(kernels.rms_norm(rows_RD[-body.frames :], arrays.norm_D, epsilon))[None, None]
