"""`vllm bench serve`: its result files with all their traps, and the client driven over a grid."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import polars as pl
import pytest

from rackbook import runs
from rackbook.engine import bench, bench_client, bench_results, bench_runs, metrics
from rackbook.engine.bench import Load
from rackbook.errors import DataError, RackbookError
from rackbook.tables import column

LOAD = Load(concurrency=2, input_tokens=100, output_tokens=10, num_prompts=4)


def result(**changes):
    """A whole result of vLLM 0.32's client, made up; None takes a key out."""
    content = {
        "date": "20261129-193000", "endpoint_type": "openai", "backend": "openai", "label": None, "model_id": "m",
        "tokenizer_id": "m", "num_prompts": 4, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 2,
        "duration": 2.0, "completed": 4, "failed": 0, "total_input_tokens": 400, "total_output_tokens": 40,
        "request_throughput": 2.0, "request_goodput": None, "output_throughput": 20.0, "total_token_throughput": 220.0,
        "mean_ttft_ms": 50.0, "median_ttft_ms": 40.0, "std_ttft_ms": 0.0, "p90_ttft_ms": 60.0,
        "mean_tpot_ms": 5.0, "median_tpot_ms": 5.0, "std_tpot_ms": 0.1, "p90_tpot_ms": 6.0,
        "mean_itl_ms": 5.0, "median_itl_ms": 5.0, "std_itl_ms": 0.1, "p90_itl_ms": 6.0,
        "mean_e2el_ms": 95.0, "median_e2el_ms": 95.0, "std_e2el_ms": 1.0, "p90_e2el_ms": 99.0,
    }  # fmt: skip
    content |= changes
    return {key: value for key, value in content.items() if value is not None or key in ("label", "request_goodput")}


def read(**changes):
    return bench_results.read_result(result(**changes), "r.json")


# result files


def test_a_whole_result():
    found = read()
    assert (found.concurrency, found.request_rate, found.completed, found.failed) == (2, None, 4, 0)
    assert (found.output_tok_per_s, found.total_tok_per_s, found.duration_s) == (20, 220, 2)
    assert found.latency_ms("ttft", "median") == 40
    assert found.latency_ms("ttft", "std") == 0
    assert (found.missing, found.labels, found.speculation) == ({}, {}, {})


def test_a_rate_is_a_number_or_the_word_inf():
    assert read(request_rate=3.6).request_rate == 3.6
    assert read(request_rate=float("inf")).request_rate is None


def test_real_results_with_speculative_decoding(realdata):
    (found,) = bench_results.read_results(realdata / "vllm_bench/dsv4flash_nvfp4_mtp/bench_mtp_c8.json")
    assert found.speculation["acceptance_length"] == pytest.approx(1 + 5789 / 26937)
    assert found.speculation["num_drafts"] == 26937
    assert found.latency_ms("itl", "mean") > found.latency_ms("tpot", "mean")
    assert found.latency_ms("e2el", "mean") is None
    assert "percentile-metrics" in found.missing["e2el"]
    assert (found.failed, found.concurrency) == (0, 8)
    with pytest.raises(DataError, match=r"unknown statistic of ttft in .*: got 'p90', allowed: mean, median, p99, std"):
        found.latency_ms("ttft", "p90")


def test_a_real_result_before_failed_was_counted_and_with_a_label_of_the_user(realdata):
    (found,) = bench_results.read_results(
        realdata / "vllm_bench/llm_d_benchmark/exp7_h100_1p1d_benchmark_2025-05-13.json"
    )
    assert (found.completed, found.failed, found.request_rate, found.concurrency) == (200, 0, 3.6, None)
    assert found.labels == {"timestamp": "2025-05-13_04-37-51,model"}  # and not the key "request_goodput:"
    assert "failed" not in found.missing


def test_a_real_result_that_lacks_throughput_says_so_and_gives_no_zero(realdata):
    (found,) = bench_results.read_results(realdata / "vllm_bench/vllm_ascend_2025/serving_llama8B_tp1_qps_inf.json")
    assert (found.completed, found.failed, found.duration_s, found.output_tok_per_s) == (None, None, None, None)
    assert found.missing["output_tok_per_s"] == "the file has no output_throughput"
    assert found.request_rate is None
    assert found.latency_ms("ttft", "p99") == pytest.approx(16596.1, abs=0.1)


