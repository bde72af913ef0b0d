"""Traces: readers, scaling, generators."""

import numpy as np
import polars as pl
import pytest

from rackbook.errors import DataError, ParameterError
from rackbook.replay import trace_files, traces
from rackbook.replay.queues import queue

MOONCAKE = """\
{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1600, "output_length": 7, "hash_ids": [0, 1, 9, 3]}
{"timestamp": 1500, "input_length": 1536, "output_length": 1, "hash_ids": [0, 1, 9]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.2300600,110,27
"""


def written(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_mooncake_times_are_ms_and_the_prefix_is_what_earlier_requests_had(tmp_path):
    trace = trace_files.read(written(tmp_path, "m.jsonl", MOONCAKE))
    assert trace.requests["arrival_s"].to_list() == [0.0, 1.5, 1.5]
    # two known blocks of 512; the last one knows all three, but one token must be computed
    assert trace.requests["cached_tokens"].to_list() == [0, 1024, 1535]
    assert trace.requests["output_tokens"].to_list() == [5, 7, 1]
    assert trace.requests["session"].null_count() == 3
    assert trace.origin == "measured"


def test_azure_counts_from_its_first_request_and_knows_no_prefix(tmp_path):
    trace = trace_files.read(written(tmp_path, "a.csv", AZURE))
    assert trace.requests["arrival_s"].to_list() == pytest.approx([0.0, 1.2501], abs=1e-6)
    assert trace.requests["input_tokens"].to_list() == [4808, 110]
    assert trace.requests["cached_tokens"].null_count() == 2
    with pytest.raises(DataError, match=r"Azure trace a\.csv: prefix caching needs cached_tokens"):
        queue(trace, prefix_caching=True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", MOONCAKE + "{}\n", r"line 4: got '\{\}' \(KeyError.*expected a JSON object with timestamp, input"),
        ("x.jsonl", "nonsense\n", "line 1: got 'nonsense'"),
        (
            "x.jsonl",
            MOONCAKE.replace("1200", "0"),
            "request 0, column input_tokens: got 0, allowed: a whole number ≥ 1",
        ),
        ("x.jsonl", MOONCAKE.replace('"timestamp": 0', '"timestamp": 2000'), r"request 1, column arrival_s: got -0\.5"),
        ("x.jsonl", MOONCAKE.replace("1200", "1800"), "line 1: got 3 hash ids for 1800 tokens, expected one per 512"),
        ("x.jsonl", "", "no requests"),
        (
            "x.csv",
            AZURE.replace("ContextTokens", "Tokens"),
            "row 1: got columns TIMESTAMP,Tokens,GeneratedTokens, expected",
        ),
        ("x.csv", AZURE.replace("110", "many"), "row 3: got '2023-11-16 18:17:05.2300600,many,27'"),
        ("x.csv", AZURE.replace("2023-11-16 18:17:05", "yesterday"), "row 3: .*expected a date and time"),
        ("x.parquet", "", r"unknown ending of a trace file: got '\.parquet', allowed: \.csv, \.jsonl"),
    ],
)
def test_bad_files_name_the_place(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        trace_files.read(written(tmp_path, name, text))


TIMED = """\
{"chat_id": 5, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 30, "output_length": 5, "hash_ids": [1, 2]}
{"chat_id": 6, "parent_chat_id": -1, "timestamp": 62.0, "input_length": 16, "output_length": 2, "hash_ids": [3]}
{"chat_id": 7, "parent_chat_id": 5, "timestamp": 63.5, "input_length": 50, "output_length": 9, "hash_ids": [1, 2, 4, 8]}
{"chat_id": 8, "parent_chat_id": 7, "timestamp": 64.0, "input_length": 40, "output_length": 1, "hash_ids": [1, 5, 6]}
"""


def test_timed_traces_have_seconds_blocks_of_16_and_chats_that_go_on(tmp_path):
    trace = trace_files.read(written(tmp_path, "t.jsonl", TIMED))
    assert trace.name == "timed trace t.jsonl"
    assert trace.requests["arrival_s"].to_list() == [0, 0.5, 2, 2.5]
    assert trace.requests["cached_tokens"].to_list() == [0, 0, 32, 16]
    assert trace.requests["session"].to_list() == ["5", "6", "5", "5"]


def test_other_blocks_and_units_of_a_timed_trace_are_given(tmp_path):
    path = written(tmp_path, "t.jsonl", TIMED)
    trace = trace_files.read_timed(path, block_tokens=8, seconds_per_unit=0.1)
    assert trace.requests["arrival_s"].to_list() == pytest.approx([0, 0.05, 0.2, 0.25])
    assert trace.requests["cached_tokens"].to_list() == [0, 0, 16, 8]
    with pytest.raises(ParameterError, match="block_tokens = 0"):
        trace_files.read_timed(path, block_tokens=0)


def test_absent_file(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        trace_files.read(tmp_path / "none.csv")


def test_scaling_by_hand(tmp_path):
    trace = trace_files.read(written(tmp_path, "m.jsonl", MOONCAKE)).scaled(rate=3, length=0.5)
    assert trace.requests["arrival_s"].to_list() == [0.0, 0.5, 0.5]
    assert trace.requests["input_tokens"].to_list() == [600, 800, 768]
    assert trace.requests["cached_tokens"].to_list() == [0, 512, 767]
    assert trace.name.endswith("rate × 3, length × 0.5")
    tiny = trace.scaled(length=1e-6).requests
    assert tiny["input_tokens"].to_list() == [1, 1, 1]
    assert tiny["cached_tokens"].to_list() == [0, 0, 0]
    unknown = trace_files.read(written(tmp_path, "a.csv", AZURE)).scaled(length=2).requests
    assert unknown["cached_tokens"].null_count() == 2, "an unknown prefix stays unknown"
    with pytest.raises(ParameterError, match="rate: got 0"):
        trace.scaled(rate=0)


def test_prefix_caching_leaves_the_new_tokens(tmp_path):
    trace = trace_files.read(written(tmp_path, "m.jsonl", MOONCAKE))
    assert queue(trace, prefix_caching=True).new_tokens.tolist() == [1200, 576, 1]
    assert queue(trace, prefix_caching=False).new_tokens.tolist() == [1200, 1600, 1536]
    assert queue(trace, prefix_caching=True).arrival_ns.tolist() == [0, 1_500_000_000, 1_500_000_000]


def drawn(seed=1, num=4_000, **options):
    return traces.agentic(np.random.default_rng(seed), num, requests_per_s=30.0, **options)


def test_sessions_grow_by_what_was_answered_and_added():
    frame = drawn().requests
    assert frame.height == 4_000
    # the trace cuts the stream anywhere: turns that follow each other in a session fit together
    pairs = frame.with_columns(
        (pl.col("input_tokens") + pl.col("output_tokens")).shift(1).over("session").alias("before"),
    ).drop_nulls("before")
    assert pairs.height > 3_000
    assert (pairs["cached_tokens"] == pairs["before"]).all()
    assert (frame["cached_tokens"] >= traces.Sessions().shared_prefix_tokens).all()


def test_the_stream_is_steady_from_its_beginning():
    frame = drawn(num=20_000).requests
    early, late = frame.head(5_000), frame.tail(5_000)
    assert early["input_tokens"].mean() == pytest.approx(late["input_tokens"].mean(), rel=0.15)
    rate = frame.height / frame["arrival_s"][-1]
    assert rate == pytest.approx(30.0, rel=0.15)


def test_lengths_are_near_what_the_docstring_says():
    frame = drawn(num=20_000).requests
    assert frame["input_tokens"].quantile(0.5, interpolation="linear") == pytest.approx(88_000, rel=0.15)
    assert frame["input_tokens"].quantile(0.75, interpolation="linear") == pytest.approx(134_000, rel=0.15)


def test_a_seed_repeats_and_another_differs():
    assert drawn(1, 200).requests.equals(drawn(1, 200).requests)
    assert not drawn(1, 200).requests.equals(drawn(2, 200).requests)


def test_sessions_end_at_the_context_limit():
    limit = 60_000
    frame = drawn(sessions=traces.Sessions(max_context_tokens=limit)).requests
    assert 0.8 * limit < frame["input_tokens"].max() <= limit


@pytest.mark.parametrize(("law", "squared"), [("fixed", 1.0), ("exponential", 2.0), ("lognormal", np.e)])
def test_independent_lengths_have_the_mean_and_the_spread_of_their_law(law, squared):
    tokens = traces.independent(np.random.default_rng(0), 40_000, law, 5_000).requests["input_tokens"].to_numpy()
    assert tokens.mean() == pytest.approx(5_000, rel=0.03)
    assert (tokens.astype(float) ** 2).mean() / tokens.mean() ** 2 == pytest.approx(squared, rel=0.15)


def test_independent_lengths_are_capped():
    frame = traces.independent(
        np.random.default_rng(0), 2_000, "lognormal", 5_000, sigma=2.0, max_context_tokens=9_000
    ).requests
    assert frame["input_tokens"].max() == 9_000


def test_bad_generators_are_refused():
    generator = np.random.default_rng(0)
    with pytest.raises(
        ParameterError, match="unknown length law: got 'pareto', allowed: exponential, fixed, lognormal"
    ):
        traces.independent(generator, 5, "pareto", 100)
    with pytest.raises(ParameterError, match="num_requests = 0"):
        traces.independent(generator, 0, "fixed", 100)
    with pytest.raises(ParameterError, match="max_context_tokens = 100: got 0 requests that fit"):
        traces.agentic(generator, 5, sessions=traces.Sessions(max_context_tokens=100))
    with pytest.raises(ParameterError, match="requests_per_s = 0"):
        traces.agentic(generator, 5, requests_per_s=0)


@pytest.mark.parametrize(
    ("name", "height", "mean_input"),
    [
        ("mooncake_conversation_head2000.jsonl", 2000, 13720.887),
        ("mooncake_synthetic_head2000.jsonl", 2000, 12366.358),
        ("azure_code_head2000.csv", 1999, 1986.723),
    ],
)
def test_recorded_traces(realdata, name, height, mean_input):
    trace = trace_files.read(realdata / "traces" / name)
    assert trace.requests.height == height
    assert trace.requests["input_tokens"].mean() == pytest.approx(mean_input, abs=1e-3)
