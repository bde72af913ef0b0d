"""A sweep on this machine that is killed five times at random moments ends with exactly its results."""

import os

import survival
from small_sweep import run


def test_24_executions_survive_five_kills_at_random_moments(tmp_path):
    arguments = (*survival.prepare(tmp_path), "--jobs", "2")
    mark = f"RACKBOOK_TEST_MARK={tmp_path}\0"
    environment = os.environ | {"RACKBOOK_TEST_MARK": str(tmp_path)}
    survival.kill_five_times(arguments, tmp_path / "out", environment, mark, seed=20261129)
    status, printed, said = run(*arguments, environment=environment)
    assert status == 0, said
    assert "24 of 24 executions complete" in printed
    survival.assert_exactly_all(tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in survival.complete(tmp_path / "out")}
    status, printed, said = run(*arguments, environment=environment)
    assert "24 executions, 24 done, 0 to run" in said
    assert {p: p.stat().st_mtime_ns for p in survival.complete(tmp_path / "out")} == before
    assert survival.processes_with(mark) == []
