"""What is wrong under engine.deepspeed is one sentence when the engine is built, and none of it waits for a step."""

from __future__ import annotations

import copy
import os

import pytest

from ctcdraft.errors import InputError
from ctcdraft.training.deepspeed import AccessTrackingDict, refuse_wrong_config

DECIDED = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def deepspeed():
    """The package alone: nothing is joined, and the variables it wants are gone again."""
    before = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = "cpu"
    package = pytest.importorskip("deepspeed")
    yield package
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation is nothing.* did you mean zero_optimization"),
        ({"xyzzy": 1}, r"engine\.deepspeed\.xyzzy is nothing that DeepSpeed looks at; leave it out"),
        ({"zero_optimization": {"stagee": 1}}, "stagee: Extra inputs are not permitted$"),
        ({"zero_optimization": {"stage": 7}}, "stage: Input should be 0, 1, 2"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, r"offload_optimizer\.device: Input should"),
        ({"zero_optimization": 2}, "must be a mapping"),
        ({"gradient_accumulation_steps": 4}, r"decides itself; leave it out, and give trainer\.accumulate="),
        ({"optimizer": {"type": "Adam"}}, r"leave it out, and give trainer\.learning_rate="),
    ],
)
def test_what_is_wrong_is_said(deepspeed, settings, said):
    with pytest.raises(InputError, match=said):
        refuse_wrong_config(deepspeed, settings, DECIDED)


@pytest.mark.parametrize("settings", [
    {"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1e6}},
    {"bf16": {"enabled": True}}, {"wall_clock_breakdown": True}, {"gradient_clipping": 0.5}, {},
    {"activation_checkpointing": {"profile": False}}, {"flops_profiler": {"enabled": False}},
    {"aio": {"block_size": 1048576}},
])  # fmt: skip
def test_what_deepspeed_reads_is_let_through(deepspeed, settings):
    given = copy.deepcopy(settings)
    refuse_wrong_config(deepspeed, given, DECIDED)
    assert given == settings  # verbatim: DeepSpeed's reader fills in its own copy


def test_whoever_asks_is_heard():
    heard = AccessTrackingDict({"a": 1, "b": 2, "c": 3})
    assert ("a" in heard, "a" in heard.keys(), heard.get("b"), heard["c"]) == (True, True, 2, 3)  # noqa: SIM118
    assert heard.accessed == {"a", "b", "c"}
    assert dict(heard) == {"a": 1, "b": 2, "c": 3}
