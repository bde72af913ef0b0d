"""The replay client against a server that answers or misbehaves as scripted: times, pinning, faults, interruption."""

import os
import signal
import threading
import time

import numpy as np
import polars as pl
import pytest

from completions_server import Answer, CompletionsServer
from rackbook.errors import ParameterError
from rackbook.replay import client
from rackbook.replay.loads import closed_loop, open_loop
from rackbook.replay.prompts import prompts
from rackbook.replay.targets import Settings, Target, bodies, targets
from rackbook.replay.traces import Trace

SETTINGS = Settings("tiny", timeout_s=30.0, lateness_limit_ms=30_000.0)  # other work may run on this machine


def trace(arrivals, lengths=None, sessions=None):
    size = len(arrivals)
    return Trace(
        "by hand",
        "simulated",
        pl.DataFrame(
            {
                "request": range(size),
                "session": pl.Series(sessions or [None] * size, dtype=pl.String),
                "arrival_s": [float(at) for at in arrivals],
                "input_tokens": lengths or [5 + i for i in range(size)],
                "cached_tokens": [0] * size,
                "output_tokens": [1] * size,
            }
        ),
    )


def run(load, urls, settings=SETTINGS, salt=""):
    prepared = bodies(load.trace, prompts(load.trace, 1), settings)
    return client.replay(load, prepared, targets(urls, load.num_ranks), settings, salt=salt)


def test_open_loop_sends_on_time_while_earlier_answers_are_missing():
    with CompletionsServer(lambda seen: Answer(delay_s=2.0)) as server:
        done = run(open_loop(trace([0.0, 0.1, 0.2]), 1), [server.url])
    frame = done.requests
    assert done.flags == ()
    assert frame["scheduled_s"].to_list() == [0.0, 0.1, 0.2]
    assert (frame["sent_s"] >= frame["scheduled_s"]).all()
    assert frame["sent_s"][2] < frame["done_s"][0]
    assert ((frame["done_s"] - frame["sent_s"]) >= 1.99).all()
    assert frame["input_tokens"].to_list() == [5, 6, 7]


def test_closed_loop_sends_the_next_turn_after_the_answer_and_the_time_to_think():
    turns = trace([0, 0, 0, 0], sessions=["a", "b", "a", "b"])
    load = closed_loop(turns, 2, 0.3, users=2, think_s=0.2)
    thinks = dict(zip(load.request.tolist(), (load.think_ns * 1e-9).tolist(), strict=True))
    with CompletionsServer(lambda seen: Answer(delay_s=0.1)) as server:
        frame = run(load, [server.url]).requests
    of = {(r["rank"], r["request"]): r for r in frame.iter_rows(named=True)}
    for rank in (0, 1):
        for first in (0, 1):
            assert of[rank, first]["scheduled_s"] == pytest.approx(of[0, first]["scheduled_s"] + 0.3 * rank)
        for first, second in ((0, 2), (1, 3)):
            assert of[rank, second]["scheduled_s"] == pytest.approx(
                of[rank, first]["done_s"] + thinks[second], abs=1e-6
            )
            assert of[rank, second]["sent_s"] >= of[rank, second]["scheduled_s"]


def test_a_mirrored_turn_goes_out_to_all_ranks_when_the_last_of_them_has_answered():
    turns = trace([0, 0, 0, 0, 0, 0], sessions=["a", "b", "a", "b", "a", "b"])
    load = closed_loop(turns, 2, users=2, think_s=0.05)
    thinks = dict(zip(load.request.tolist(), (load.think_ns * 1e-9).tolist(), strict=True))
    with (
        CompletionsServer(lambda seen: Answer(delay_s=0.05)) as fast,
        CompletionsServer(lambda seen: Answer(delay_s=0.15)) as slow,
    ):
        done = run(load, [fast.url, slow.url])
    assert done.stopped == ""
    of = {(r["rank"], r["request"]): r for r in done.requests.iter_rows(named=True)}
    for first, second in ((0, 2), (1, 3), (2, 4), (3, 5)):
        answered = max(of[rank, first]["done_s"] for rank in (0, 1))
        for rank in (0, 1):
            assert of[rank, second]["scheduled_s"] == pytest.approx(answered + thinks[second], abs=1e-6)


