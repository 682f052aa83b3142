"""Wrong values under engine.deepspeed are refused in one sentence when the engine is built, before the first step."""

from __future__ import annotations

import copy
import os

import pytest

from ctcdraft.errors import InputError
from ctcdraft.training.deepspeed import refuse_wrong_config

DEFAULTS = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def deepspeed():
    """The package without a process group; environment variables are restored afterwards."""
    before = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = "cpu"
    package = pytest.importorskip("deepspeed")
    yield package
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stagee": 1}}, "stagee: Extra inputs are not permitted$"),
        ({"zero_optimization": {"stage": 7}}, "stage: Input should be 0, 1, 2"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, r"offload_optimizer\.device: Input should"),
        ({"zero_optimization": 2}, "must be a mapping"),
        (
            {"gradient_accumulation_steps": 4},
            r"is set by the trainer; leave it out, and give trainer\.gradient_accumulation_steps=",
        ),
        ({"optimizer": {"type": "Adam"}}, r"leave it out, and give trainer\.learning_rate="),
    ],
)
def test_a_wrong_value_is_refused(deepspeed, config, message):
    with pytest.raises(InputError, match=message):
        refuse_wrong_config(deepspeed, config, DEFAULTS)


@pytest.mark.parametrize("config", [
    {"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1e6}},
    {"bf16": {"enabled": True}}, {"wall_clock_breakdown": True}, {"gradient_clipping": 0.5}, {},
    {"activation_checkpointing": {"profile": False}}, {"flops_profiler": {"enabled": False}},
    {"aio": {"block_size": 1048576}},
])  # fmt: skip
def test_values_of_deepspeed_are_accepted_and_left_unchanged(deepspeed, config):
    given = copy.deepcopy(config)
    refuse_wrong_config(deepspeed, given, DEFAULTS)
    assert given == config
