"""The notebooks are small, hold no outputs, and run from top to bottom wherever they lie."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest
from local_data import DATA_FOLDERS

from ctcdraft.config.cli import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
TRACES = DATA_FOLDERS["CTCDRAFT_DATA"] / "ctc_drafter_traces"


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_small_and_holds_nothing_that_was_run(file):
    text = file.read_text()
    notebook = json.loads(text)
    assert len(text) < 20_000
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert notebook["cells"][0]["cell_type"] == "markdown"
    assert notebook["cells"][0]["source"][0].startswith("# ")
    for cell in code_cells(notebook):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        compile("".join(cell["source"]), file.name, "exec")


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_what_a_notebook_takes_from_this_package_is_there(file):
    """Run they are by `make test-slow` alone; a name that has moved shows at once."""
    cells = ["".join(cell["source"]) for cell in code_cells(json.loads(file.read_text()))]
    looks = [node for cell in cells for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in looks if node.module.partition(".")[0] in ("ctcdraft", "studies")]
    assert ours
    for node in ours:
        there = importlib.import_module(node.module)
        for each in node.names:
            assert hasattr(there, each.name) or find_spec(f"{node.module}.{each.name}"), f"{node.module}.{each.name}"


def test_the_extra_brings_what_opens_them_and_the_tests_need_no_jupyter():
    text = (REPOSITORY / "pyproject.toml").read_text()
    extras = {name: " ".join(needs) for name, needs in tomllib.loads(text)["project"]["optional-dependencies"].items()}
    assert "jupyterlab" in extras["notebooks"]
    assert "ipykernel" in extras["notebooks"]  # the kernel that the notebooks name
    assert {"nbclient", "ipykernel"} <= set(re.findall(r"[\w-]+", extras["dev"]))
    assert "jupyter" not in extras["dev"]
    assert "notebooks" not in extras["dev"]
    readme = (REPOSITORY / "README.md").read_text()
    assert "-e '.[notebooks]'" in readme
    assert "`jupyter lab notebooks`" in readme


def test_there_is_one_for_each_thing_to_look_at():
    assert [file.name for file in NOTEBOOKS] == ["alignment_explorer.ipynb", "quickstart.ipynb", "tables.ipynb"]


def executed(name, folder, **environment):
    """All that the cells of a notebook showed, run in a kernel of its own in an empty folder; none may fail."""
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("nothing to run notebooks with; pip install -e '.[dev]' brings nbclient and ipykernel")
    copy = folder / f"{name}.ipynb"
    copy.write_bytes((REPOSITORY / "notebooks" / copy.name).read_bytes())
    known = {key: value for key, value in os.environ.items() if not key.startswith("CTCDRAFT_")}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "jupyter", "execute", "--inplace", copy.name],
        cwd=folder, env=known | {"PYTHONPATH": path} | environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    cells = code_cells(json.loads(copy.read_text()))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    return [output for cell in cells for output in cell["outputs"]]


def shown(outputs, kind="text/markdown"):
    """What was printed, and what was displayed of a kind."""
    return "".join("".join(one.get("text", one.get("data", {}).get(kind, ""))) for one in outputs)


@pytest.mark.slow
def test_quickstart_trains_a_head_that_saves_passes_and_changes_no_token(tmp_path):
    said = shown(executed("quickstart", tmp_path))
    assert "the text is autoregression's, token for token" in said
    assert "generate returns the same with the head and without it" in said
    losses = [float(line.split()[-1]) for line in said.split("\n") if line.startswith("step ")]
    assert losses[-1] < losses[0] / 2
    (tau,) = [float(line.split()[1]) for line in said.split("\n") if line.startswith("tau ")]
    assert tau > 1.2  # a head that learnt nothing has 1.0


@pytest.mark.slow
def test_alignment_explorer_shows_a_pass_and_the_whole_page(tmp_path):
    outputs = executed("alignment_explorer", tmp_path)
    said = shown(outputs)
    for text in ("wrong token:", "frame 6", "✓", "the base's own token:"):
        assert text in said
    page = shown(outputs, "text/html")
    assert page.count("<iframe srcdoc=") == 1
    assert "acceptance_by_depth" in page
    assert sum("image/svg+xml" in one.get("data", {}) for one in outputs) == 2


@pytest.mark.slow
def test_tables_say_what_results_say_and_skip_the_authors_files_with_a_sentence(tmp_path):
    said = shown(executed("tables", tmp_path))
    assert "every README holds what its CSV files hold" in said
    assert "CTCDRAFT_TRACES names no folder" in said
    assert "| mt_bench | ctc | 7B | beta | 3.56 |  |  |  |  |" in said


@pytest.mark.slow
def test_tables_hold_the_authors_files_where_they_are(tmp_path):
    if not TRACES.is_dir():
        pytest.skip(f"no recorded runs at {TRACES}; CTCDRAFT_DATA= names the folder that holds ctc_drafter_traces")
    said = shown(executed("tables", tmp_path, CTCDRAFT_TRACES=str(TRACES)))
    assert "CTCDRAFT_TRACES names no folder" not in said
    assert "| mt_bench | ctc | 7B | beta | 3.56 | 3.56 [" in said
    assert "its authors' files say the reverse" in said
