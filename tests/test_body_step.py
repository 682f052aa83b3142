"""A body's `step` (decoding) against its `forward` (training): the same hidden states on the same text."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from tiny_models import random_base
from torch import nn

from ctcdraft.decoding.kv_cache import KVCache
from ctcdraft.decoding.loop import Context
from ctcdraft.nn import compiled_step
from ctcdraft.nn.block_config import BlockConfig
from ctcdraft.nn.bodies import AttentionBody, AuxStateFusion, FeedForwardBody, ResidualBody
from ctcdraft.nn.heads import BlankHead
from ctcdraft.nn.peagle_body import PEagleBody
from ctcdraft.nn.rotary import Rotary, apply_rotary, default_frequencies
from ctcdraft.nn.slot_bodies import DFlashBody
from ctcdraft.nn.weight_layout import to_column_major_

SHAPE = BlockConfig.of(random_base().lm.config, 64)
FRAMES, TEXT = 5, 23
EXACT = Context(torch.tensor([0]), torch.zeros(1, 1), 1, 1)  # of exact shapes; its tensors are not read
ATTENTION = [
    partial(AttentionBody, root_input=root_input, causal=causal, blocks=blocks)
    for root_input, causal, blocks in product((True, False), (True, False), (1, 2))
]
FULL_SHAPE = replace(  # features of other bases' layers: see nn/base_layer.py
    SHAPE, frequencies=(0.9, 0.1, 0.0, 0.0), rotary_scale=1.2, qk_norm=True, qkv_bias=True, activation="gelu"
)
LAYERS = 3
OWN_TEXT = [
    partial(AttentionBody, root_input=root_input, causal=causal, blocks=2, own_text=own_text, root_row=root_row)
    for root_input, causal, (own_text, root_row) in product(
        (True, False), (True, False), ((True, False), (False, True), (True, True))
    )
]
BLOCKS = [
    *(
        partial(DFlashBody, blocks=2, causal=causal, root_predicts=root_predicts)
        for causal, root_predicts in product((True, False), (True, False))
    ),
    partial(PEagleBody, blocks=3, like_base=True),
]
BODIES = [*ATTENTION, partial(ResidualBody, blocks=2), partial(FeedForwardBody, inner=None)]


def inference_body(state_layers=1, body=AttentionBody, qk_norm=False, **options):
    torch.manual_seed(3)
    module = body(replace(SHAPE, state_layers=state_layers, qk_norm=qk_norm), FRAMES, **options)
    with torch.no_grad():
        for value in module.parameters():
            value += 0.2 * torch.randn_like(value)
    to_column_major_(module)
    return module


def columns(module, shape=None):
    """Return the columns of the hidden states that a body reads."""
    return ((shape or module.shape).state_layers + getattr(module, "reads_tokens", False)) * SHAPE.width


def steps(module):
    """The frames of four steps over a text; the first one, which allocates the cache, is never machine code."""
    generator, memory = torch.Generator().manual_seed(5), KVCache(module.layers, capacity=TEXT)
    frames = []
    for count in (9, 1, 3, 2):
        states_BKE = torch.randn(1, count, columns(module), generator=generator)
        root_BAD = torch.randn(1, 1, SHAPE.width, generator=generator)
        frames.append(module.step(states_BKE, root_BAD, memory, EXACT))
    return torch.stack(frames)


@pytest.fixture
def without_numba(monkeypatch):
    """Return the result of a function where numba is missing."""

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(compiled_step, "step_kernels", lambda: None)
            return function(*arguments)

    return call


@pytest.mark.parametrize(
    ("root_input", "causal", "blocks", "own_text"), [*product((True, False), (True, False), (1, 3), (True, False))]
)
@torch.inference_mode()
def test_machine_code_does_what_tensors_do(without_numba, root_input, causal, blocks, own_text):
    layers = LAYERS if own_text else 1
    module = inference_body(layers, root_input=root_input, causal=causal, blocks=blocks, own_text=own_text)
    slow = without_numba(steps, module)
    assert module.arrays is None
    torch.testing.assert_close(steps(module), slow, rtol=0, atol=1e-5)
    assert module.arrays.usable


@pytest.mark.parametrize("shape", [{}, {"qk_norm": True}])
@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("body", range(len(BLOCKS)))
@torch.inference_mode()
def test_blocks_of_masks_by_machine_code(without_numba, body, layers, shape):
    module = inference_body(layers, BLOCKS[body], **shape)
    slow = without_numba(steps, module)
    assert module.arrays is None
    torch.testing.assert_close(steps(module), slow, rtol=0, atol=1e-5)
    assert module.arrays.usable


@torch.inference_mode()
def test_machine_code_follows_the_weights(without_numba):
    """Written in place, stored elsewhere, in a copy of the module, and in layers that were replaced."""
    module = inference_body(root_input=True, causal=False)
    steps(module)
    for change in ("in place", "elsewhere", "copy", "assigned", "layer"):
        before = steps(module)
        if change == "copy":
            module = copy.deepcopy(module)
        weight = module.block.mlp.down.weight
        if change == "assigned":
            module.load_state_dict({name: 0.9 * value for name, value in module.state_dict().items()}, assign=True)
        elif change == "layer":
            module.block.mlp.up = torch.nn.Sequential(module.block.mlp.up, torch.nn.ReLU())
            module.block.mlp.up.weight = module.block.mlp.up[0].weight
        elif change == "elsewhere":
            weight.data = (weight.data.T * 1.5).T
        else:
            weight.data.mul_(0.5)
        assert not torch.allclose(steps(module), before, atol=1e-3)
        torch.testing.assert_close(steps(module), without_numba(steps, module), rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", [nn.Module.bfloat16, nn.Module.double])
@torch.inference_mode()
def test_other_dtypes_take_tensors(change):
    module = change(inference_body(root_input=True, causal=False))
    states_BKD, memory = torch.randn(1, 3, SHAPE.width, dtype=module.slots_TD.dtype), KVCache(1, capacity=TEXT)
    for _ in range(2):
        module.step(states_BKD, states_BKD[:, -1:], memory, EXACT)
    assert module.arrays is None


@pytest.mark.parametrize("frames", [1, 4, 7])
@torch.inference_mode()
def test_logits_by_machine_code(without_numba, frames):
    head = BlankHead(nn.Linear(SHAPE.width, 50, bias=False), SHAPE.width)
    head.blank_bias += 0.3
    states_XD = torch.randn(1, 1, frames, SHAPE.width)
    slow = without_numba(head, states_XD)
    assert compiled_step.compiled_logits(head, states_XD) is not None
    torch.testing.assert_close(head(states_XD), slow, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 8])
@torch.inference_mode()
def test_fused_layers_by_machine_code(without_numba, rows):
    torch.manual_seed(rows)
    fusion = AuxStateFusion(SHAPE.width, LAYERS, SHAPE.epsilon)
    for value in fusion.parameters():
        value += 0.2 * torch.randn_like(value)
    states_BLE = torch.randn(1, rows, LAYERS * SHAPE.width)
    assert compiled_step.compiled_fusion(fusion, states_BLE) is None  # row-major
    to_column_major_(fusion)
    slow = without_numba(fusion, states_BLE)
    assert compiled_step.compiled_fusion(fusion, states_BLE) is not None
    torch.testing.assert_close(fusion(states_BLE), slow, rtol=0, atol=1e-5)
    assert compiled_step.compiled_fusion(fusion, states_BLE.repeat(2, 1, 1)) is None


@torch.inference_mode()
def test_log_softmax_by_machine_code(without_numba):
    """Also of logits far apart, and of tokens outside a draft vocabulary."""
    logits_TC = 30 * torch.randn(5, 90, generator=torch.Generator().manual_seed(0))
    logits_TC[1, 7], logits_TC[2, -1], logits_TC[3, 4] = -torch.inf, 200, 300
    log_probs_TC, probs_TV, blank_T = compiled_step.compiled_log_softmax(logits_TC)
    expected_TC = logits_TC.double().log_softmax(dim=-1)
    torch.testing.assert_close(log_probs_TC.double(), expected_TC, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(probs_TV.double(), expected_TC[:, :-1].exp(), rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(blank_T.double(), expected_TC[:, -1].exp(), rtol=1e-5, atol=1e-30)
    assert probs_TV[1, 7] == 0
    assert without_numba(compiled_step.compiled_log_softmax, logits_TC) is None


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        *((body, SHAPE) for body in BODIES),
        *((partial(body, like_base=True), FULL_SHAPE) for body in ATTENTION),
        *((body, replace(SHAPE, state_layers=LAYERS)) for body in (*OWN_TEXT, *BLOCKS)),
        (BLOCKS[-1], FULL_SHAPE),
    ],
)
@torch.inference_mode()
def test_steps_over_a_text_are_the_forward_over_it(body, shape):
    """The first draft reads many states at once, later ones a few; slots are never kept in the cache."""
    torch.manual_seed(3)
    module = body(shape, FRAMES)
    for value in module.parameters():
        value += 0.2 * torch.randn_like(value)
    states_BLE, roots_BLD = torch.randn(1, TEXT, columns(module, shape)), torch.randn(1, TEXT, SHAPE.width)
    memory = KVCache(module.layers, capacity=TEXT) if module.layers else None
    stops, stepped, start = [9, 10, 12, 13, 17, TEXT], [], 0
    for stop in stops:
        stepped.append(module.step(states_BLE[:, start:stop], roots_BLD[:, stop - 1 : stop], memory, EXACT))
        assert memory is None or memory.length == stop
        start = stop
    anchors_BA, positions_L = torch.tensor(stops)[None] - 1, torch.arange(TEXT)
    forward_BATD = module(
        anchor_BAD=states_BLE[:, anchors_BA[0]],
        root_BAD=roots_BLD[:, anchors_BA[0]],
        anchors_BA=anchors_BA,
        text=module.text_keys_values(states_BLE, positions_L[None]),
        visible_BAL=positions_L <= anchors_BA[..., None],
    )
    torch.testing.assert_close(torch.cat(stepped, dim=1), forward_BATD, rtol=0, atol=1e-4)


def test_apply_rotary_is_a_complex_rotation():
    """As complex numbers: the left half is real, the right half imaginary."""
    rotary, x_LE = (
        Rotary(default_frequencies(6, 100.0), 30),
        torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),
    )
    positions_L = torch.tensor([11, 12, 13, 14])
    angles_LF = positions_L[:, None] * 100.0 ** (-torch.arange(3) / 3)
    rotated_LF = torch.complex(x_LE[:, :3], x_LE[:, 3:]) * torch.polar(torch.ones(4, 3), angles_LF)
    ours_LE = apply_rotary(x_LE, rotary(positions_L))
    torch.testing.assert_close(ours_LE, torch.cat([rotated_LF.real, rotated_LF.imag], dim=1), rtol=0, atol=1e-5)
    assert torch.equal(apply_rotary(x_LE, rotary.span(11, 15, x_LE.device)), ours_LE)
