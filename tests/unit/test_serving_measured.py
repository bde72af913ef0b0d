"""What measurements of servers make of a trace, of the servers' own lines, and of runs that stand alone."""

import json

import polars as pl
import pytest

from rackbook import plans, runs
from rackbook.commands import measurements as commands
from rackbook.errors import DataError, ParameterError
from rackbook.measurements import server_lines, serving_pareto, single_user
from rackbook.plans.serving_pareto import tokens_per_id
from rackbook.replay import trace_files


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RACKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(runs, "COMMITTED", tmp_path / "none")


# traces


@pytest.fixture
def trace(tmp_path):
    def write(*requests):
        path = tmp_path / "agents.jsonl"
        lines = [
            {"timestamp": n, "input_length": tokens, "output_length": 4, "hash_ids": ids}
            for n, (tokens, ids) in enumerate(requests)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


def test_the_lines_tell_what_an_id_stands_for(trace):
    assert tokens_per_id(trace((40, [0, 1, 2]), (10, [0]))) == 16
    assert tokens_per_id(trace((10, [0]), (600, [0, 1]))) == 512


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([(40, [0, 1, 2]), (40, [0, 1])], "agents.jsonl, line 2: got 2 hash ids for 40 tokens, expected one per 16"),
        ([(600, [0, 1]), (40, [0, 1, 2])], "line 2: got 3 hash ids for 40 tokens"),  # one line of each kind
        ([(40, None)], "line 1: got .* expected a JSON object with timestamp"),
    ],
)
def test_a_trace_whose_prompts_would_be_cut_is_refused(trace, requests, words):
    with pytest.raises(DataError, match=words):
        tokens_per_id(trace(*requests))


def test_the_real_traces_of_mooncake_have_512_tokens_per_id(realdata):
    assert tokens_per_id(realdata / "traces" / "mooncake_conversation_head2000.jsonl") == 512


def test_a_plan_tells_the_client_what_an_id_stands_for(trace):
    path = trace(*[(600, [0, n]) for n in range(1, 9)])
    settings = {"workload_path": str(path), "measured_concurrency": [2], "measured_repeats": 1}
    plan = plans.plan("serving_pareto", settings, "gb300-nvl72")
    words = plan.stages[0].steps[0][0].arguments
    assert words[words.index("--timed-trace-chunk-hash-size") + 1] == "512"
    assert serving_pareto.requests(path, plan).requests.height == 8
    longer = plans.plan("serving_pareto", settings | {"measured_concurrency": [2, 3]}, "gb300-nvl72")
    with pytest.raises(ParameterError, match="got 8 requests in .*agents.jsonl, allowed: at least 12, four for each"):
        serving_pareto.requests(path, longer)


def client_run(repeat, hits):
    return {
        "bench_stage": "served",
        "concurrency": 1,
        "repeat": repeat,
        "num_prompts": 2,
        "prefix_hit_percent": hits,
    }


def test_more_hits_than_the_trace_repeats_mean_a_warm_start(trace):
    # of the first two requests, 2 × 64 tokens, the second repeats 3 ids of 16 tokens: 37.5 %
    path = trace((64, [0, 1, 2, 3]), (64, [0, 1, 2, 4]), (64, [0, 1, 2, 3]))
    whole = trace_files.read_timed(path, block_tokens=16)
    rows = pl.DataFrame([client_run(1, 37.0), client_run(2, 60.0), client_run(3, None)])
    assert serving_pareto.warm(rows, whole) == [
        "served, 1 at once, repeat 2: 60 % of the prompt tokens came from the prefix cache, the trace itself repeats "
        "38 %"
    ]


# what servers log


def throughput(queued, kv, hits="50.0"):
    return (
        "(APIServer pid=1) INFO 11-29 23:59:45 [loggers.py:335] Engine 000: Avg prompt throughput: 25.6 tokens/s, Avg "
        f"generation throughput: 12.8 tokens/s, Running: 4 reqs, Waiting: {queued} reqs, GPU KV cache usage: {kv}%, "
        f"Prefix cache hit rate: {hits}%\n"
    )