def test_a_real_run_in_which_every_request_failed_has_no_latency_of_zero(realdata):
    path = realdata / "inferencex/mtp_fixed_ar/minimaxm2.5_8k1k_conc64.json"
    assert json.loads(path.read_text())["mean_ttft_ms"] == 0.0
    (found,) = bench_results.read_results(path)
    assert (found.completed, found.failed) == (0, found.num_prompts)
    assert {found.latency_ms(name, "mean") for name in bench_results.LATENCIES} == {None}
    assert found.missing["ttft"] == "no request completed; the file says 0"


@pytest.mark.parametrize("name", ["latency_llama8B_tp1.json", "throughput_llama8B_tp1.json"])
def test_results_of_the_other_benchmarks_are_recognised(realdata, name):
    with pytest.raises(DataError, match="looks like a result of `vllm bench latency` or `throughput`"):
        bench_results.read_results(realdata / "vllm_bench/vllm_ascend_2025" / name)


@pytest.mark.parametrize(
    "name",
    [
        "inferencex/bench_serving/agg_kimik2.5_1k1k_int4_vllm_tp8-ep1-dpafalse_disagg-false_spec-mtp_conc4_MI355-gbt350-odcdh5-wbb3.json",
        "aiperf/profile_export_aiperf.json",
        "vllm_bench/llm_d_benchmark/guidellm_report_v2.json",
    ],
)
def test_other_tools_files_are_refused(realdata, name):
    with pytest.raises(DataError, match="not a result of `vllm bench serve`.*another tool's file"):
        bench_results.read_results(realdata / name)


def test_answers_of_one_token_have_no_tpot():
    found = read(total_output_tokens=4, mean_tpot_ms=0.0, median_tpot_ms=0.0, mean_itl_ms=0.0, median_itl_ms=0.0)
    assert found.latency_ms("tpot", "mean") is None
    assert "one token" in found.missing["itl"]
    assert found.latency_ms("ttft", "mean") == 50


def test_a_latency_of_null_is_missing_and_not_zero():
    found = bench_results.read_result(result() | {"p90_ttft_ms": None, "std_tpot_ms": None}, "r.json")
    assert (found.latency_ms("ttft", "p90"), found.latency_ms("tpot", "std")) == (None, None)
    assert found.latency_ms("ttft", "median") == 40
    assert found.missing["p90_ttft"] == "the file says null for p90_ttft_ms"
    row = bench_runs.run_row(LOAD, found, 1, 0, 0.0, None)
    assert row["ttft_p90_s"] is None
    assert "p90_ttft: the file says null" in row["missing_reason"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mean_tpot_ms": float("nan")}, "r.json, mean_tpot_ms: got nan, allowed: a number > 0"),
        ({"p90_ttft_ms": float("inf")}, "p90_ttft_ms: got inf"),
        ({"mean_itl_ms": 0.0}, "mean_itl_ms: got 0.0, allowed: a number > 0"),
        ({"median_e2el_ms": -1.0}, "median_e2el_ms: got -1.0"),
        ({"duration": 0}, "duration: got 0, allowed: a number > 0"),
        ({"output_throughput": "fast"}, "output_throughput: got 'fast'"),
        ({"completed": 3.5}, "completed: got 3.5, allowed: a whole number"),
        ({"completed": True}, "completed: got True"),
        ({"completed": 5}, "5 completed and 0 failed requests, but 4 prompts"),
        ({"request_rate": 0}, "request_rate: got 0"),
        ({"num_prompts": None}, "not a result of `vllm bench serve`"),
    ],
)
def test_values_that_cannot_be_are_named_and_not_averaged_away(changes, words):
    with pytest.raises(DataError, match=words):
        read(**changes)


def test_a_file_of_appended_results_holds_several(tmp_path):
    path = tmp_path / "all.json"
    path.write_text(json.dumps(result()) + "\n" + json.dumps(result(max_concurrency=8)) + "\n")
    assert [r.concurrency for r in bench_results.read_results(path)] == [2, 8]
    with pytest.raises(DataError, match="got 2 results, expected one"):
        bench_results.load(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(result())[:-20], "result 1 is not whole JSON .*truncated"),
        (json.dumps(result()) + "\n" + json.dumps(result())[:50], "result 2 is not whole JSON"),
        ("", "the file is empty"),
        (json.dumps([result()]), "the summary of a sweep repeats its run files"),
        ("3", "got int, expected a result"),
    ],
)
def test_broken_files(tmp_path, text, words):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        bench_results.read_results(path)


