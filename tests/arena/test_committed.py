"""Every comparison in results/ is what its own JSON files say: verdict, tables and figures come out to the byte."""

import json
import re
import shutil

import pytest

from ctcdraft.config.cli import REPOSITORY
from studies.comparison.run import print_anew

RESULTS = REPOSITORY / "results"
COMPARISONS = sorted(file.parent for file in RESULTS.rglob("rules.json"))
PRINTED = ("verdict.json", "page.md", "page.csv")
assert COMPARISONS, "results/ holds comparisons; without them nothing below would be tested"


@pytest.mark.parametrize("folder", COMPARISONS, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_it_is_printed_again_from_what_is_committed(folder, tmp_path):
    again = tmp_path / folder.name
    shutil.copytree(folder, again)
    printed = [file for file in again.iterdir() if file.name in PRINTED or file.suffix == ".svg"]
    figures = set(re.findall(r"!\[\]\((.*)\)", (folder / "page.md").read_text()))
    assert {*PRINTED, *figures} == {file.name for file in printed}
    evaluated = json.loads((folder / "evaluations.json").read_text()).values()
    assert "nodes.svg" in figures or all(one["temperature"] > 0 for one in evaluated), "greedy tau is drawn by nodes"
    for file in printed:
        file.unlink()
    print_anew([str(again)])
    assert {file.name for file in again.glob("*.svg")} == figures
    for file in printed:
        assert file.read_bytes() == (folder / file.name).read_bytes(), file.name


@pytest.mark.parametrize("folder", COMPARISONS, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_it_names_no_folder_of_a_machine_and_holds_no_text(folder):
    for file in folder.rglob("*"):
        if file.is_file():
            for found in re.findall(r"[\s=\"'\[,:](/[\w.-]+){2,}", file.read_text()):
                raise AssertionError(f"{file}: {found}")
    assert not list(folder.rglob("answers*")), "answers to other people's questions are other people's"
