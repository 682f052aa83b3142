"""Quantised bases: bytes of their weights, lossless decoding, and heads that were trained for the unquantised base."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from sequential_parts import saved_lm
from test_lossless import PROMPTS, settings
from training_parts import ctc_head

from ctcdraft.decoding.loop import generate
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import EvaluationSetup
from ctcdraft.evaluation.environment import count_matmul_weights, weight_bytes
from ctcdraft.evaluation.losslessness import LosslessnessChecker
from ctcdraft.models.checkpoints import QUANTIZATION_PACKAGES, weight_options
from ctcdraft.models.fingerprint import was_quantized_since
from ctcdraft.models.loading import load_base


def test_unknown_values_and_missing_packages_are_input_errors():
    with pytest.raises(
        InputError, match="quantization must be one of bitsandbytes_4bit, torchao_int8 or null, got no_"
    ):
        weight_options("float32", "cpu", "no_bits")
    for name in [name for name, package in QUANTIZATION_PACKAGES.items() if find_spec(package) is None]:
        with pytest.raises(InputError, match=f"needs the package {QUANTIZATION_PACKAGES[name]}"):
            weight_options("float32", "cpu", name)


def test_llm_int8_is_refused_with_its_reason():
    """It finds outlier columns over all rows of a batch, so the siblings of a node would change its logits."""
    with pytest.raises(InputError, match=r"bitsandbytes_8bit is refused: LLM\.int8 looks for outlier.* use bitsandb"):
        weight_options("float32", "cpu", "bitsandbytes_8bit")


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao, which is not installed")
@pytest.mark.filterwarnings("ignore")  # of torchao
def test_torchao_on_a_cpu(tmp_path):
    path = saved_lm(tmp_path / "base", hidden_size=64, head_dim=16)
    whole = load_base(path, "float32", "cpu")
    base = load_base(path, "float32", "cpu", quantization="torchao_int8")
    assert base.execution_mode == "eager, exact shapes, torchao_int8"
    assert count_matmul_weights(base) == count_matmul_weights(whole) == weight_bytes(whole) // 4
    # All but the lm_head and five norms take one byte each, and some scales.
    linear = count_matmul_weights(whole) - 261 * 64 - 5 * 64
    assert linear < weight_bytes(base) - 4 * (261 * 64 + 5 * 64) < 1.3 * linear
    assert was_quantized_since(whole.fingerprint(), base.fingerprint())
    assert not was_quantized_since(base.fingerprint(), base.fingerprint())
    head, decoding = ctc_head(base), settings(tokens=20)
    torch.testing.assert_close(
        head.body.block.mlp.up.weight, ctc_head(whole).body.block.mlp.up.weight, rtol=0, atol=0.02
    )
    for prompt in PROMPTS:
        expected = generate(base, Autoregressive(base), prompt, decoding, frozenset(), 0).tokens
        assert generate(base, head, prompt, decoding, frozenset(), 0).tokens == expected
    contestants = {"autoregressive": Autoregressive(base), "ctc": head}
    checker = LosslessnessChecker(EvaluationSetup(base, contestants, decoding, 0))
    assert checker._explained_by_rounding("ctc", 0.0, 1e-4, PROMPTS[0], 0) is True