def test_bare_nan_of_the_file_is_read_and_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result(mean_ttft_ms=float("nan"))))
    assert "NaN" in path.read_text()
    with pytest.raises(DataError, match="mean_ttft_ms: got nan"):
        bench_results.read_results(path)


def test_slim_drops_values_per_request_and_counts_errors():
    errors = ["", "Traceback\nBad Request", "Traceback\nBad Request", ""]
    kept = bench_results.slim(result(errors=errors, ttfts=[0.1] * 4, itls=[[0.1]] * 4))
    assert kept["error_counts"] == {"Bad Request": 2}
    assert not kept.keys() & set(bench_results.LISTS)
    found = read(completed=2, failed=2, errors=errors)
    assert found.errors == {"Bad Request": 2}


# the client

CLIENT = """
    import json, sys, time
    from urllib.request import urlopen
    arguments = dict(zip(sys.argv[1::1], sys.argv[2::1]))
    folder, name = arguments["--result-dir"], arguments["--result-filename"]
    seed, sent = int(arguments["--seed"]), int(arguments["--num-prompts"])
    print("Starting main benchmark run...", flush=True)
    {body}
    content = json.loads({content!r})
    content |= {{"num_prompts": sent, "completed": sent, "output_throughput": 20.0 + seed}}
    open(f"{{folder}}/{{name}}", "w").write(json.dumps(content))
"""


@pytest.fixture
def client(tmp_path):
    """Makes a command that stands in for the benchmark client."""

    def make(body="pass", content=None):
        path = tmp_path / "client.py"
        text = textwrap.dedent(CLIENT).format(body=body, content=json.dumps(content or result()))
        path.write_text(text)
        return (sys.executable, str(path))

    return make


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.setenv("RACKBOOK_RUNS", str(tmp_path / "runs"))
    with runs.record("single_node", {}, machine={}) as run:
        yield run
        run.write_points(pl.DataFrame({"repeat": [1]}))


@pytest.fixture
def counters(monkeypatch):
    """A server's counters that grow by 100 looked-up tokens, ``hits`` of them found, with each reading."""
    state = {"reading": 0, "hits": 0}

    def fetch(base_url):
        reading, state["reading"] = state["reading"], state["reading"] + 1
        return metrics.Snapshot.parse(
            "# TYPE vllm:prefix_cache_queries_total counter\n"
            f'vllm:prefix_cache_queries_total{{engine="0"}} {100 * reading}\n'
            "# TYPE vllm:prefix_cache_hits_total counter\n"
            f'vllm:prefix_cache_hits_total{{engine="0"}} {state["hits"] * reading}\n'
        )

    monkeypatch.setattr(metrics, "fetch", fetch)
    return state


def planned(client, recorder, loads, repeats, first_seed=0):
    """Command lines as a plan has them: all loads, then all again, a seed for each."""
    return [
        bench.arguments(client, "http://x", load, first_seed + repeat * len(loads) + place,
                        recorder.raw(f"bench-{load.named()}-{repeat + 1}.json"))
        for repeat in range(repeats) for place, load in enumerate(loads)
    ]  # fmt: skip


def follow(client, recorder, loads, repeats, first_seed=0, **options):
    return bench_runs.follow("http://x", planned(client, recorder, loads, repeats, first_seed), recorder, **options)


def test_the_command_line_of_the_client():
    found = bench.arguments(("vllm", "bench", "serve"), "http://127.0.0.1:8000", LOAD, 7, "out/r.json", model="m")
    assert found[:5] == ("vllm", "bench", "serve", "--base-url", "http://127.0.0.1:8000")
    pairs = dict(itertools.pairwise(found))
    assert pairs["--random-input-len"] == "100"
    assert pairs["--max-concurrency"] == "2"
    assert pairs["--seed"] == "7"
    assert (pairs["--result-dir"], pairs["--result-filename"]) == ("out", "r.json")
    assert pairs["--model"] == "m"
    assert {"--ignore-eos", "--save-result"} <= set(found)
    assert "--tokenizer" not in found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"concurrency": 0}, "concurrency: got 0"),
        ({"num_prompts": 1}, "1 prompts never make 2 requests"),
        ({"num_warmups": -1}, "num_warmups: got -1"),
    ],
)
def test_loads_that_cannot_be(changes, words):
    with pytest.raises(DataError, match=words):
        Load(**({"concurrency": 2, "input_tokens": 1, "output_tokens": 1, "num_prompts": 4} | changes))


