"""Files that contain code where tensors or models are expected: an InputError, and the code is not run."""

from __future__ import annotations

import ast
import builtins
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from entry_parts import REPOSITORY, expect_error
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.config.build import meta_base
from ctcdraft.config.cli import CONFIGS
from ctcdraft.corpus.decontamination import Decontamination
from ctcdraft.errors import InputError
from ctcdraft.models.loading import load_base
from ctcdraft.training.run_directory import checksum

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

open({marker!r}, "w").close()

class Config(LlamaConfig):
    model_type = "own"

class Model(LlamaForCausalLM):
    config_class = Config

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
NAMES = {
    "config": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    "model": {"AutoModelForCausalLM": "code.Model"},
    "tokenizer": {"AutoTokenizer": [None, "code.Tokenizer"]},
}


class Hostile:
    """An object whose unpickling creates a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def zipped(value, file: Path) -> None:
    torch.save({"step": value}, file)


def old(value, file: Path) -> None:
    torch.save({"step": value}, file, _use_new_zipfile_serialization=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base as transformers saves it."""
    folder = tmp_path_factory.mktemp("base")
    random_lm(context=64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("written", [zipped, old])
def test_the_hostile_files_do_run_code_without_protection(tmp_path, written):
    written(Hostile(tmp_path / "marker"), tmp_path / "file")
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "marker").exists()


def poisoned(run: Path, marker: Path, written) -> str:
    """Replace all training states of a run, with valid checksums, which an attacker could compute."""
    states = list(run.glob("resume-*.pt"))
    assert len(states) == 2
    for state in states:
        written(Hostile(marker), state)
        state.write_bytes(checksum(state.read_bytes()) + state.read_bytes())
    return str(run)


@pytest.mark.parametrize("written", [zipped, old])
def test_a_state_to_resume_from_runs_no_code(world, monkeypatch, capsys, tmp_path, written):
    monkeypatch.chdir(world)
    run = poisoned(shutil.copytree("run", tmp_path / "run"), tmp_path / "marker", written)
    assert "has no intact state" in expect_error(monkeypatch, capsys, "train.py", f"resume={run}", "trainer.steps=6")
    assert not (tmp_path / "marker").exists()


@pytest.mark.slow
@pytest.mark.deepspeed
def test_a_state_to_resume_from_runs_no_code_with_deepspeed(world, tmp_path):
    pytest.importorskip("deepspeed")
    run = poisoned(shutil.copytree(world / "run", tmp_path / "run"), tmp_path / "marker", zipped)
    config = OmegaConf.load(Path(run) / "config.yaml")
    config.engine = OmegaConf.load(CONFIGS / "engine" / "deepspeed.yaml")
    OmegaConf.save(config, Path(run) / "config.yaml")
    command = [sys.executable, str(REPOSITORY / "train.py"), f"resume={run}", "trainer.steps=6"]
    process = subprocess.run(command, cwd=world, capture_output=True, text=True, timeout=240)
    assert process.returncode == 1, process.stderr[-2000:]
    assert "has no intact state" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "marker").exists()


@pytest.mark.deepspeed
def test_what_deepspeed_loads_runs_no_code(tmp_path):
    """Its loaders pass weights_only=False; the switch set by our import makes torch override that."""
    pytest.importorskip("deepspeed")
    zipped(Hostile(tmp_path / "marker"), tmp_path / "mp_rank_00_model_states.pt")
    script = (
        "import sys\n"
        "from ctcdraft.models.deepspeed import import_deepspeed\n"
        "import_deepspeed('cpu')\n"
        "from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine\n"
        "TorchCheckpointEngine().load(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "mp_rank_00_model_states.pt")]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert not (tmp_path / "marker").exists()
    assert "UnpicklingError" in process.stderr


@pytest.mark.parametrize("written", [zipped, old])
def test_weights_of_a_base_run_no_code(folder, tmp_path, written):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    written(Hostile(tmp_path / "marker"), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"holds weights pickled with other objects.*give base\.path=") as raised:
        load_base(str(tmp_path), "float32", "cpu")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(("key", "sentence"), [("adapter", "holds weights pickled with"), ("adapted", "there is no")])
@pytest.mark.parametrize("written", [zipped, old])
def test_weights_of_an_adapter_run_no_code(folder, tmp_path, written, key, sentence):
    peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(str(tmp_path))
    written(Hostile(tmp_path / "marker"), tmp_path / "adapter_model.bin")
    with pytest.raises(InputError, match=sentence) as raised:
        load_base(str(folder), "float32", "cpu", **{key: str(tmp_path)})
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("key", ["adapter", "adapted"])
def test_an_adapter_imports_no_module(folder, tmp_path, key):
    """peft imports megatron_core, a name in adapter_config.json, for every layer that it replaces."""
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], megatron_config={"a": 1}, megatron_core="this")
    settings.save_pretrained(str(tmp_path))
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match="has a megatron_config, for which peft imports code"):
        load_base(str(folder), "float32", "cpu", **{key: str(tmp_path)})


def test_hashes_of_a_benchmark_run_no_code(tmp_path):
    np.savez(tmp_path / "bad.npz", command=13, sequences=np.array([Hostile(tmp_path / "marker")], dtype=object))
    with pytest.raises(InputError, match="cannot read the benchmark mine"):
        Decontamination(13, {"mine": str(tmp_path / "bad.npz")}).benchmark_hashes()
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", NAMES)
def test_a_base_with_code_is_refused_without_a_prompt(folder, tmp_path, monkeypatch, kind):
    """transformers would ask at the terminal whether to run the code."""
    copy = shutil.copytree(folder, tmp_path / "base")
    file = copy / ("tokenizer_config.json" if kind == "tokenizer" else "config.json")
    values = json.loads(file.read_text()) | {"auto_map": NAMES[kind]}
    values |= {"tokenizer_class": "Tokenizer"} if kind == "tokenizer" else {"model_type": "own"}
    file.write_text(json.dumps(values))
    (copy / "code.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    monkeypatch.setattr(builtins, "input", lambda *asked: "y")
    config = OmegaConf.merge(OmegaConf.load(CONFIGS / "base" / "local.yaml"), {
        "path": str(copy), "name": "mine", "dtype": "float32", "device": "cpu"
    })  # fmt: skip
    with pytest.raises(InputError, match="cannot load the base"):
        load_base(str(copy), "float32", "cpu")
    for weights in copy.glob("*.safetensors"):  # now only a dry run is possible
        weights.unlink()
    if kind == "tokenizer":
        assert meta_base(config).base.tokenizer is None
    else:
        with pytest.raises(Exception, match="cannot read the config of the base"):
            meta_base(config)
    assert not (tmp_path / "marker").exists()


def test_no_module_unpickles():
    """torch.load always has weights_only=True, numpy never allow_pickle, and no other unpickler is imported."""
    unpicklers = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    files = [*(REPOSITORY / "ctcdraft").rglob("*.py"), *REPOSITORY.glob("*.py"), *(REPOSITORY / "data").glob("*.py")]
    loads = 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not unpicklers & {one.name.split(".")[0] for one in node.names}, file
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in unpicklers:
                assert [one.name for one in node.names] == ["UnpicklingError"], file
            if isinstance(node, ast.Call):
                called, given = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
                loads += called == "torch.load"
                assert called != "torch.load" or given.get("weights_only") == "True", file
                assert "allow_pickle" not in given, file
                assert not called.endswith(("load_checkpoint", "load_universal_checkpoint")), file
                assert given.get("trust_remote_code", "False") == "False", file
    assert loads == 2  # the state of a run, and the names in a pickled checkpoint
    assert os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD") is None