def test_ranks_get_the_same_prompts_pinned_by_header_and_connections_are_kept():
    with CompletionsServer(lambda seen: Answer()) as server:
        run(closed_loop(trace([0] * 6), 2, users=1), [server.url], salt="s-1")
        pinned = {0: [], 1: []}
        for seen in server.seen:
            pinned[int(seen.headers["x-data-parallel-rank"])].append(seen.body)
        assert server.num_connections == 2
    assert sorted(map(str, pinned[0])) == sorted(map(str, pinned[1]))
    assert len({str(body["prompt"]) for body in pinned[0]}) == 6
    body = pinned[0][0]
    assert body["cache_salt"] == "s-1"
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("tiny", 1, True, True)


def test_a_server_per_rank_gets_its_rank_without_a_header():
    with CompletionsServer(lambda seen: Answer()) as one, CompletionsServer(lambda seen: Answer()) as other:
        done = run(open_loop(trace([0, 0]), 2), [one.url, other.url])
        assert len(one.seen) == len(other.seen) == 2
        assert not any("x-data-parallel-rank" in seen.headers for seen in one.seen + other.seen)
    assert done.flags == ()


def test_targets_of_one_several_and_hybrid_servers():
    assert targets(["http://a:1/"], 2) == (Target("http://a:1", 0), Target("http://a:1", 1))
    assert targets(["http://a:1", "http://b:1"], 2) == (Target("http://a:1", None), Target("http://b:1", None))
    assert [t.pinned_rank for t in targets(["http://a:1", "http://b:1"], 4)] == [0, 1, 0, 1]
    with pytest.raises(ParameterError, match="3 servers for 4 ranks"):
        targets(["http://a:1"] * 3, 4)
    with pytest.raises(ParameterError, match=r"got 'a:1', allowed: an address such as http"):
        targets(["a:1"], 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("answer", [Answer(), Answer(in_pieces=True), Answer(close=True)])
def test_answers_in_every_form_are_read(stream, answer):
    settings = Settings("tiny", stream=stream, timeout_s=5, lateness_limit_ms=30_000)
    with CompletionsServer(lambda seen: answer) as server:
        done = run(closed_loop(trace([0] * 3), 1, users=1), [server.url], settings)
        assert server.num_connections == (3 if answer.close else 1)
    frame = done.requests
    assert done.flags == ()
    assert frame["output_tokens"].to_list() == [1, 1, 1]
    assert frame["first_token_s"].null_count() == (0 if stream else 3)
    if stream:
        assert (frame["first_token_s"] > frame["sent_s"]).all()
        assert (frame["first_token_s"] <= frame["done_s"]).all()


def test_an_answer_that_ends_with_its_connection_is_whole():
    settings = Settings("tiny", stream=False, timeout_s=5, lateness_limit_ms=30_000)
    with CompletionsServer(lambda seen: Answer(unsized=True)) as server:
        done = run(closed_loop(trace([0] * 2), 1, users=1), [server.url], settings)
        assert server.num_connections == 2
    assert done.flags == ()
    assert done.requests["input_tokens"].to_list() == [5, 6]


def test_the_first_token_is_noted_before_the_rest_arrives():
    with CompletionsServer(lambda seen: Answer(in_pieces=True)) as server:
        row = run(open_loop(trace([0]), 1), [server.url]).requests.row(0, named=True)
    assert row["done_s"] - row["first_token_s"] > 0.01  # about twenty pieces, a millisecond apart


FAULTS = {
    "reset": (Answer("reset"), "connection lost before the answer began"),
    "cut": (Answer("cut"), "connection lost in the middle of the answer"),
    "status": (Answer("status", status=503), "HTTP 503: .*out of order"),
    "event": (Answer("event"), "the server reports an error: .*the engine died"),
    "garbage": (Answer("garbage"), "not an HTTP/1.1 answer"),
    "die": (Answer("die"), "connection lost|cannot connect"),
    "hang": (Answer("hang"), "no whole answer within 2 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_replay_promptly_and_keeps_what_was_measured(fault):
    answer, message = FAULTS[fault]
    settings = Settings("tiny", timeout_s=2.0, lateness_limit_ms=30_000)
    with CompletionsServer(lambda seen: answer if seen.number >= 4 else Answer(delay_s=0.05)) as server:
        done = run(closed_loop(trace([0] * 10 + [60]), 2, users=1), [server.url], settings)
    frame = done.requests
    assert not done.usable
    assert frame.filter(pl.col("error").is_null()).height == frame["output_tokens"].drop_nulls().len() >= 3
    failed = frame.filter(pl.col("error").str.contains(message))
    assert failed.height == 1, frame["error"].to_list()
    assert done.flags[0].startswith(f"ended early: request {failed['request'][0]} on rank {failed['rank'][0]}: ")
    assert frame.filter(pl.col("error") == "not sent: the replay had ended").height >= 15


def test_half_of_the_requests_failing_is_one_failure_too_many():
    with CompletionsServer(lambda seen: Answer("status") if seen.number % 2 else Answer()) as server:
        done = run(open_loop(trace(np.arange(40) / 100), 1), [server.url])
    assert done.flags[0].startswith("ended early: request ")
    assert done.requests["done_s"].drop_nulls().len() < 5


def test_a_rank_that_refuses_is_named():
    with CompletionsServer(lambda seen: Answer(delay_s=0.01)) as server:
        gone = CompletionsServer()
        with gone:
            pass
        done = run(open_loop(trace([0, 0, 5]), 2), [server.url, gone.url])
    assert "on rank 1: cannot connect" in done.flags[0]


def test_a_kept_connection_that_the_server_had_closed_is_no_failure():
    closed_once = []

    def script(seen):
        if seen.number == 1 and not closed_once:
            closed_once.append(seen)
            return Answer("reset")
        return Answer()

    with CompletionsServer(script) as server:
        done = run(closed_loop(trace([0] * 3), 1, users=1), [server.url])
    assert (done.num_resent, done.flags) == (1, ())


def test_a_client_that_falls_behind_says_so():
    settings = Settings("tiny", timeout_s=5, lateness_limit_ms=1e-4)
    with CompletionsServer(lambda seen: Answer()) as server:
        done = run(open_loop(trace([0, 0.01, 0.02]), 1), [server.url], settings)
    assert done.flags[0].startswith("client fell behind: lateness p99 ")
    assert done.flags[0].endswith("limit 0.0001 ms")
    assert done.stopped == ""


def test_another_number_of_prompt_tokens_is_a_doubt():
    one, other = trace([0]), trace([0], lengths=[6])
    with CompletionsServer(lambda seen: Answer()) as server:
        prepared = bodies(other, prompts(other, 1), SETTINGS)
        done = client.replay(open_loop(one, 1), prepared, targets([server.url], 1), SETTINGS)
    assert done.flags == ("the server counted 6 prompt tokens of request 0, sent were 5",)


@pytest.fixture
def heeds_ctrl_c():
    """A shell lets what it starts in the background ignore Ctrl-C, and with it the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_keeps_what_was_measured():
    def script(seen):
        if seen.number == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return Answer()

    with CompletionsServer(script) as server:
        begin = time.monotonic()
        done = run(open_loop(trace([0, 0.1, 300]), 1), [server.url])
        assert time.monotonic() - begin < 150
    assert done.interrupted
    assert done.flags == ("ended early: interrupted by the user",)
    assert done.requests["done_s"].null_count() == 1


def test_replays_leave_no_thread_and_no_socket_behind():
    with CompletionsServer(lambda seen: Answer()) as server:
        before = threading.active_count()
        run(open_loop(trace([0, 0]), 2), [server.url])
        deadline = time.monotonic() + 30
        while (threading.active_count() > before or server.connections) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert threading.active_count() == before
        assert not server.connections