def test_a_sweep_repeats_every_load_with_seeds_of_its_own(client, recorder, counters):
    other = Load(concurrency=1, input_tokens=100, output_tokens=10, num_prompts=4)
    lines = []
    frame = follow(client(), recorder, [LOAD, other], 2, first_seed=5, progress=lines.append)
    assert frame["seed"].to_list() == [5, 6, 7, 8]
    assert frame["repeat"].to_list() == [1, 1, 2, 2]
    assert frame["output_tok_per_s"].to_list() == [25.0, 26.0, 27.0, 28.0]
    assert frame["prefix_hit_percent"].to_list() == [0.0] * 4
    assert recorder._flags == []
    assert lines[0] == "client run 1 of 4: c2-100in-10out, repeat 1"
    kept = sorted(p.name for p in recorder.folder.glob("bench-*"))
    assert kept[0] == "bench-c1-100in-10out-1.json"
    assert len(kept) == 4
    assert len(recorder._provenance["processes"]) == 4
    for name in frame.columns:
        assert frame.schema[name] == column(name).dtype


def test_a_command_line_is_read_back():
    load = Load(concurrency=3, input_tokens=5, output_tokens=7, num_prompts=9, num_warmups=2)
    found = bench.asked(bench.arguments(("vllm", "bench", "serve"), "http://x", load, 11, "out/r.json", model="m"))
    assert found == bench.Asked(load, 11, Path("out/r.json"))
    with pytest.raises(DataError, match="lacks '--result-dir': vllm bench serve"):
        bench.asked(("vllm", "bench", "serve"))


def test_a_command_line_that_replays_a_trace_has_no_lengths_of_its_own():
    words = (
        "vllm", "bench", "serve", "--dataset-name", "timed_trace", "--dataset-path", "traces/agents.jsonl",
        "--seed", "4", "--max-concurrency", "8", "--num-prompts", "32", "--result-dir", "out",
        "--result-filename", "r.json",
    )  # fmt: skip
    found = bench.asked(words)
    assert (found.load, found.seed) == (bench.TraceLoad(8, 32, "agents"), 4)
    assert found.load.named() == "c8-agents"
    row = bench_runs.run_row(found.load, read(), 1, 4, 90.0, None)
    assert bench_runs.doubts(found.load, read(), row) == []  # a trace repeats prompts on purpose: its reader judges


