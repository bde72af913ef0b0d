"""The meaning of a notebook's ``source``, and what a run may settle."""

from types import SimpleNamespace

import polars as pl
import pytest

from rackbook import runs
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import live
from rackbook.tables import schema

POINTS = pl.DataFrame(
    {"hardware": ["GB300", "GB300"], "ep_size": [32, 16], "context_tokens": [65536, 65536], "step_ms": [8.9, 8.1]}
)
CLAIM = {"hardware": "gb300", "ep_size": 32, "context_tokens": 65536}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RACKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(runs, "COMMITTED", tmp_path / "committed")


def recorded(flag=None):
    with runs.record("context_sweep", {}, machine={"cpu": "made up"}) as run:
        run.write_points(POINTS)
        if flag:
            run.flag(flag)
    return runs.read(run.id)


def never():
    raise AssertionError("must not measure")


def test_published_shows_no_run():
    assert live.run_of("context_sweep", "published", never) is None


def test_measure_runs_now():
    made = recorded()
    assert live.run_of("context_sweep", "measure", lambda: made) is made


def test_an_id_or_a_folder_shows_that_run():
    made = recorded()
    assert live.run_of("context_sweep", made.id, never).id == made.id
    assert live.run_of("context_sweep", str(made.path), never).id == made.id


def test_a_run_of_another_experiment_is_refused():
    made = recorded()
    with pytest.raises(ParameterError, match=f"run {made.id} is one of context_sweep, this notebook shows engine_gap"):
        live.run_of("engine_gap", made.id, never)


def test_another_word_is_refused_with_what_is_allowed():
    with pytest.raises(ParameterError, match="source: unknown run: got 'mesure'.*Allowed: published; measure: run now"):
        live.run_of("context_sweep", "mesure", never)


def test_a_finding_needs_the_claims_own_conditions():
    run = recorded()
    found = live.finding(run, run.points(), "step_ms", CLAIM)
    assert (found.found, found.basis) == (8.9, "measured")
    assert run.id in found.note
    assert live.finding(run, run.points(), "step_ms", CLAIM | {"ep_size": 8}) is None
    assert live.finding(run, run.points(), "step_ms", CLAIM | {"model": "m"}) is None
    assert live.finding(None, run.points(), "step_ms", CLAIM) is None


def test_a_flagged_run_settles_nothing_and_says_why():
    run = recorded("the machine was loaded")
    found = live.finding(run, run.points(), "step_ms", CLAIM)
    assert (found.found, found.basis) == (None, None)
    assert "the machine was loaded" in found.note


def test_two_points_under_one_condition_settle_nothing():
    run = recorded()
    found = live.finding(run, run.points(), "step_ms", {"hardware": "GB300"})
    assert found.found is None
    assert "2 points" in found.note


def test_recorded_is_the_newest_committed_run(tmp_path):
    assert live.recorded("context_sweep") is None
    made = recorded()
    (tmp_path / "committed").mkdir()
    made.path.rename(tmp_path / "committed" / made.id)
    assert live.recorded("context_sweep").id == made.id


def test_a_run_is_described_in_a_line():
    run = recorded("loaded")
    assert live.description(run) == f"made up, {run.provenance['started_utc'][:10]}; 1 doubt"


def test_doubts_are_the_flags_of_the_run_that_is_shown():
    assert live.doubts(SimpleNamespace(run=None)).to_dict(as_series=False) == {"run": [], "doubt": []}
    run = recorded("the machine was loaded")
    assert live.doubts(SimpleNamespace(run=run)).rows() == [(run.id, "the machine was loaded")]


def test_points_of_no_run_are_an_empty_table_and_of_a_run_a_checked_one():
    assert live.points_of(None, "serving_measured").columns == schema("serving_measured").frame([]).columns
    with pytest.raises(DataError, match="context_sweep_measured, row 1"):
        live.points_of(recorded(), "context_sweep_measured")
    with pytest.raises(DataError, match="unknown table of points: got 'loads'"):
        live.points_of(recorded(), "serving_measured", "loads")
