"""Prompts and loads of a replay: deterministic, distinct, the same on every rank; due times by hand."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackbook.errors import ParameterError
from rackbook.replay import traces
from rackbook.replay.loads import NONE, closed_loop, open_loop
from rackbook.replay.prompts import Vocabulary, prompts
from rackbook.replay.traces import Trace


def trace(input_tokens, cached=None, sessions=None, arrivals=None):
    size = len(input_tokens)
    frame = {
        "request": range(size),
        "session": pl.Series(sessions or [None] * size, dtype=pl.String),
        "arrival_s": [float(at) for at in arrivals or [0] * size],
        "input_tokens": input_tokens,
        "cached_tokens": pl.Series(cached if cached is not None else [0] * size, dtype=pl.Int64),
        "output_tokens": [1] * size,
    }
    return Trace("by hand", "simulated", pl.DataFrame(frame))


def test_prompts_are_those_of_the_seed_and_have_the_trace_s_lengths():
    requests = trace([3, 40, 40])
    one, same, other = (prompts(requests, seed) for seed in (1, 1, 2))
    assert [p.tolist() for p in one] == [p.tolist() for p in same]
    assert one[1].tolist() != other[1].tolist()
    assert [p.size for p in one] == [3, 40, 40]
    assert all(p.min() >= 100 and p.max() < 1000 for p in one)


@settings(deadline=None, max_examples=25)
@given(num=st.integers(1, 400), ids=st.integers(8, 20))
def test_all_prompts_differ_within_their_first_three_tokens(num, ids):
    drawn = prompts(trace([3] * num), 5, vocabulary=Vocabulary(7, ids))
    assert len({tuple(p[:3]) for p in drawn}) == num


def test_too_few_token_ids_to_tell_requests_apart_are_refused():
    with pytest.raises(ParameterError, match="9 requests cannot be told apart by 3 tokens of 2 ids"):
        prompts(trace([3] * 9), 5, vocabulary=Vocabulary(0, 2))


def test_known_prefixes_are_shared_within_a_session_and_the_common_part_between_sessions():
    requests = trace([60, 70, 100, 90], cached=[20, 20, 70, 75], sessions=["a", "b", "a", "b"])
    a1, b1, a2, b2 = (p.tolist() for p in prompts(requests, 3, known_prefixes=True))
    assert a2[:60] == a1
    assert b2[:70] == b1
    assert a1[:20] == b1[:20]
    assert a1[20:23] != b1[20:23]


def test_known_prefixes_without_sessions_come_from_one_stream():
    one, two = (p.tolist() for p in prompts(trace([30, 50], cached=[0, 24]), 3, known_prefixes=True))
    assert len(two) == 50
    assert one[:3] != two[:3]
    with pytest.raises(ParameterError, match="does not know them"):
        prompts(trace([30], cached=[None]), 3, known_prefixes=True)


def test_open_loop_by_hand():
    load = open_loop(trace([5, 5], arrivals=[0, 2]), 2, 1.5)
    sends = list(zip((load.at_ns / 1e9).tolist(), load.rank.tolist(), load.request.tolist(), strict=True))
    assert sends == [(0, 0, 0), (1.5, 1, 0), (2, 0, 1), (3.5, 1, 1)]
    assert (load.previous == NONE).all()


def test_closed_loop_by_hand():
    requests = trace([5] * 5, sessions=["a", "b", "a", "c", "b"])
    load = closed_loop(requests, 2, 3.0, users=2)
    # user 0: session a, then c; user 1: session b
    assert load.request.tolist() == [0, 2, 3, 0, 2, 3, 1, 4, 1, 4]
    assert load.rank.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert load.previous.tolist() == [NONE, 0, 1, NONE, 3, 4, NONE, 6, NONE, 8]
    assert load.at_ns.tolist() == [0, NONE, NONE, 3_000_000_000, NONE, NONE, 0, NONE, 3_000_000_000, NONE]
    assert load.think_ns.tolist() == [0] * 10
    assert load.num_chains == 4
    assert not load.together
    assert closed_loop(requests, 2, users=2).together, "mirrored turns go out to all ranks at once"


def test_users_think_alike_on_all_ranks_and_in_every_replay():
    requests = trace([5] * 400, sessions=[f"s{i % 40}" for i in range(400)])
    mirror, lagged, other = (
        closed_loop(requests, 2, lag_s, users=20, think_s=0.5, seed=seed) for lag_s, seed in ((0, 1), (3.0, 1), (0, 2))
    )
    first = mirror.previous == NONE
    waits = np.where(first, mirror.at_ns, mirror.think_ns)
    assert (waits >= 0).all()
    assert (waits <= 1e9).all()
    assert waits.mean() == pytest.approx(5e8, rel=0.1)
    for rank in (0, 1):
        order = np.argsort(mirror.request[mirror.rank == rank])
        assert (
            waits[mirror.rank == rank][order] == waits[mirror.rank == 0][np.argsort(mirror.request[mirror.rank == 0])]
        ).all()
    assert (lagged.think_ns == mirror.think_ns).all()
    assert (lagged.at_ns[first] == mirror.at_ns[first] + 3_000_000_000 * mirror.rank[first]).all()
    assert (other.think_ns != mirror.think_ns).any()


def test_every_rank_gets_every_request_once_in_both_loops():
    drawn = traces.agentic(np.random.default_rng(1), 50)
    for load in (open_loop(drawn, 3, 5.0), closed_loop(drawn, 3, 5.0, users=4)):
        assert sorted(zip(load.rank.tolist(), load.request.tolist(), strict=True)) == [
            (rank, request) for rank in range(3) for request in range(50)
        ]


def test_bad_loads_are_refused():
    with pytest.raises(ParameterError, match="users: got 3, allowed: 1 to 2, the sessions of by hand"):
        closed_loop(trace([5, 5]), 1, users=3)
    with pytest.raises(ParameterError, match="lag_s: got -1"):
        open_loop(trace([5]), 1, -1)
    with pytest.raises(ParameterError, match="num_ranks: got 0"):
        open_loop(trace([5]), 0)
    with pytest.raises(ParameterError, match="think_s: got inf"):
        closed_loop(trace([5]), 1, users=1, think_s=float("inf"))
