"""results/: summaries, figures and tables are rebuilt from the archives byte for byte."""

import gzip
import json
import re
import shutil
import tarfile

import pytest

from ctcdraft.errors import InputError
from studies import results
from studies.comparison.store import EVALUATIONS, RULES, TRAININGS
from studies.results import RESULTS, STUDIES, main, of_text, rebuild, rewritten, selected, table

SMALL = "demo"
# results/device has what `make gpu` wrote on this machine; it is no study.
FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir() and path.name != "device")
REBUILT = {".csv", ".svg"}


def rebuilt(study, root):
    """Return a copy of the study below another root, rebuilt from its archive."""
    out = root / "results" / study
    out.mkdir(parents=True)
    shutil.copy(RESULTS / study / "README.md", out)
    (root / "README.md").write_text("")  # its tables are of another study
    rebuild(study, out)
    return out


def files_that_differ(study, root):
    """Return the names of a study's files that are not rebuilt byte for byte."""
    out = rebuilt(study, root)
    rebuilt_files, committed = (
        {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in REBUILT and file.name != TRAININGS}
        for folder in (out, RESULTS / study)
    )
    return [name for name in rebuilt_files | committed if rebuilt_files.get(name) != committed.get(name)]


def test_a_small_study_is_rebuilt_from_its_archive(tmp_path):
    assert files_that_differ(SMALL, tmp_path) == []
    assert rewritten(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("study", [study for study in STUDIES if study != SMALL])
def test_every_study_is_rebuilt_from_its_archive(study, tmp_path):
    assert files_that_differ(study, tmp_path) == []


def test_every_table_matches_its_csv_file():
    """`python -m studies.results readme` rewrites those that do not."""
    assert [str(page) for page in rewritten()] == []


# Of an unfinished comparison those that a page shows: others have no rows yet.
SHOWN = {
    match[2]
    for page in [*RESULTS.glob("*/README.md"), *RESULTS.parent.glob("docs/*.md")]
    for match in results.MARKED.finditer(page.read_text())
}
TABLES = [
    name
    for name, spec in results.CONFIG["tables"].items()
    if name in SHOWN or not spec["file"].startswith("comparison/")
]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_written(name):
    lines = table(name).splitlines()
    assert len(lines) > 2
    assert len({line.count("|") for line in lines}) == 1


def test_a_changed_number_is_found(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.tar.gz", "*.svg"))
    shutil.copy(RESULTS.parent / "README.md", tmp_path)
    assert rewritten(tmp_path) == {}
    file = tmp_path / "results" / SMALL / "summary.csv"
    rows = file.read_text()
    tau = selected(results.CONFIG["tables"]["demo"], tmp_path).set_index("method").tau["ctc_gru"]
    file.write_text(rows.replace(f",{tau:.8g},", ",9.876,"))
    stale = rewritten(tmp_path)
    assert set(stale) == {file.with_name("README.md")}
    assert all("9.88" in text for text in stale.values())


def test_a_changed_cell_is_rewritten(tmp_path):
    page = tmp_path / "README.md"
    shutil.copytree(RESULTS / SMALL, tmp_path / "results" / SMALL)
    shutil.copytree(RESULTS / "comparison", tmp_path / "results" / "comparison", ignore=lambda _, names: {"README.md"})
    right = (RESULTS.parent / "README.md").read_text()
    page.write_text(re.sub(r"(?<=\| ctc_gru \| )\d\.\d\d", "9.99", right))
    assert page.read_text() != right
    assert rewritten(tmp_path) == {page: right}


def test_results_stay_small():
    files = [path for folder in FOLDERS for path in folder.rglob("*") if path.is_file()]
    assert len(files) <= 80
    assert sum(file.stat().st_size for file in files) <= 3_000_000


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_study_is_complete(folder):
    names = {path.name for path in folder.iterdir()}
    assert "README.md" in names
    assert names & {"raw.tar.gz", RULES}
    assert any(name.endswith(".csv") for name in names)
    assert folder.name in STUDIES
    assert f"]({folder.name})" in (RESULTS / "README.md").read_text()
    assert len([name for name in names if name.endswith(".svg")]) <= 4
    readme = (folder / "README.md").read_text()
    assert len(readme.splitlines()) <= 80
    assert all(part in readme for part in ("Commit", "Hardware", "<!-- table: ", "```\n"))
    assert set(re.findall(r"!\[\]\((.*?)\)", readme)) == {name for name in names if name.endswith(".svg")}


ARCHIVED = [path for path in FOLDERS if (path / "raw.tar.gz").is_file()]


@pytest.mark.parametrize("folder", ARCHIVED, ids=lambda folder: folder.name)
def test_an_archive_is_reproducible(folder):
    with tarfile.open(folder / "raw.tar.gz") as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.mtime, member.uid, member.gid, member.uname, member.mode) for member in members} == {
        (0, 0, 0, "", 0o644)
    }