DRAFTS = (
    "INFO 11-29 19:31:05 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.46, "
    "Accepted throughput: 10.00 tokens/s, Drafted throughput: 13.70 tokens/s, Accepted: 100 tokens, "
    "Drafted: 137 tokens, Per-position acceptance rate: 0.809, 0.650, Avg Draft acceptance rate: 73.0%\n"
)


def kept(logs):
    """A run of 12 on one node whose servers left these logs."""
    plan = plans.plan("single_node", {"measured_captures": [12, 64]}, "b300x8")
    with runs.record("single_node", {}, machine={}) as run:
        for name, text in logs.items():
            run.write_text(name, text)
        server_lines.keep(plan, run)
        run.write_points(pl.DataFrame({"repeat": [1]}))
    return runs.read(run.id)


def test_the_servers_own_lines_become_tables_of_the_run():
    run = kept({"capture12.server.log": throughput(0, "10.0"), "capture64.server.log": throughput(3, "20.0") + DRAFTS})
    found = run.points("throughput")
    assert found.select("bench_stage", "locator", "output_tok_per_s", "num_queued").rows() == [
        ("capture12", "capture12.server.log, line 1", 12.8, 0),
        ("capture64", "capture64.server.log, line 1", 12.8, 3),
    ]
    drafts = run.points("speculation")
    assert drafts.select("bench_stage", "draft_position", "acceptance_length").rows() == [
        ("capture64", 1, 2.46),
        ("capture64", 2, 2.46),
    ]
    assert run.flags == ()


def test_requests_that_wait_for_room_in_the_cache_are_a_doubt():
    text = throughput(2, "95.0") + throughput(9, "99.1") + throughput(30, "50.0")
    run = kept({"capture12.server.log": text, "capture64.server.log": throughput(0, "100.0")})
    assert run.flags == (
        "capture12: 9 requests waited while the KV cache was 99 % full, so fewer ran at once than the clients kept "
        "under way",
    )


def test_a_line_of_an_unknown_form_loses_no_run_and_is_flagged():
    strange = throughput(0, "10.0").replace("Running: 4 reqs", "Active: 4")
    run = kept({"capture12.server.log": strange, "capture64.server.log": throughput(0, "10.0")})
    assert run.points("throughput")["bench_stage"].to_list() == ["capture64"]
    (flag,) = run.flags
    assert flag.startswith("capture12.server.log, line 1: a line about throughput of an unknown form")


def test_without_such_lines_there_is_no_table():
    assert set(kept({"capture12.server.log": "ready\n"}).files) == {"capture12.server.log", "points.csv"}


# single runs


def test_11_flags_servers_that_ran_once_or_whose_runs_disagree():
    base = {
        "hardware": "B300", "model": "m", "num_gpus": 4, "concurrency": 1, "num_failed": 0, "tpot_p90_ms": 2.5,
        "acceptance_length": 1.5, "missing_reason": None,
    }  # fmt: skip
    times = {"specialised": [2.0], "baseline": [2.0, 2.5], "steady": [2.0, 2.0, 2.0]}
    rows = [base | {"bench_stage": stage, "tpot_ms": time} for stage, each in times.items() for time in each]
    # 500 and 400 tokens/s: 450 ± 12.706 · 50
    assert single_user.doubts(single_user.points(pl.DataFrame(rows))) == [
        "specialised: one run, its spread is not known",
        "baseline: 450.0 ± 635.3 tokens/s over 2 runs, limit ± 20 %",
    ]


# rackbook runs


def test_runs_are_listed_by_notebook_and_a_misspelt_one_is_named(capsys):
    with runs.record("context_sweep", {}, machine={"cpu": "made up"}) as run:
        run.write_points(pl.DataFrame({"repeat": [1]}))

    def listed(name):
        from argparse import Namespace

        commands._runs(Namespace(name=name))
        return capsys.readouterr().out

    assert run.id in listed("context_sweep")
    assert run.id in listed("01")
    assert run.id in listed(None)
    assert listed("engine_gap") == ""
    with pytest.raises(DataError, match="unknown notebook: got 'contxt_sweep'.*Did you mean '01_context_sweep'"):
        listed("contxt_sweep")
