"""Measuring a real vLLM on this machine's cores: the paths of 01, 08 and 12, bad requests, and a server that dies."""

import os
import signal
import threading

import polars as pl
import pytest

from rackbook import runs
from rackbook.engine import bench, bench_runs, lab_bench, logs, metrics
from rackbook.engine.bench import Load
from rackbook.engine.completions import complete_together, random_prompts
from rackbook.errors import RackbookError
from rackbook.experiments import context_sweep as sweep_experiment
from rackbook.experiments import engine_gap as gap_experiment
from rackbook.experiments import single_node as node_experiment
from rackbook.measurements import context_sweep, engine_gap, single_node

MAX_MODEL_LEN = 1024


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RACKBOOK_RUNS", str(tmp_path / "runs"))


def without_load(flags):
    """Doubts other than those that a busy machine gives."""
    return [
        f
        for f in flags
        if not any(word in f for word in ("other programs", "limit ±", "client used", "spread is not known"))
    ]


# whole paths, from parameters to a stored run


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
    assert 0 < pair["forward_ms"] < pair["engine_ms"]
    assert pair["locator"] == "the engine's own iteration time for the forward pass"
    steps = run.points("steps")
    assert steps.filter(pl.col("num_decode_requests") == 4).height > 10
    assert steps["num_prefill_tokens"].max() < 256  # the connector filled the cache, nothing was computed


# one server for what goes wrong; the last test ends it


@pytest.fixture(scope="module")
def server(lab_server):
    return lab_server(extra_arguments=("--enable-logging-iteration-details", "--max-model-len", str(MAX_MODEL_LEN)))


@pytest.fixture
def recorder():
    with runs.record("single_node", {}, machine={}) as run:
        yield run
        run.write_points(pl.DataFrame({"repeat": [1]}))


@pytest.fixture
def follow(lab, server, recorder):
    def run(load, seed=0):
        start = (str(lab.python), lab_bench.__file__, "bench", "serve")
        command = bench.arguments(
            start, server.base_url, load, seed, recorder.raw(f"bench-{seed}.json"), model=server.model,
            tokenizer=str(lab.model()),
        )  # fmt: skip
        quick = {"PYTHONDONTWRITEBYTECODE": "", "HF_HUB_OFFLINE": "1"}
        return bench_runs.follow(server.base_url, [command], recorder, environment=quick, timeout_s=300)

    return run


def test_prompts_sent_twice_are_found_in_the_prefix_cache_and_flagged(follow, recorder):
    load = Load(concurrency=2, input_tokens=640, output_tokens=4, num_prompts=4)
    cold = follow(load, seed=1).row(0, named=True)
    assert cold["prefix_hit_percent"] == 0
    assert without_load(recorder._flags) == []
    warm = follow(load, seed=1).row(0, named=True)
    assert warm["prefix_hit_percent"] == pytest.approx(80)  # blocks of 128 tokens, the last is always computed
    assert any("came from the prefix cache" in flag for flag in recorder._flags)


def test_requests_that_the_server_refuses_are_counted_and_no_latency_is_zero(follow, recorder):
    load = Load(concurrency=2, input_tokens=2 * MAX_MODEL_LEN, output_tokens=4, num_prompts=4)
    row = follow(load).row(0, named=True)
    assert (row["num_completed"], row["num_failed"]) == (0, 4)
    assert (row["ttft_p50_s"], row["tpot_ms"], row["e2el_s"]) == (None, None, None)
    assert "no request completed" in row["missing_reason"]
    assert any(flag.startswith("c2-2048in-4out, repeat 1: 4 of 4 requests failed") for flag in recorder._flags)


def test_a_request_that_errs_is_told_as_the_server_told_it(server):
    with pytest.raises(RackbookError, match=r"1 of 1 requests failed: status 400: .*maximum"):
        complete_together(server.base_url, server.model, random_prompts(1, 2 * MAX_MODEL_LEN, 1000, 1), 4)


def test_the_servers_own_lines_and_counters_are_read(server):
    before = metrics.fetch(server.base_url)
    complete_together(server.base_url, server.model, random_prompts(2, 100, 1000, 2), 8)
    grown = metrics.growth(before, metrics.fetch(server.base_url))
    assert grown.total("vllm:generation_tokens_total") == 16
    assert grown.total("vllm:prompt_tokens_total") == 200
    text = server.log_path.read_text()
    found = logs.iterations(text)
    assert found.height == text.count("iteration elapsed time:")
    assert found["num_decode_requests"].max() == 2
    assert found["rank"].unique().to_list() == [0]


def test_a_server_that_dies_in_mid_run_is_an_error_and_no_run(follow, server):
    load = Load(concurrency=4, input_tokens=64, output_tokens=900, num_prompts=64)
    threading.Timer(20.0, lambda: os.kill(server.processes[0].pid, signal.SIGKILL)).start()
    with pytest.raises(RackbookError, match="repeat 1: .*(is the server running|requests failed)"):
        follow(load, seed=9)
    with pytest.raises(RackbookError, match="was ended by SIGKILL"):
        server.check()
