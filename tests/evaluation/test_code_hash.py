"""Evaluations across versions of the package: which sources are hashed, and the errors when they changed."""

import json
import shutil
from pathlib import Path

import pytest
from small_evaluations import PROMPTS, evaluate_to, make_evaluation, make_setup

import ctcdraft
from ctcdraft.errors import InputError
from ctcdraft.evaluation import environment
from ctcdraft.evaluation import evaluation as evaluation_module
from ctcdraft.evaluation.benchmarks import Benchmark
from ctcdraft.evaluation.environment import HASHED_SOURCES, code_hash
from ctcdraft.evaluation.replay.tree_size import load_or_choose_sizes

NO_QUESTIONS = Benchmark("made_up", (), "hash")
PACKAGE = Path(ctcdraft.__file__).parent
COUNTED = (
    *("decoding/loop.py", "drafters/trees/ctc.py", "ctc/prefix_search.py", "nn/heads.py", "corpus/chat_template.py"),
    # How weights are loaded: dequantised, changed by an adapter.
    *("models/base_model.py", "models/checkpoints.py", "models/loading.py"),
    # Forward passes: of fixed shapes, of the first layers alone.
    *("models/fused_layers.py", "models/aux_layers.py"),
    *("fused.py", "decoding/triton_step.py", "decoding/static_step.py", "nn/triton_block.py", "ctc/triton_prefix.py"),
)
ELSEWHERE = (
    *("report/markdown.py", "report/html/files.py", "evaluation/metrics.py", "corpus/sources.py"),
    *("training/trainer.py", "model_card.py"),
)


@pytest.fixture
def package(tmp_path):
    """A copy of the sources that tests may change."""
    return shutil.copytree(PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))


def change(file):
    assert file.is_file()
    file.write_text(file.read_text() + "# changed\n")


def test_all_hashed_sources_exist():
    for part in HASHED_SOURCES:
        assert (PACKAGE / part).is_file() or list((PACKAGE / part).rglob("*.py")), part


@pytest.mark.parametrize("name", COUNTED)
def test_a_change_in_a_hashed_source_changes_the_hash(name, package):
    assert code_hash(package) == code_hash()
    before = (package / name).read_text()
    change(package / name)
    assert code_hash(package) != code_hash()
    (package / name).write_text(before)
    assert code_hash(package) == code_hash()


def test_a_new_file_in_a_hashed_folder_changes_the_hash(package):
    (package / "drafters" / "another.py").write_text("")
    assert code_hash(package) != code_hash()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_change_elsewhere_does_not_change_the_hash(name, package):
    change(package / name)
    assert code_hash(package) == code_hash()


class Version:
    """Sets the commit and the hash of the sources that an evaluation sees."""

    def __init__(self, monkeypatch):
        self.circumstances, self.hash = environment.environment(), "4b86"
        self.at("0123456789", dirty=False)
        monkeypatch.setattr(evaluation_module, "environment", lambda: self.circumstances)
        monkeypatch.setattr(evaluation_module, "code_hash", lambda: self.hash)

    def at(self, commit, dirty):
        self.circumstances = self.circumstances | {"git": commit and {"commit": commit, "dirty": dirty}}


@pytest.fixture
def installed(monkeypatch):
    return Version(monkeypatch)


def run(path, count, **changes):
    here = make_evaluation(make_setup(max_new_tokens=4, **changes), PROMPTS[:count])
    return evaluate_to(path, here, warm_up_tokens=1, profiled=0)


def test_an_evaluation_resumes_at_another_commit_with_the_same_hash(installed, tmp_path):
    run(tmp_path, 1)
    installed.at("fedcba9876", dirty=True)
    assert run(tmp_path, 2)["environment"]["questions"] == {"asked": 2, "finished": 2, "reused": 1}
    installed.at(None, None)
    assert run(tmp_path, 3)["environment"]["questions"]["reused"] == 2
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["commit"], settings["dirty"]) == ("0123456789", False)  # of the version that started it


@pytest.mark.parametrize(
    ("commit", "dirty", "version"),
    [
        ("0123456789", False, " at commit 0123456 ("),
        ("0123456789", True, " at commit 0123456 with uncommitted changes ("),
        (None, None, " ("),
    ],
)
def test_another_hash_is_refused_with_the_stored_version_and_the_ways_out(commit, dirty, version, installed, tmp_path):
    installed.at(commit, dirty)
    run(tmp_path, 1)
    installed.hash = "306c"
    with pytest.raises(InputError) as caught:
        run(tmp_path, 2)
    assert str(caught.value) == (
        f"{tmp_path} holds an evaluation in which the code was ctcdraft {ctcdraft.__version__}{version}now different "
        "in files that tokens or times depend on); resume with the version that started it, choose another out=, or "
        "add overwrite=true to replace it"
    )


def test_another_hash_and_other_settings_are_reported_together(installed, tmp_path):
    run(tmp_path, 1)
    installed.hash = "306c"
    ways = "repeat those settings and resume with the version that started it, choose another out="
    with pytest.raises(InputError, match=rf"in which decoding\.nodes was 8 \(now 4\), and the code was .*; {ways}"):
        run(tmp_path, 2, nodes=4)


def test_an_evaluation_without_a_hash_is_refused(installed, tmp_path):
    run(tmp_path, 1)
    settings = json.loads((tmp_path / "settings.json").read_text())
    for key in ("version", "dirty", "code"):
        del settings[key]
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"the code was ctcdraft at commit 0123456 .*; resume with the version that"):
        run(tmp_path, 1)


def test_tree_sizes_are_reused_at_another_commit_and_refused_for_another_hash(installed):
    def of():
        return make_evaluation(make_setup()).settings(0)

    class Chosen:
        """The search whose result is stored."""

        nodes = (4,)

    kept = {"of": {**of(), "sizing": {}}, "prompts": [], "sizes": {}}
    installed.at("fedcba9876", dirty=True)
    assert load_or_choose_sizes(kept, None, Chosen(), NO_QUESTIONS, of()) == kept
    installed.hash = "306c"
    with pytest.raises(
        InputError, match=r"were chosen where the code was .* at commit 0123456 .*; resume with the vers"
    ):
        load_or_choose_sizes(kept, None, Chosen(), NO_QUESTIONS, of())
