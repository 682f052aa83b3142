"""Wrong values under engine.deepspeed are refused in one sentence when the engine is built, before the first step."""

from __future__ import annotations

import copy
import os
from typing import ClassVar

import pytest

from ctcdraft.errors import InputError
from ctcdraft.training.deepspeed import refuse_unknown_keys, refuse_wrong_config

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
        ({"zero_optimization": {"stage": 3}}, r"stage must be 0, 1 or 2, got 3, .*; base\.zero3=true shards"),
        ({"bf16": {"enabled": True}}, r"deepspeed\.bf16\.enabled must be false; trainer\.autocast=true computes"),
        ({"zero_optimization": {"stage": "3"}}, r"stage must be 0, 1 or 2, got 3"),
        ({"bfloat16": {"enabled": True}}, r"deepspeed\.bf16\.enabled must be false"),
        ({"bf16": True}, "^DeepSpeed refuses engine.deepspeed: "),
        ({"fp16": {"enabled": True}}, r"deepspeed\.fp16\.enabled must be false; trainer\.autocast=true computes"),
    ],
)
def test_a_wrong_value_is_refused(deepspeed, config, message):
    with pytest.raises(InputError, match=message):
        refuse_wrong_config(deepspeed, config, DEFAULTS)


@pytest.mark.parametrize("config", [
    {"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1e6}},
    {"bf16": {"enabled": False}}, {"wall_clock_breakdown": True}, {"gradient_clipping": 0.5}, {},
    {"activation_checkpointing": {"profile": False}}, {"flops_profiler": {"enabled": False}},
    {"aio": {"block_size": 1048576}}, {"zero_optimization": True},
])  # fmt: skip
def test_values_of_deepspeed_are_accepted_and_left_unchanged(deepspeed, config):
    given = copy.deepcopy(config)
    refuse_wrong_config(deepspeed, given, DEFAULTS)
    assert given == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_cliping": 0.5}, r"deepspeed\.gradient_cliping is no key .*; did you mean gradient_clipping\?$"),
        ({"zero_optimisation": {"stage": 1}}, r"zero_optimisation .*; did you mean zero_optimization\?$"),
        ({"wall_clock_breakdwon": True}, r"did you mean wall_clock_breakdown\?$"),
        ({"activation_checkpointing": {"profil": True}}, r"checkpointing\.profil .* did you mean profile\?$"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, r"data_types\.grad_acum_dtype .* mean grad_accum_dtype\?$"),
        ({"zzqx": 1}, "zzqx is no key that DeepSpeed reads; leave it out$"),
    ],
)
def test_a_misspelt_key_that_deepspeed_itself_would_ignore_is_refused(deepspeed, config, message):
    deepspeed.DeepSpeedConfig(DEFAULTS | copy.deepcopy(config))  # no error: this is why the key is looked up
    with pytest.raises(InputError, match=message):
        refuse_wrong_config(deepspeed, config, DEFAULTS)


def test_no_key_that_deepspeed_asks_for_is_refused(deepspeed):
    class Recorder(dict):
        asked: ClassVar[set[str]] = set()

        def __contains__(self, key):
            self.asked.add(key)
            return super().__contains__(key)

        def get(self, key, default=None):
            self.asked.add(key)
            return super().get(key, default)

        def keys(self):
            return self

    deepspeed.DeepSpeedConfig(Recorder(DEFAULTS))
    assert len(Recorder.asked) > 40
    refuse_unknown_keys(deepspeed, dict.fromkeys(Recorder.asked))
    sections = {
        "pipeline": {"stages": "auto", "activation_checkpoint_interval": 0},
        "aio": {"queue_depth": 8, "single_submit": False},
        "flops_profiler": {"profile_step": 1, "module_depth": -1, "top_modules": 1},
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
        "data_efficiency": {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"my_own_metric": {}}}}},
        "bf16": {"enabled": "auto"}, "tensorboard": {"job_name": "a", "output_path": "b"},
    }  # fmt: skip
    refuse_unknown_keys(deepspeed, sections)
