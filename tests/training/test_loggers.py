"""Optional loggers: their files can be read back, and a missing package is refused in one sentence."""

from __future__ import annotations

import errno
import json
import sys

import pytest
from entry_parts import expect_error, train_args

from ctcdraft.errors import InputError
from ctcdraft.training.loggers import JsonlLogger, TensorBoardLogger, WandbLogger, refuse_absent


@pytest.mark.parametrize(
    ("package", "requirement"), [("tensorboard", r"'ctcdraft\[tensorboard\]'"), ("wandb", "wandb")]
)
def test_a_missing_package_is_refused_with_what_to_install(monkeypatch, package, requirement):
    monkeypatch.setitem(sys.modules, package, None)
    refuse_absent([WandbLogger if package == "tensorboard" else TensorBoardLogger])
    with pytest.raises(InputError, match=f"logger={package} needs {package}.*pip install {requirement}$"):
        refuse_absent([TensorBoardLogger, WandbLogger])


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_before_the_corpus(tmp_path, monkeypatch, capsys, package):
    """Even before the base model is loaded, which does not exist here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    arguments = train_args(f"logger={package}", "run=unlogged", "base.path=nowhere", "prepared=nowhere")
    assert "pip install" in expect_error(monkeypatch, capsys, "train.py", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_has_every_metric(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, "run", {"seed": 0})
    logger.log(1, {"loss": 2.5, "gradient_norm": None})
    logger.log(2, {"loss": 1.5, "tau": 1.25})
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
    assert [event.value for event in events.Scalars("tau")] == [1.25]
    assert "gradient_norm" not in events.Tags()["scalars"]


def test_a_full_disk_ends_the_events_and_not_the_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path, "run", {})
    logger.log(1, {"loss": 2.5})

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logger._writer, "add_scalar", refuse)
    monkeypatch.setattr(logger._writer, "close", refuse)
    for step in (2, 3):
        logger.log(step, {"loss": 1.5})
    logger.close()
    printed = capsys.readouterr().out
    assert printed.count("TensorBoard events end here") == 1
    assert printed.startswith("step 2: ")


def test_a_resumed_run_replaces_steps_after_its_checkpoint(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, loss in (((1, 2, 3, 4), 2.0), ((3, 4, 5), 1.0)):  # killed after step 4, its last checkpoint is of step 2
        logger = TensorBoardLogger(tmp_path, "run", {})
        for step in steps:
            logger.log(step, {"loss": loss})
        logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    values = [(one.step, one.value) for one in events.Scalars("loss")]
    assert values == [(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0), (5, 1.0)]


def test_a_resumed_run_keeps_lines_by_their_step(tmp_path):
    """Step 2 was lost to a full disk; steps 5 and half of 6 are past the checkpoint of step 4."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 3, 4, 5)]
    path.write_text("\n".join([*lines, '{"step": 6, "lo']))
    JsonlLogger(path, 4).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3, 4]
