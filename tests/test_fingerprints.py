"""Hashes of weights, for modules that write extra entries, offload their weights or share names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate.big_modeling import cpu_offload
from tiny_models import random_base
from torch import nn

from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.fingerprint import has_other_rotary, has_other_sum, rotary_summary, weights_hash
from ctcdraft.training.run_directory import refuse_other_base


class WithScales(nn.Linear):
    """A layer that writes an entry below the name of its weight, as 4-bit linear layers do."""

    def __init__(self, scale):
        super().__init__(3, 2, bias=False)
        self.scale = scale
        nn.init.constant_(self.weight, 0.5)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.full((1,), self.scale)


def test_entries_below_a_weight_are_hashed():
    one, same, other = (weights_hash(nn.Sequential(WithScales(scale))) for scale in (1.0, 1.0, 2.0))
    assert one == same != other


def test_the_hash_of_a_module_never_changes():
    """Existing runs and corpora store these hashes. The module is registered under two names."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6).view(2, 3))
        layer.bias.fill_(-1.5)
    both = nn.ModuleDict({"first": layer, "again": layer})
    assert weights_hash(both) == "0a9ab90d5d3160a8"
    cpu_offload(both, execution_device=torch.device("cpu"))
    assert layer.weight.is_meta
    assert weights_hash(both) == "0a9ab90d5d3160a8"
    assert weights_hash(nn.Linear(3, 2, device="meta")) == ""


def test_a_change_of_any_weight_is_another_base():
    """The hash is of 64 values per tensor; the sum is of all of them, in any order and on any device."""
    base, other = random_base(), random_base()
    row_D = other.lm.get_input_embeddings().weight.data[7]
    row_D[1:] = 0.0
    assert other.weights_hash == weights_hash(other.lm), "none of the values that are hashed"
    changed = BaseLM(other.lm, None, "random")
    assert changed.weights_hash == base.weights_hash
    assert has_other_sum(base.fingerprint(), changed.fingerprint())
    assert not has_other_sum(base.fingerprint(), random_base().fingerprint())
    rounded = BaseLM(random_base().lm.to(torch.bfloat16), None, "random")
    assert not has_other_sum(base.fingerprint(), rounded.fingerprint()), "the same checkpoint loaded as bfloat16"
    half = BaseLM(random_base().lm.to(torch.float16), None, "random")
    assert "weights_sum" not in half.fingerprint()
    older = {key: value for key, value in base.fingerprint().items() if key != "weights_sum"}
    assert not has_other_sum(older, changed.fingerprint())
    with pytest.raises(InputError, match="weights_sum"):
        refuse_other_base(base.fingerprint(), changed.fingerprint(), Path("head"))


def test_other_rotary_frequencies_are_another_base():
    """As after YaRN is entered in config.json: no weight changes, and every hidden state does."""
    base, other = random_base(), random_base()
    frequencies = next(module for module in other.lm.modules() if hasattr(module, "inv_freq"))
    frequencies.inv_freq = frequencies.original_inv_freq = frequencies.inv_freq / 4
    assert weights_hash(other.lm) == base.weights_hash
    one, changed = base.fingerprint(), base.fingerprint() | {"rotary_frequencies": rotary_summary(other.lm)}
    assert has_other_rotary(one, changed)
    assert not has_other_rotary(one, random_base().fingerprint())
    assert not has_other_rotary(
        {key: value for key, value in one.items() if key != "rotary_frequencies"}, changed
    )  # of older files
    frequencies.attention_scaling = 1.1
    assert has_other_rotary(changed, changed | {"rotary_frequencies": rotary_summary(other.lm)})
    assert rotary_summary(nn.Linear(2, 2)) == rotary_summary(other.lm.to("meta")) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", [1e4, 2.0**13, 5e5, 1e6, 2.0**20])
def test_rounded_rotary_frequencies_are_those_of_the_same_base(theta, dtype):
    whole, rounded = (nn.Module() for _ in range(2))
    frequencies_D = theta ** -(torch.arange(0, 128, 2) / 128)
    whole.register_buffer("inv_freq", frequencies_D)
    rounded.register_buffer("inv_freq", frequencies_D.to(dtype))
    of_rounded = {"rotary_frequencies": rotary_summary(rounded)}
    assert not has_other_rotary({"rotary_frequencies": rotary_summary(whole)}, of_rounded)
    whole.inv_freq = (theta * 1.1) ** -(torch.arange(0, 128, 2) / 128)
    assert has_other_rotary({"rotary_frequencies": rotary_summary(whole)}, of_rounded)
