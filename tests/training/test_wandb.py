"""Weights & Biases: a resumed run keeps its identity, and the jobs of a sweep have names and a group."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from entry_parts import expect_error, run_script, train_args

from ctcdraft.errors import InputError
from ctcdraft.training.loggers import WandbLogger, refuse_missing_key

CONFIG = {"drafter": {"name": "ctc"}, "objective": {"_target_": "ctcdraft.objectives.ctc.CTC"}, "base": {"name": "b"}}


@pytest.fixture
def init_calls(monkeypatch):
    """Keyword arguments of every call of wandb.init; `logged` holds the steps of that run."""
    calls = []

    def init(**keywords):
        logged = []
        calls.append(keywords | {"logged": logged})
        return SimpleNamespace(log=lambda metrics, step: logged.append(step), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=SimpleNamespace(name="wandb")))
    for name in ("WANDB_MODE", "WANDB_NAME", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_a_resumed_run_is_the_same_run(world, monkeypatch, init_calls):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *train_args("run=curves", "logger=wandb"))
    run_script(monkeypatch, "train.py", "resume=curves", "trainer.steps=6")
    first, second = init_calls
    assert (first["logged"], second["logged"]) == ([1, 2, 3, 4], [5, 6])
    assert first["id"] == second["id"]
    assert first["resume"] == second["resume"] == "allow"
    assert (first["name"], first["group"]) == (second["name"], second["group"]) == ("curves", None)
    assert first["tags"] == ["ctc", "CTC", "base"]
    assert (first["config"]["trainer"]["steps"], second["config"]["trainer"]["steps"]) == (4, 6)
    assert first["mode"] == "offline"
    assert first["dir"] == "curves"
    run_script(monkeypatch, "train.py", *train_args("run=curves", "logger=wandb", "overwrite=true"))
    assert init_calls[2]["id"] != first["id"], "an overwritten run is a new run"


def test_the_jobs_of_a_sweep_have_names_and_a_group(world, monkeypatch, init_calls):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", "-m", *train_args("run=curves_of", "logger=wandb"), "seed=0,1", "data_seed=0")
    run_script(monkeypatch, "train.py", "resume=curves_of/1", "trainer.steps=5")
    assert [call["name"] for call in init_calls] == ["curves_of/0 seed=0", "curves_of/1 seed=1", "curves_of/1 seed=1"]
    assert {call["group"] for call in init_calls} == {"curves_of"}
    assert init_calls[0]["id"] != init_calls[1]["id"] == init_calls[2]["id"]


def test_modes_names_and_groups_of_the_environment(tmp_path, monkeypatch, init_calls):
    """WANDB_MODE may change on resume; name and group, which a search sets for its trials, do not."""
    monkeypatch.setenv("WANDB_NAME", "search/3 drafter.frames=6")
    monkeypatch.setenv("WANDB_RUN_GROUP", "search")
    monkeypatch.setenv("WANDB_MODE", "online")
    WandbLogger(tmp_path, "p", None, "3", CONFIG).close()
    monkeypatch.delenv("WANDB_NAME")
    monkeypatch.delenv("WANDB_RUN_GROUP")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    WandbLogger(tmp_path, "p", None, "3", CONFIG).close()
    WandbLogger(tmp_path, "p", "offline", "3", CONFIG).close()
    assert [call["mode"] for call in init_calls] == ["online", "disabled", "offline"]
    assert {(call["name"], call["group"]) for call in init_calls} == {("search/3 drafter.frames=6", "search")}
    assert json.loads((tmp_path / "wandb.json").read_text())["id"] == init_calls[0]["id"]


def test_a_file_gives_an_identity_and_nothing_else(tmp_path, init_calls):
    """wandb.init(settings=...) names the server that the user's key is sent to."""
    (tmp_path / "wandb.json").write_text(
        json.dumps({"id": "1", "name": "n", "group": None, "settings": {"base_url": "http://far.example"}})
    )
    WandbLogger(tmp_path, "p", None, "3", CONFIG).close()
    assert "settings" not in init_calls[0]
    assert (init_calls[0]["id"], init_calls[0]["name"]) == ("1", "n")
    (tmp_path / "wandb.json").write_text("[]")
    WandbLogger(tmp_path, "p", None, "3", CONFIG).close()
    assert init_calls[1]["name"] == "3"


def test_being_online_without_a_key_is_refused_before_the_base_is_loaded(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    arguments = train_args("run=x", "base.path=nowhere", "prepared=nowhere", "logger=wandb", "logger.wandb.mode=online")
    message = expect_error(monkeypatch, capsys, "train.py", *arguments)
    assert "logger.wandb.mode=online needs an API key; run `wandb login` or set WANDB_API_KEY, or give" in message
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret")
    refuse_missing_key("online")
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    refuse_missing_key("online")


def test_an_error_of_wandb_is_one_sentence(tmp_path):
    pytest.importorskip("wandb")
    with pytest.raises(InputError, match=r"^W&B does not start: .*; give logger=jsonl to do without$"):
        WandbLogger(tmp_path, "project", "no mode", "name", CONFIG)


def test_wandb_accepts_a_resumed_run(tmp_path, monkeypatch):
    """Offline, with the same id at the second start."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    runs = []
    for first in (1, 3):
        logger = WandbLogger(tmp_path, "project", None, "sweep/1 seed=1", CONFIG, group="sweep")
        runs.append((logger._run.id, logger._run.name, logger._run.group, logger._run.tags))
        for step in (first, first + 1):
            logger.log(step, {"loss": 1.0})
        logger.close()
    assert runs[0] == runs[1]
    assert runs[0][1:] == ("sweep/1 seed=1", "sweep", ("ctc", "CTC", "b"))
    folders = [folder.name for folder in (tmp_path / "wandb").glob("offline-run-*")]
    # offline-run-TIME-ID, with -1 appended where both starts fall into one second
    assert len(folders) == 2
    assert {folder.split("-")[3] for folder in folders} == {runs[0][0]}
