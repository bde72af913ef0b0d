"""A real vLLM on this machine's cores when something goes wrong: repeated and bad requests, and a server that dies."""

import os
import signal
import threading
import time

import polars as pl
import pytest
from lab_doubts import without_load

from rackbook import runs
from rackbook.engine import bench, bench_runs, lab_bench, logs, metrics
from rackbook.engine.bench import Load
from rackbook.engine.completions import complete_together, random_prompts
from rackbook.errors import RackbookError

MAX_MODEL_LEN = 1024


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RACKBOOK_RUNS", str(tmp_path / "runs"))


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


def kill_when_busy(server):
    """End the server once it answers several requests at a time: the client's own first try is one alone."""
    while metrics.fetch(server.base_url).total("vllm:num_requests_running") < 2:
        time.sleep(0.2)
    os.kill(server.processes[0].pid, signal.SIGKILL)


def test_a_server_that_dies_in_mid_run_is_an_error_and_no_run(follow, server):
    load = Load(concurrency=4, input_tokens=64, output_tokens=900, num_prompts=64)
    killer = threading.Thread(target=kill_when_busy, args=[server], daemon=True)
    killer.start()
    with pytest.raises(RackbookError, match=r"repeat 1: .*is the server running"):
        follow(load, seed=9)
    killer.join()
    with pytest.raises(RackbookError, match="was ended by SIGKILL"):
        server.check()
