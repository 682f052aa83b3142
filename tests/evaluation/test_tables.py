"""The paper's tables beside its authors' files and our reports: no value invented, every gap named."""

import csv
import json
from io import StringIO

import pytest
from test_recorded import REPOSITORY, TRACES

from ctcdraft.errors import InputError
from ctcdraft.evaluation.table_files import comma_separated, latex, markdown
from ctcdraft.evaluation.tables import PUBLISHED, read_table

NAMES = sorted(file.stem for file in PUBLISHED.glob("*.yaml"))


def report(tmp_path, **changes):
    """One greedy row of ours, for Vicuna-7B on MT-Bench."""
    row = {
        "drafter": "ctc", "benchmark": "mt_bench", "temperature": 0.0, "fingerprint": {"base": "vicuna_7b"},
        "tau": 3.0, "tau_ci": [2.9, 3.1], "speedup": 2.0, "speedup_ci": None, "prompts": 80,
        "lossless": {"equal": 80, "owed": {"wrong": 0, "undecided": 0, "explained": 0}},
        "categories": {"writing": {"tau": 2.5, "speedup": 1.5}},
    }  # fmt: skip
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"rows": [row | changes]}))
    return str(path)


def cell(table, measure, base="vicuna_7b", benchmark="mt_bench", drafter="ctc"):
    wanted = (drafter, benchmark, base, measure)
    (found,) = [one for one in table.cells if (one.drafter, one.benchmark, one.base, one.measure) == wanted]
    return found


def test_there_is_an_experiment_for_every_table():
    folder = REPOSITORY / "configs" / "experiment"
    assert sorted(file.stem for file in folder.glob("*.yaml") if file.stem.startswith(("table", "figure"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_that_was_not_run_is_empty_and_says_what_would_fill_it(name):
    table = read_table(name, None, [])
    assert all(one.ours is one.recomputed is one.difference is None for one in table.cells)
    rows = list(csv.DictReader(StringIO(comma_separated(table))))
    assert len(rows) == len(table.cells) > 5
    for row, one in zip(rows, table.cells, strict=True):
        assert (row["ours"], row["recomputed"], row["difference"]) == ("", "", "")
        assert row["paper"] == f"{one.paper:.2f}"
        assert f"base={one.base} drafter={one.drafter}" in row["to_fill"]
    assert latex(table).count(r"\\") == len(rows) + 1
    assert markdown(table).count("python train.py") == len({one.to_fill for one in table.cells})


def test_ours_stands_in_its_cell_and_nowhere_else(tmp_path):
    table = read_table("table_mt_bench", None, [report(tmp_path)])
    assert cell(table, "beta").ours.value == 3.0
    assert cell(table, "gamma").ours.value == 2.0
    assert sum(one.ours is not None for one in table.cells) == 2
    assert cell(table, "beta").difference is None  # nothing to take it from
    assert "| mt_bench | ctc | 7B | beta | 3.56 |  |  | 3.00 [2.90, 3.10] |  |" in markdown(table)
    assert (
        cell(read_table("figure_categories", None, [report(tmp_path)]), "beta", benchmark="mt_bench/writing").ours.value
        == 2.5
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.0},
        {"lossless": {"equal": 79, "owed": {"wrong": 1, "undecided": 0, "explained": 0}}},
        {"prompts": 0},
        {"drafter": "eagle"},
    ],
)
def test_sampled_rows_and_rows_without_a_certificate_are_left_out(tmp_path, changes):
    table = read_table("table_mt_bench", None, [report(tmp_path, **changes)])
    assert all(one.ours is None for one in table.cells)


def test_the_authors_files_give_the_papers_values_and_the_swap(tmp_path):
    if not TRACES.is_dir():
        pytest.skip(f"no recorded runs at {TRACES}; CTCDRAFT_TRACES= names the folder of the authors' answer files")
    table = read_table("table_mt_bench", str(TRACES), [report(tmp_path)])
    for one in table.cells:
        assert (one.recomputed is not None) == (one.drafter == "ctc")
        if one.recomputed:
            assert f"{one.recomputed.value:.2f}" == f"{one.paper:.2f}"
    assert f"{cell(table, 'beta').corrected.value:.2f}" == "3.50"
    difference = cell(table, "beta").difference
    assert difference.value == pytest.approx(3.0 - cell(table, "beta").corrected.value)
    assert difference.interval[1] - difference.interval[0] == pytest.approx(0.2)
    categories = read_table("figure_categories", str(TRACES), [])
    assert categories.notes[0] == (
        "the paper prints 3.17 for mt_bench/roleplay and 3.41 for mt_bench/writing; its authors' files say the reverse"
    )


def test_what_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="no published table table_9; there are figure_bases"):
        read_table("table_9", None, [])
    with pytest.raises(InputError, match="no folder of answer files at nowhere"):
        read_table("table_gsm8k", "nowhere", [])
    (tmp_path / "odd.json").write_text("[]")
    with pytest.raises(InputError, match=r"odd.json is no report.json"):
        read_table("table_gsm8k", None, [str(tmp_path / "odd.json")])
    (tmp_path / "latency.json").write_text(json.dumps({"rows": [{"drafter": "ctc", "temperature": 0.0, "tau": None}]}))
    with pytest.raises(InputError, match=r"latency.json is no report.json of questions"):
        read_table("table_gsm8k", None, [str(tmp_path / "latency.json")])
