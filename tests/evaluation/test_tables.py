"""The paper's tables beside its authors' answer files and our reports."""

import csv
import json
from io import StringIO
from math import hypot

import numpy as np
import pytest
from test_recorded import REPOSITORY, TRACES

from ctcdraft.errors import InputError
from ctcdraft.evaluation.bootstrap import difference_interval
from studies.paper.export import latex, latex_escape, markdown, notes_csv, table_csv
from studies.paper.tables import PUBLISHED_FOLDER, read_table

NAMES = sorted(file.stem for file in PUBLISHED_FOLDER.glob("*.yaml"))


def report(tmp_path, name="report", made="2026-11-20T10:00:00+00:00", **changes):
    """One greedy row of ours, for Vicuna-7B on MT-Bench."""
    row = {
        "drafter": "ctc", "benchmark": "mt_bench", "temperature": 0.0, "fingerprint": {"base": "vicuna_7b"},
        "tau": 3.0, "tau_ci": [2.9, 3.1], "speedup": 2.0, "speedup_ci": None, "prompts": 80,
        "lossless": {"equal": 80, "owed": {"wrong": 0, "undecided": 0, "explained": 0}},
        "categories": {"writing": {"tau": 2.5, "speedup": 1.5}},
        "nodes": 64, "hardware": "NVIDIA H200", "dtype": "float16",
    }  # fmt: skip
    path = tmp_path / f"{name}.json"
    rows = [row | {"drafter": "autoregressive"}, row | changes]
    path.write_text(json.dumps({"rows": rows, "environment": {"date": made}}))
    return str(path)


def cell(table, measure, base="vicuna_7b", benchmark="mt_bench", drafter="ctc"):
    wanted = (drafter, benchmark, base, measure)
    (cells,) = [one for one in table.cells if (one.drafter, one.benchmark, one.base, one.measure) == wanted]
    return cells


def test_there_is_an_experiment_for_every_table():
    folder = REPOSITORY / "configs" / "experiment"
    assert sorted(file.stem for file in folder.glob("*.yaml") if file.stem.startswith(("table", "figure"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_that_was_not_run_is_empty_and_has_the_command_that_fills_it(name):
    table = read_table(name, None, [])
    assert all(one.ours is one.recomputed is one.difference is None for one in table.cells)
    rows = list(csv.DictReader(StringIO(table_csv(table))))
    assert len(rows) == len(table.cells) > 5
    for row, one in zip(rows, table.cells, strict=True):
        assert (row["ours"], row["recomputed"], row["difference"]) == ("", "", "")
        assert row["paper"] == ("" if one.paper is None else f"{one.paper:.2f}")
        assert f"base={one.base} {one.training}" in row["to_fill"]
    assert latex(table).count(r"\\") == len(rows) + 1
    assert markdown(table).count("python train.py") == len({one.fill_command for one in table.cells})


def test_our_value_fills_its_cell_alone(tmp_path):
    table = read_table("table_mt_bench", None, [report(tmp_path)])
    assert cell(table, "beta").ours.value == 3.0
    assert cell(table, "gamma").ours.value == 2.0
    assert sum(one.ours is not None for one in table.cells) == 2
    assert cell(table, "beta").difference is None  # there is no corrected value
    assert "| mt_bench | ctc | 7B | beta | 3.56 |  |  | 3.00 [2.90, 3.10] (1) |  |" in markdown(table)
    assert (
        cell(read_table("figure_categories", None, [report(tmp_path)]), "beta", benchmark="mt_bench/writing").ours.value
        == 2.5
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"temperature": 1.0}, "ctc left out, sampled at temperature 1, where the table is greedy"),
        (
            {"lossless": {"equal": 79, "owed": {"wrong": 1, "undecided": 0, "explained": 0}}},
            "ctc left out, not lossless (on 1 of 80 questions its tokens are not the baseline's)",
        ),
        ({"prompts": 0}, "ctc left out, no question is finished"),
        ({"drafter": "eagle"}, "eagle left out, no row is of that drafter"),
        ({"fingerprint": {"base": "tiny"}}, "ctc left out, base tiny is in no row"),
        ({"benchmark": "gsm8k"}, "ctc left out, benchmark gsm8k is in no row"),
        ({"drafter": "autoregressive"}, "left out, it holds autoregression alone"),
    ],
)
def test_a_row_that_fills_no_cell_is_named_with_the_reason_in_every_file(tmp_path, changes, why):
    file = report(tmp_path, **changes)
    table = read_table("table_mt_bench", None, [file])
    assert all(one.ours is None for one in table.cells)
    assert table.left_out == [f"{file}: {why}"]
    assert f"- {file}: {why}" in markdown(table)
    assert rf"\footnotesize {latex_escape([f'{file}: {why}'])[0]}" in latex(table)
    assert [row["note"] for row in csv.DictReader(StringIO(notes_csv(table)))] == [f"{file}: {why}"]