def raw_texts(folder):
    """The raw reports of a study by their name."""
    if (folder / EVALUATIONS).is_file():
        yield EVALUATIONS, gzip.decompress((folder / EVALUATIONS).read_bytes()).decode()
    if (folder / "raw.tar.gz").is_file():
        with tarfile.open(folder / "raw.tar.gz") as archive:
            yield from ((member.name, archive.extractfile(member).read().decode()) for member in archive.getmembers())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_raw_reports_have_their_command_and_name_no_machine(folder):
    texts = dict(raw_texts(folder))
    assert texts
    for name, text in texts.items():
        assert not re.search(r"[\s=\"'\[,:](/[\w.-]+){2,}", text), name
        assert "answers" not in name or name == "answers.txt", (
            "responses to other people's prompts may not be published"
        )
        reports = [json.loads(text)] if name.endswith("report.json") else []
        if name == EVALUATIONS:
            reports = [json.loads(line)["report"] for line in text.splitlines()]
        for report in reports:
            environment = report["environment"]
            assert environment["command"].startswith("python ")
            assert re.fullmatch("[0-9a-f]{40}", environment["git"]["commit"])
            assert environment["versions"]["torch"]
            assert all(row["hardware"] and row["dtype"] and row["seed"] is not None for row in report["rows"])


def test_output_of_scripts_becomes_rows(tmp_path):
    file = tmp_path / "speed.txt"
    file.write_text("case one\n  1,234 tokens/s\n nothing\ncase two\n  5 tokens/s, float32\n")
    patterns = {"case": r"^case (?P<case>\w+)", "speed": r"(?P<value>[\d,]+) tokens/s(?:, (?P<dtype>\w+))?"}
    assert list(of_text(file, patterns)) == [
        {"run": "speed.txt", "case": "one", "measure": "speed", "value": 1234.0},
        {"run": "speed.txt", "case": "two", "measure": "speed", "value": 5.0, "dtype": "float32"},
    ]


def test_a_cell_has_one_value(monkeypatch):
    spec = {"file": f"{SMALL}/summary.csv", "rows": {"method": "{method}"}, "cells": {"tau": "{tau:.2f}"}}
    monkeypatch.setitem(results.CONFIG["tables"], "ambiguous", spec)
    with pytest.raises(InputError, match=r"table ambiguous: .* are both in column tau; narrow `where`"):
        table("ambiguous")


def test_unknown_names_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match="there is no study nothing; there are demo, "):
        main(["rebuild", "nothing"])
    with pytest.raises(InputError, match="unknown command"):
        main(["print"])
    (tmp_path / "README.md").write_text("<!-- table: nothing -->\n<!-- /table -->\n")
    with pytest.raises(InputError, match="there is no table nothing; there are demo, "):
        rewritten(tmp_path)


def test_an_archive_is_unpacked(tmp_path):
    main(["unpack", SMALL, str(tmp_path / "raw")])
    assert (tmp_path / "raw" / "held_out" / "report.json").is_file()


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "link"])
def test_nothing_is_unpacked_elsewhere(tmp_path, monkeypatch, name):
    (tmp_path / "results" / SMALL).mkdir(parents=True)
    with tarfile.open(tmp_path / "results" / SMALL / "raw.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = (tarfile.SYMTYPE, "/etc") if name == "link" else (tarfile.REGTYPE, "")
        archive.addfile(member)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    with pytest.raises(InputError, match=f"holds .*{name.strip('/.')}, which is no plain file"):
        results.unpack(SMALL, tmp_path / "raw")
    assert not (tmp_path / "outside").exists()
