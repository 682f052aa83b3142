"""A base model sharded over two processes trains the same head; what one process cannot do is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from entry_parts import expect_error, train_args
from test_two_processes import PATHS, free_port
from tiny_models import random_lm

from ctcdraft.errors import InputError
from ctcdraft.models.deepspeed import unsharded_embeddings
from ctcdraft.models.loading import load_base

JOB = Path(__file__).with_name("sharded_job.py")


@pytest.mark.slow
@pytest.mark.deepspeed
def test_two_processes_with_half_the_base_each_train_the_same_head(folder):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         str(JOB), folder],
        env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("values") == 2


@pytest.mark.deepspeed
def test_an_embedding_that_is_more_than_a_look_up_is_refused():
    """Gemma's embedding scales by the root of the width, which a copy of its weights would not."""
    with pytest.raises(InputError, match=r"GemmaTextScaledWordEmbedding scales them; leave out base\.zero3"):
        unsharded_embeddings(random_lm("gemma"))
    embedding, head = unsharded_embeddings(random_lm("llama"))
    assert embedding.weight.shape == head.weight.shape


def test_one_process_alone_is_refused(folder):
    with pytest.raises(InputError, match=r"base\.zero3=true needs several processes of torchrun"):
        load_base(folder, "float32", "cpu", zero3=True)
    with pytest.raises(InputError, match="supports no device_map, quantization, static_shapes or adapter"):
        load_base(folder, "float32", "cpu", zero3=True, static_shapes=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "trainer.probe_prompts=0"),
        (["trainer.probe_prompts=0", "hidden_states=offline"], "hidden_states=online"),
        (["trainer.probe_prompts=0"], "there is no corpus in"),
        (["trainer.probe_prompts=0", "adapt=lora"], "leave out base.zero3="),
    ],
)
def test_work_of_one_process_alone_is_refused_before_loading(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in expect_error(
        monkeypatch, capsys, "train.py", *train_args("base.path=nowhere", "base.zero3=true", *arguments)
    )
