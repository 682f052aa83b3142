"""Permission bits of written files: those of the umask, for tensors too, so that colleagues can read a run."""

from __future__ import annotations

import os
import stat

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import random_base
from training_parts import ctc_head, make_trainer

from ctcdraft.hub import PublishedHead
from ctcdraft.io import atomic_write, write_text
from ctcdraft.training.loggers import JsonlLogger
from ctcdraft.training.run_directory import RunDirectory


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=["022", "002", "077"])
def mode(request):
    """Return the mode of a new file, under each of several umasks."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def modes(folder):
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*") if file.is_file()}


def test_a_new_file_has_the_mode_of_the_umask(tmp_path, mode):
    write_text(tmp_path / "text", "text")
    atomic_write(tmp_path / "tensors", lambda draft: save_file({"a": torch.ones(2)}, draft))
    assert modes(tmp_path) == {"text": mode, "tensors": mode}


def test_every_file_of_a_run_has_the_mode_of_the_umask(tmp_path, mode):
    base = random_base(context=64)
    run = RunDirectory(tmp_path)
    run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    trainer = make_trainer(run, base, steps=5)
    trainer.fit([JsonlLogger(run.metrics, 0)])
    assert {"drafter.safetensors", "resume-000000005.pt", "config.yaml", "metrics.jsonl"} <= set(modes(tmp_path))
    assert set(modes(tmp_path).values()) == {mode}


def test_a_published_head_has_the_mode_of_the_umask(tmp_path, mode):
    base = random_base(context=64)
    PublishedHead(ctc_head(base), base, {"nodes": 4}, "")._save_pretrained(tmp_path)
    assert len(modes(tmp_path)) == 3
    assert set(modes(tmp_path).values()) == {mode}