def test_a_value_has_a_note_on_its_questions_hardware_and_precision(tmp_path):
    whole = report(tmp_path, "whole", hardware="NVIDIA H200")
    small = report(
        tmp_path, "small", prompts=20, drafter="medusa", hardware="AMD EPYC, 1 thread", dtype="float32",
        lossless={"owed": {"wrong": 0, "undecided": 2, "explained": 0}},
    )  # fmt: skip
    table = read_table("table_mt_bench", None, [whole, small])
    medusa, ctc = table.measured  # in the order of the rows
    assert ctc == f"{whole} (2026-11-20T10:00:00+00:00, 64 nodes): 80 questions; NVIDIA H200; float16"
    assert medusa.partition(": ")[2] == (
        "only 20 of 80 questions; on 2 of them tokens differ at a near tie, which is undecided; AMD EPYC, 1 thread; "
        "float32"
    )
    text = markdown(table)
    assert "| mt_bench | medusa | 7B | beta | 2.58 |  |  | 3.00 [2.90, 3.10] (1) |  |" in text
    assert "| mt_bench | ctc | 7B | beta | 3.56 |  |  | 3.00 [2.90, 3.10] (2) |  |" in text
    assert f"- (1) {medusa}\n- (2) {ctc}\n" in text
    rows = {row["drafter"]: row for row in csv.DictReader(StringIO(table_csv(table))) if row["ours"]}
    assert (rows["medusa"]["ours"], rows["medusa"]["ours_measured"]) == ("3.00 [2.90, 3.10]", medusa)


def test_the_newest_of_several_reports_is_taken_and_the_others_are_named(tmp_path):
    """In whatever order they are given."""
    new = report(tmp_path, "new", made="2026-11-21T10:00:00+00:00", tau=3.3)
    files = [report(tmp_path, "old", tau=3.1), new, report(tmp_path, "older", made="2026-10-01", tau=3.2)]
    table = read_table("table_mt_bench", None, files)
    assert cell(table, "beta").ours.value == 3.3
    assert table.left_out == [
        f"ctc on mt_bench with vicuna_7b was measured 3 times: the newest is taken, {new} (2026-11-21T10:00:00+00:00, "
        f"64 nodes), and not {files[0]} (2026-11-20T10:00:00+00:00, 64 nodes), {files[2]} (2026-10-01, 64 nodes)"
    ]


def test_a_measure_that_a_report_lacks_leaves_its_cell_empty(tmp_path):
    """measure=replay times nothing."""
    table = read_table("table_mt_bench", None, [report(tmp_path, speedup=None)])
    assert cell(table, "gamma").ours is cell(table, "gamma").measured is None
    assert cell(table, "beta").ours.value == 3.0
    assert cell(table, "gamma").fill_command in markdown(table)


