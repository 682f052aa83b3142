"""The whole way over two processes, with one killed in each phase and every phase resumed (benchmarks/rehearsal.py)."""

from __future__ import annotations

import pytest

from benchmarks.rehearsal import rehearse, table


@pytest.mark.timeout(900)
def test_a_process_killed_in_each_phase_costs_nothing_but_its_work(tmp_path):
    rows = rehearse(tmp_path, processes=2)
    print(table(rows))
    assert all(row.passed for row in rows), table(rows)
    lost = "another process"
    assert all(lost in row.sentence for row in rows if row.phase != "sweep"), table(rows)
    assert {row.status for row in rows if row.phase != "sweep"} == {1}
