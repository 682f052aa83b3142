"""What is not served fails at start-up, with one sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; run `make test-vllm`")

import vllm
from engine_runs import SPECULATIVE, TINY, edit_json
from vllm.engine.arg_utils import EngineArgs

from ctcdraft.errors import InputError
from ctcdraft.serving import vllm_runner
from ctcdraft.serving.configuration import read_options, refuse_unserved

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]


def engine_config(own, **settings):
    given = {} if own is None else {"ctcdraft": own}
    arguments = {"model": str(TINY / "base"), "dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    arguments |= {"speculative_config": SPECULATIVE, "additional_config": given, **settings}
    return EngineArgs(**arguments).create_engine_config()


@pytest.fixture
def head(tmp_path):
    return Path(shutil.copytree(TINY / "head", tmp_path / "head"))


def edit(head, change):
    edit_json(head / "config.json", change)


def refusal(own, **settings):
    with pytest.raises(InputError) as error:
        engine_config(own, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_shipped_head_is_served(head):
    assert engine_config({"head": str(head)}).speculative_config.num_speculative_tokens == 5


def test_the_folder_of_a_head_that_names_its_base_is_served(head):
    named = {"verifier": {"name_or_path": str(TINY / "base")}, "proposal_methods": [{"speculative_tokens": 4}]}
    edit(head, lambda values: values.update(speculators_model_type="ctc", speculators_config=named))
    config = EngineArgs(model=str(head), dtype="float32", max_model_len=256).create_engine_config()
    assert (config.model_config.model, config.model_config.tokenizer) == (str(TINY / "base"),) * 2
    assert config.speculative_config.model == vllm_runner.PROPOSER
    assert config.speculative_config.num_speculative_tokens == 4
    assert read_options(config).head == str(head)
    edit(head, lambda values: values.update(speculators_config={"verifier": {}}))
    with pytest.raises(InputError, match=r"no speculators_config with verifier.name_or_path"):
        EngineArgs(model=str(head), max_model_len=256).create_engine_config()


def test_options_are_checked(head):
    assert "the folder of the head is missing" in refusal(None)
    assert "has no depth" in refusal({"head": str(head), "depth": 3})
    assert "must be one of adaptive, full, got long" in refusal({"head": str(head), "length": "long"})


def test_a_folder_that_holds_no_head(tmp_path):
    assert f"there is no head at {tmp_path}" in refusal({"head": str(tmp_path)})


def test_a_head_of_another_base(head):
    edit(head, lambda values: values["fingerprint"].update(weights="0123456789abcdef", base="other"))
    sentence = refusal({"head": str(head)})
    assert "was trained for base other" in sentence
    assert "differ in weights" in sentence


def test_a_truncated_file_of_weights(head):
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "is missing or damaged" in refusal({"head": str(head)})


def test_a_config_that_names_other_callables(head, tmp_path):
    hostile = {"_target_": "os.system", "command": f"touch {tmp_path}/ran"}
    edit(head, lambda values: values["drafter"].update(body=hostile))
    assert "os.system" in refusal({"head": str(head)})
    assert not (tmp_path / "ran").exists()


def test_a_drafter_that_computes_step_by_step(head):
    edit(head, lambda values: values["drafter"].update(_target_="ctcdraft.drafters.eagle.Eagle"))
    assert "ctcdraft.drafters.eagle.Eagle is not served" in refusal({"head": str(head)})


def test_an_unknown_version(head, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    assert "vLLM 0.99.1 is not known" in refusal({"head": str(head)})


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("parallel_config", "tensor_parallel_size", 2, "tensor_parallel_size=2"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size=2"),
        ("cache_config", "cache_dtype", "fp8", "kv_cache_dtype=fp8"),
        ("parallel_config", "prefill_context_parallel_size", 2, "context parallelism"),
        ("cache_config", "cache_dtype", "bfloat16", "kv_cache_dtype=bfloat16 is not the dtype of the model"),
        ("cache_config", "kv_offloading_size", 1.0, "offloaded"),
        ("model_config", "attention_chunk_size", 64, "layers without attention to the whole text"),
        ("lora_config", None, object(), "LoRA"),
    ],
)
def test_configurations_of_vllm(head, part, name, value, words):
    config = engine_config({"head": str(head)})
    setattr(*((config, part) if name is None else (getattr(config, part), name)), value)
    with pytest.raises(InputError, match=words):
        refuse_unserved(config)


def test_sliding_windows(head):
    config = engine_config({"head": str(head)})
    config.model_config.hf_text_config.sliding_window = 64
    with pytest.raises(InputError, match="sliding window"):
        refuse_unserved(config)


def test_a_server_that_cannot_start_prints_the_sentence_alone(head):
    edit(head, lambda values: values["fingerprint"].update(weights="0123456789abcdef", base="other"))
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY / "base"), "--dtype", "float32",
        "--max-model-len", "256", "--speculative-config", json.dumps(SPECULATIVE),
        "--additional-config", json.dumps({"ctcdraft": {"head": str(head)}}),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"})
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ctcdraft: ")
    assert "was trained for base other" in done.stderr.splitlines()[-1]
