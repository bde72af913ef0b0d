"""Measuring a real vLLM on this machine's cores: the paths of 01, 08 and 12, from parameters to a stored run."""

import polars as pl
import pytest
from lab_doubts import without_load

from rackbook.experiments import context_sweep as sweep_experiment
from rackbook.experiments import engine_gap as gap_experiment
from rackbook.experiments import single_node as node_experiment
from rackbook.measurements import context_sweep, engine_gap, single_node


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RACKBOOK_RUNS", str(tmp_path / "runs"))


def test_the_context_sweep_measures_and_records(lab):
    params = sweep_experiment.Params(
        source="measure", cluster="cpu-lab", measured_contexts=[256, 8192], measured_requests_per_rank=2,
        measured_draft_tokens=0,
    )  # fmt: skip
    run = context_sweep.on_lab(params, lab=lab, steps=16, repeats=2)
    points = run.points()
    assert points["context_tokens"].to_list() == [256, 8192]
    assert (points["step_ms"] > 0).all()
    assert points["hardware"].unique().to_list() == ["CPU lab"]
    steps = run.points("steps")
    assert steps["num_decode_requests"].unique().to_list() == [2]
    assert steps.group_by("context_tokens", "repeat").len()["len"].max() <= 16
    assert without_load(run.flags) == []
    assert run.provenance["vllm"] == "0.32.0"
    assert run.provenance["machine"]["packages"]["torch"].startswith("2.13")
    (server,) = run.provenance["processes"]
    assert "vllm.entrypoints.openai.api_server" in server["arguments"]
    assert not any(word.startswith("/") for word in server["arguments"])
    assert "Iteration(" not in run.raw("server.log").read_text()
    shown = sweep_experiment.collect(params.model_copy(update={"source": run.id}))
    assert shown.measured["step_ms"].to_list() == points["step_ms"].to_list()


def test_the_grid_measures_and_records(lab):
    run = single_node.measure(node_experiment.Params(source="measure", cluster="cpu-lab", measured_repeats=1), lab=lab)
    points, rows = run.points(), run.points("runs")
    assert points["concurrency"].to_list() == [1, 2, 4]
    assert (points["output_tok_per_s"] > 0).all()
    assert rows["num_failed"].to_list() == [0, 0, 0]
    assert rows["num_completed"].to_list() == rows["num_prompts"].to_list()
    assert rows["prefix_hit_percent"].max() < 1
    assert without_load(run.flags) == []
    assert node_experiment.collect(node_experiment.Params(source=run.id)).measured.height == 3


def test_the_engine_gap_measures_and_records(lab):
    params = gap_experiment.Params(source="measure", cluster="cpu-lab", measured_repeats=1)
    run = engine_gap.measure(params, lab=lab)
    (pair,) = run.points().to_dicts()
    assert pair["engine_ms"] == pytest.approx(engine_gap.engine_step_ms(run.points("runs"))["served_dep1"])
    assert pair["forward_ms"] > 0
    assert pair["locator"] == "the engine's own iteration time for the forward pass"
    steps = run.points("steps")
    assert steps.filter(pl.col("num_decode_requests") == 4).height > 10
    assert steps["num_prefill_tokens"].max() < 256  # the connector filled the cache, nothing was computed