def test_the_interval_of_a_difference_has_the_widths_of_both_sides(tmp_path):
    """It is that of two independent Gaussians; a constant on one side adds nothing."""
    rng = np.random.default_rng(0)
    ours, theirs = (rng.normal(middle, width, size=100_000) for middle, width in ((3.0, 0.3), (2.0, 0.4)))
    around = [np.quantile(one, [0.025, 0.975]).tolist() for one in (ours, theirs)]
    interval = difference_interval(3.0, around[0], 2.0, around[1])
    assert interval == pytest.approx(np.quantile(ours - theirs, [0.025, 0.975]).tolist(), abs=0.02)
    assert difference_interval(3.0, [2.6, 3.4], 2.0, [2.0, 2.0]) == pytest.approx([0.6, 1.4])
    assert difference_interval(3.0, None, 2.0, [2.0, 2.0]) is None


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
    low, high = cell(table, "beta").corrected.interval
    assert difference.interval[1] - difference.value == pytest.approx(hypot(0.1, difference.value + low - 3.0))
    assert difference.value - difference.interval[0] == pytest.approx(hypot(0.1, difference.value + high - 3.0))
    assert table.notes[0].startswith(
        "mt_bench 7B, mt_bench 13B, mt_bench 33B, both arms: answer files hold neither single steps"
    )
    categories = read_table("figure_categories", str(TRACES), [])
    assert categories.notes[0] == (
        "the paper prints 3.17 for mt_bench/roleplay and 3.41 for mt_bench/writing; its authors' files say the reverse"
    )


def test_missing_files_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"no published table table_9; there are .*figure_time, table_ablation"):
        read_table("table_9", None, [])
    with pytest.raises(InputError, match="no folder of answer files at nowhere"):
        read_table("table_gsm8k", "nowhere", [])
    (tmp_path / "odd.json").write_text("[]")
    with pytest.raises(InputError, match=r"odd.json is not a report.json"):
        read_table("table_gsm8k", None, [str(tmp_path / "odd.json")])
    (tmp_path / "latency.json").write_text(json.dumps({"rows": [{"drafter": "ctc", "temperature": 0.0, "tau": None}]}))
    with pytest.raises(InputError, match=r"latency.json is not a report.json of a benchmark"):
        read_table("table_gsm8k", None, [str(tmp_path / "latency.json")])


def test_the_cells_that_the_paper_leaves_out_can_be_filled_too(tmp_path):
    """Table 2: eight cells of two measures, of which the paper prints four; a run of configs/experiment fills each."""
    table = read_table("table_ablation", None, [report(tmp_path, drafter="linear_ctc_collapse")])
    assert len(table.cells) == 16
    assert sum(one.paper is None for one in table.cells) == 8
    assert cell(table, "beta", drafter="linear_ctc_collapse").ours.value == 3.0
    for one in table.cells:
        assert (REPOSITORY / "configs" / "experiment" / f"ablation_{one.drafter}.yaml").is_file()
        assert f"base=vicuna_7b experiment=ablation_{one.drafter} " in one.fill_command
    if TRACES.is_dir():  # the authors' own drafter is one of the cells
        cells = read_table("table_ablation", str(TRACES), []).cells
        assert {one.drafter for one in cells if one.recomputed is not None} == {"transformer_ctc_collapse"}


def test_shares_of_a_step_are_those_of_the_figure(tmp_path):
    time = {"draft": 2.0, "tree": 1.0, "read": 5.0, "verify": 0.5, "keep": 0.5, "other": 1.0, "prefill": 9.0}
    table = read_table("figure_time", None, [report(tmp_path, time=time)])
    ours = [one.ours.value for one in table.cells if one.drafter == "ctc"]
    assert ours == [50.0, 20.0, 10.0, 20.0]
    for drafter in ("ctc", "medusa"):
        assert sum(one.paper for one in table.cells if one.drafter == drafter) == pytest.approx(100, abs=0.05)
    untimed = read_table("figure_time", None, [report(tmp_path, time=dict.fromkeys(time))])
    assert all(one.ours is None for one in untimed.cells)
