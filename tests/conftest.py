"""One thread for every test: two workers share two cores, and a fork does not survive a pool of threads."""

import os

import pytest

# Before anything imports torch: libgomp reads them once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"

import torch

# Before anything imports triton, which decides then whether it interprets its kernels.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of a module's own in which the entry points can be called: entry_parts.small_world."""
    from entry_parts import make_workspace

    return make_workspace(tmp_path_factory.mktemp("world"))
