"""A compiled drafter trains to the same weights under the same names; a failing compilation is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny_models import random_base
from training_parts import block_heads, ctc_head, make_trainer

from ctcdraft.errors import InputError
from ctcdraft.planning.training import smoke_step
from ctcdraft.training.engine import compile_forward
from ctcdraft.training.run_directory import RunDirectory

STEPS = 6


@pytest.fixture(scope="module")
def base():
    return random_base(context=64)


def trained(base, path, backend, drafter=None, stop=STEPS):
    """Continue a run from its checkpoint; return the trainer and the losses."""
    run = RunDirectory(path)
    if not run.config.exists():
        run.create("drafter: {}\n", base.fingerprint(), overwrite=False)
    one = make_trainer(run, base, STEPS, drafter=drafter)
    if backend is not None:
        compile_forward(one.drafter, backend, partial(smoke_step, base, one.drafter, one.objective, one.engine))
    one.restore()
    losses = []
    while one.step < stop:
        losses.append(one.train_step()["loss"])
        one.step += 1
    one.save()
    return one, losses


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    return trained(base, tmp_path_factory.mktemp("whole"), None)


@pytest.fixture
def fresh():
    yield
    torch.compiler.reset()


def test_the_losses_equal_those_without_compiling(base, tmp_path, fresh, whole):
    """Started without and continued with compiling; one compilation serves batches of several lengths."""
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    trained(base, tmp_path, None, stop=3)
    assert_same(base, *trained(base, tmp_path, counting), *whole)
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of inductor's own imports
def test_inductor_gives_the_same_losses(base, tmp_path, fresh, whole):
    trained(base, tmp_path, "inductor", stop=3)
    assert_same(base, *trained(base, tmp_path, "inductor"), *whole)


def assert_same(base, one, rest, plain, losses):
    """Assert that a run continued at step 3 equals the plain run, and that an uncompiled drafter loads its head."""
    assert len(rest) == 3
    assert rest == pytest.approx(losses[3:], rel=1e-4)
    state = plain.drafter.trainable_state_dict()
    assert list(one.drafter.trainable_state_dict()) == list(state)
    for name, value in one.drafter.trainable_state_dict().items():
        assert torch.allclose(value, state[name], atol=1e-4), name
    head = ctc_head(base)
    one.run.load_head(head)
    assert all(
        torch.equal(value, one.drafter.trainable_state_dict()[name])
        for name, value in head.trainable_state_dict().items()
    )


@pytest.mark.slow
def test_bodies_without_attention_compile(base, tmp_path, fresh):
    for number, drafter in enumerate(block_heads(base)[3:5]):
        torch.compiler.reset()
        batch = make_trainer(None, base, 3, drafter=drafter).batches.batch(0)
        wanted = drafter(batch).states_BATD
        drafter.compile(backend="aot_eager", dynamic=True)
        assert torch.allclose(drafter(batch).states_BATD, wanted, atol=1e-5), number


def failing(graph, inputs):
    raise RuntimeError("no compiler is here\nand more")


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("nonsense", "Invalid backend"), pytest.param(failing, "no compiler is here", marks=pytest.mark.slow)],
)
def test_a_failing_compilation_is_refused_before_the_corpus(base, fresh, backend, reason):
    one = make_trainer(None, base, 3)
    with pytest.raises(InputError, match=rf"trainer\.compile=.* ParallelDrafter here \(.*{reason}.*inductor.*or null"):
        compile_forward(one.drafter, backend, partial(smoke_step, base, one.drafter, one.objective, one.engine))