def test_each_run_of_a_trace_hashes_its_ids_to_other_prompts(client, recorder, counters, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    body = "import os; print(os.environ['PYTHONHASHSEED']); sys.exit(seed)"
    words = (
        *client(body), "--dataset-name", "timed_trace", "--dataset-path", "agents.jsonl", "--max-concurrency", "2",
        "--num-prompts", "4", "--result-dir", str(recorder.folder),
    )  # fmt: skip
    with pytest.raises(RackbookError, match=r"its log:\nStarting.*\n5"):
        bench_runs.follow("http://x", [(*words, "--seed", "5", "--result-filename", "a.json")], recorder)
    (entry,) = recorder._provenance["processes"]
    assert entry["environment"]["PYTHONHASHSEED"] == "5"


def test_a_result_that_cannot_be_read_keeps_its_values_per_request(client, recorder, counters):
    content = result(mean_ttft_ms=-1.0) | {"ttfts": [0.1] * 4}
    with pytest.raises(RackbookError, match="mean_ttft_ms: got -1.0"):
        follow(client(content=content), recorder, [LOAD], 1)
    (kept,) = recorder.folder.glob("bench-*.json")
    assert json.loads(kept.read_text())["ttfts"] == [0.1] * 4


def test_two_runs_with_one_seed_are_refused(client, recorder):
    command = planned(client(), recorder, [LOAD], 1)[0]
    for wrong in ([], [command, command]):
        with pytest.raises(DataError, match=r"got the seeds .* no two with one seed"):
            bench_runs.follow("http://x", wrong, recorder)


def test_warm_prompts_are_flagged(client, recorder, counters):
    counters["hits"] = 90
    frame = follow(client(), recorder, [LOAD], 1)
    assert frame["prefix_hit_percent"].to_list() == [90.0]
    assert recorder._flags == ["c2-100in-10out, repeat 1: 90 % of the prompt tokens came from the prefix cache"]


def test_failed_requests_and_short_answers_are_flagged():
    found = read(completed=3, failed=1, total_output_tokens=29, errors=["", "", "", "x\nServer disconnected"])
    row = bench_runs.run_row(LOAD, found, 1, 0, None, 95.0)
    assert row["num_failed"] == 1
    assert bench_runs.doubts(LOAD, found, row) == [
        "1 of 4 requests failed: 1× Server disconnected",
        "29 output tokens, asked for were 30",
        "the client used 95 % of a core and may itself have been slow",
    ]
    assert "prefix caching is off" in row["missing_reason"]


def test_a_client_that_fails_is_an_error_with_its_log_and_keeps_the_earlier_runs(client, recorder, counters):
    with pytest.raises(RackbookError, match=r"repeat 2: .* ended with status 3; its log:\nStarting.*\nno server"):
        follow(client("if seed == 1: print('no server'); sys.exit(3)"), recorder, [LOAD], 2)
    assert [p.name for p in recorder.folder.glob("bench-*.json")] == ["bench-c2-100in-10out-1.json"]


def test_a_client_that_writes_nothing_is_an_error(client, recorder, counters):
    with pytest.raises(RackbookError, match="no such file; the benchmark client writes it at its end"):
        follow(client("sys.exit(0)"), recorder, [LOAD], 1)


def test_a_client_that_is_not_there(tmp_path):
    with pytest.raises(RackbookError, match="client cannot be started: no-such-client: No such file"):
        bench_client.run_client(["no-such-client"], tmp_path / "log")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_client_that_hangs_is_ended_with_its_children(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\nprint('waiting', flush=True)\ntime.sleep(60)\n"
    )
    with pytest.raises(RackbookError, match="longer than 2 s; the end of its log:\nwaiting"):
        bench_client.run_client([sys.executable, "-c", code], tmp_path / "log", timeout_s=2)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_a_busy_client_is_noticed(tmp_path):
    code = (
        "import time\nprint('Starting main benchmark run...', flush=True)\n"
        "end = time.monotonic() + 0.9\nwhile time.monotonic() < end: {}\n"
    )
    busy = bench_client.run_client([sys.executable, "-c", code.format("pass")], tmp_path / "log")
    idle = bench_client.run_client([sys.executable, "-c", code.format("time.sleep(0.05)")], tmp_path / "log")
    assert busy > 3 * idle
    assert idle < 30


# over repeats


def frame(*rows):
    made = [bench_runs.run_row(LOAD, read(**changes), n, n, 0.0, 5.0) for n, changes in enumerate(rows, start=1)]
    return pl.DataFrame(made, schema={name: column(name).dtype for name in bench_runs.RUN_COLUMNS}, orient="row")


def test_intervals_are_over_runs():
    # three runs: mean 21, s = 1, t(0.975, 2) = 4.30265
    found = bench_runs.summary(frame(*({"output_throughput": v} for v in (20.0, 21.0, 22.0)))).row(0, named=True)
    assert found["output_tok_per_s"] == 21
    assert found["output_high_tok_per_s"] - 21 == pytest.approx(4.30265 / 3**0.5, rel=1e-5)
    assert (found["repeats"], found["num_failed"], found["ttft_p50_s"]) == (3, 0, 0.04)
    assert found["ttft_p50_low_s"] == found["ttft_p50_high_s"] == pytest.approx(0.04)


def test_one_repeat_has_no_bounds_and_says_so():
    found = bench_runs.summary(frame({})).row(0, named=True)
    assert (found["tpot_ms"], found["tpot_low_ms"]) == (5.0, None)
    assert "one repeat has none" in found["missing_reason"]


def test_a_run_without_a_completed_request_is_not_averaged_away():
    failed = {
        "completed": 0, "failed": 4, "total_output_tokens": 0, "output_throughput": 0.0, "total_token_throughput": 0.0,
    }  # fmt: skip
    found = bench_runs.summary(frame({}, failed, {})).row(0, named=True)
    assert (found["output_tok_per_s"], found["tpot_ms"], found["num_failed"], found["repeats"]) == (None, None, 4, 3)
    assert "not measured in every repeat" in found["missing_reason"]
    assert "no request completed" in found["missing_reason"]


def test_the_client_ends_when_its_parent_is_killed(tmp_path):
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys\nfrom pathlib import Path\nfrom rackbook.engine import bench_client\n"
        f"bench_client.run_client([sys.executable, '-c', {child!r}], Path({str(tmp_path / 'log')!r}))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    deadline = time.monotonic() + 20
    while not ((tmp_path / "pid").is_file() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    client = int((tmp_path / "pid").read_text())
    assert alive(client)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while alive(client) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(client)
