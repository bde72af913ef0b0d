"""Repeats, copies of a prompt, block tables and KV rows measured; laws of growth; foreign load; what a burst costs."""

import itertools
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackbook.errors import DataError, ParameterError
from rackbook.hostwork import block_tables, burst_costs, kv_rows, prompt_copies, sampling
from rackbook.hostwork.foreign_load import Watch
from rackbook.hostwork.sampling import interleaved
from rackbook.models.growth_fit import LINEAR, LOGARITHMIC, compare_growth
from rackbook.replay.traces import Trace
from rackbook.tables import COLUMNS

# ── repeats ─────────────────────────────────────────────────────────────────────────────────────────────────────


def clock(step=1.0):
    ticks = itertools.count()
    return lambda: next(ticks) * step


def test_each_round_starts_with_another_variant():
    order = []
    variants = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    found = interleaved(variants, budget_s=100, max_repeats=4, clock=clock())
    assert "".join(order) == "abcbcacababc"
    assert {len(samples.values) for samples in found.values()} == {4}


def test_repeats_end_when_all_intervals_are_narrow_and_not_before():
    noisy = itertools.chain([1.0, 2.0] * 6, itertools.repeat(1.5))
    found = interleaved({"still": lambda: 3.0, "noisy": lambda: next(noisy)}, budget_s=1e9, clock=clock())
    assert found["still"].tight
    assert found["noisy"].tight
    count = len(found["noisy"].values)
    assert 12 < count < 200, "the noisy variant needs more than the fewest repeats, and keeps the still one going"
    assert len(found["still"].values) == count
    low, high = found["noisy"].interval.low, found["noisy"].interval.high
    assert (high - low) / 2 <= 0.03 * found["noisy"].interval.estimate


def test_repeats_end_with_the_budget_and_say_that_the_spread_is_too_wide():
    values = itertools.cycle([1.0, 2.0])
    found = interleaved({"noisy": lambda: next(values)}, budget_s=9, clock=clock())["noisy"]
    assert len(found.values) == 9
    assert not found.tight


def test_every_variant_is_measured_once_however_short_the_budget():
    found = interleaved({"a": lambda: 1.0, "b": lambda: 2.0}, budget_s=1e-9, clock=clock())
    assert [samples.values for samples in found.values()] == [(1.0,), (2.0,)]
    assert found["a"].interval.low is None
    assert not found["a"].tight


@pytest.mark.parametrize("wrong", [{"budget_s": 0}, {"budget_s": math.nan}, {"budget_s": 1, "max_repeats": 0}])
def test_a_measurement_without_time_or_variants_is_refused(wrong):
    with pytest.raises(ParameterError, match="allowed: one variant or more, a budget > 0, one repeat or more"):
        interleaved({"a": lambda: 1.0}, **wrong)
    with pytest.raises(ParameterError, match="got 0 variants"):
        interleaved({}, budget_s=1)


# ── copies of a prompt ──────────────────────────────────────────────────────────────────────────────────────────


def test_every_way_to_copy_a_prompt_gives_the_prompt():
    prompt = prompt_copies._Prompt(20_000, np.random.default_rng(1))
    wanted = prompt.tokens
    assert max(wanted) > 100_000
    for (_, allocation), copy in prompt_copies.METHODS.items():
        prompt.buffer[:] = -1
        got = copy(prompt)
        assert list(got) == wanted
        assert (got is prompt.buffer) == (allocation == "reused")
        assert got is not prompt.tokens
        assert got is not prompt.array


def test_copies_are_measured_for_every_method_cache_and_length():
    found = prompt_copies.measure([4096, 65_536], budget_s=1.0)
    assert found.height == 6 * 2 * 2
    assert set(found.columns) <= set(COLUMNS)
    took = {
        row[:4]: row[4]
        for row in found.select("copy", "allocation", "cache_state", "prompt_tokens", "copy_p50_ms").rows()
    }
    slow, fast = took["list → int32", "new", "warm", 65_536], took["int32 → int32", "reused", "warm", 65_536]
    assert slow > 10 * fast, "a list of Python numbers is converted one by one"
    short = took["list → int32", "new", "warm", 4096]
    assert 4 < slow / short < 64


@pytest.mark.parametrize("lengths", [[], [0], [5, 5]])
def test_lengths_that_make_no_sense_are_refused(lengths):
    with pytest.raises(ParameterError, match="allowed: different lengths ≥ 1"):
        prompt_copies.measure(lengths)


# ── block tables ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "window", "block", "num_null", "num_blocks"),
    [
        (875_520, 128, 64, 13_678, 13_680),
        (1000, 128, 64, 13, 16),  # the window starts at 872, in block 13
        (100, 128, 64, 0, 2),
        (129, 128, 64, 0, 3),
        (192, 128, 64, 1, 3),
    ],
)
def test_blocks_wholly_before_the_window_are_null(prompt, window, block, num_null, num_blocks):
    row = block_tables.Row(prompt, window, block)
    assert (row.num_null, len(row.blocks)) == (num_null, num_blocks)
    assert [b.block_id for b in row.blocks[:num_null]] == [block_tables.NULL_BLOCK] * num_null
    assert (row.num_null + 1) * block > prompt - window, "the first real block holds a token of the window"


def test_both_ways_to_fill_the_table_leave_the_same_row():
    row = block_tables.Row(10_000, 128, 64)
    row.write_all()
    whole = row.table.copy()
    row.table[:] = 0
    row.write_window()
    assert row.table.tolist() == whole.tolist()
    assert np.count_nonzero(whole) == len(row.blocks) - row.num_null


def test_skipping_null_blocks_makes_the_work_independent_of_the_prompt():
    found = block_tables.measure([4096, 262_144], window_tokens=128, block_tokens=64, budget_s=0.5)
    assert set(found.columns) <= set(COLUMNS)
    took = {row[:2]: row[2] for row in found.select("table_fill", "prompt_tokens", "fill_p50_us").rows()}
    assert took["every block", 262_144] > 20 * took["every block", 4096]
    assert took["null blocks skipped", 262_144] < 3 * took["null blocks skipped", 4096]


def test_a_table_without_blocks_is_refused():
    with pytest.raises(ParameterError, match="got prompt_tokens = .64., window_tokens = 128, block_tokens = 0"):
        block_tables.measure([64], window_tokens=128, block_tokens=0)


# ── rows of KV cache ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_pool(monkeypatch):
    monkeypatch.setattr(kv_rows, "POOL_BYTES", 1 << 20)


class Sink:
    """A socket that keeps what it is sent; a gathered send takes at most ``most`` bytes at once."""

    def __init__(self, most=10**9):
        self.data, self.most, self.calls = b"", most, 0

    def sendall(self, data):
        self.calls += 1
        self.data += bytes(memoryview(data).cast("B") if not isinstance(data, bytes) else data)

    def sendmsg(self, parts):
        self.calls += 1
        taken = b"".join(bytes(part) for part in parts)[: self.most]
        self.data += taken
        return len(taken)


@pytest.mark.parametrize("most", [10**9, 1000, 890, 7])
def test_every_way_to_send_the_rows_sends_the_same_bytes(small_pool, most):
    rows = kv_rows._Rows(50, 890, np.random.default_rng(2))
    wanted = rows.pool[rows.places].tobytes()
    for name, send in kv_rows.METHODS.items():
        sink = Sink(most)
        send(rows, sink)
        assert sink.data == wanted, name


def test_a_gathered_send_keeps_to_the_limit_of_the_system(small_pool):
    rows = kv_rows._Rows(2500, 16, np.random.default_rng(2))
    sink = Sink()
    rows.gathered(sink)
    assert sink.calls == 3
    assert len(sink.data) == 2500 * 16
    assert os.sysconf("SC_IOV_MAX") >= kv_rows.MAX_VECTORS


def test_rows_arrive_and_a_call_per_row_costs_more():
    found = kv_rows.measure([64, 2048], row_bytes=890, budget_s=1.0)
    assert set(found.columns) <= set(COLUMNS)
    assert found.height == 8
    cpu = {row[:2]: row[2] for row in found.select("row_send", "num_rows", "sender_cpu_ms").rows()}
    assert cpu["row by row", 2048] > 3 * cpu["one packed region", 2048]
    rate = found["num_rows"] * found["row_bytes"] / found["transfer_p50_ms"] * 1e-6
    assert found["gb_per_s"].to_list() == pytest.approx(rate.to_list())


def test_a_receiver_that_dies_is_an_error_and_not_a_hang(small_pool, monkeypatch):
    receivers = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: receivers.append(popen(*a, **k)) or receivers[-1])

    def killing(rows, connection):
        receivers[0].kill()
        receivers[0].wait()
        connection.sendall(rows.region)

    monkeypatch.setitem(kv_rows.METHODS, "gathered", killing)
    before = time.monotonic()
    with pytest.raises(kv_rows.TransferError, match="the receiver of the rows"):
        kv_rows.measure([64], row_bytes=890)
    assert time.monotonic() - before < 20


def test_the_receiver_ends_with_its_parent():
    code = (
        "import os, time\nfrom rackbook.hostwork import kv_rows\n"
        "with kv_rows._receiver():\n"
        "    children = open(f'/proc/self/task/{os.getpid()}/children').read()\n"
        "    print(children, flush=True)\n    time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{child}/exe") and time.monotonic() < deadline:  # noqa: PTH110 - a zombie has no exe
        time.sleep(0.02)
    assert time.monotonic() < deadline


def test_no_rows_are_refused():
    with pytest.raises(ParameterError, match="allowed: at least one row and one byte"):
        kv_rows.measure([0], row_bytes=890)


# ── laws of growth ──────────────────────────────────────────────────────────────────────────────────────────────

POWERS = [2, 4, 8, 16, 32]


def test_each_law_is_found_again_and_named():
    line = compare_growth(POWERS, [3 + 2 * n for n in POWERS])
    assert line.better == LINEAR
    assert (line.fits[LINEAR].constant, line.fits[LINEAR].slope) == pytest.approx((3, 2))
    assert line.fits[LINEAR].error_percent == pytest.approx(0, abs=1e-9)
    doubling = compare_growth(POWERS, [1 + 0.5 * math.log2(n) for n in POWERS])
    assert doubling.better == LOGARITHMIC
    assert doubling.fits[LOGARITHMIC].at(1024) == pytest.approx(6)


def test_the_evidence_is_the_ratio_of_the_likelihoods_by_hand():
    ranks, values = [1, 2, 4, 8], [1.0, 2.2, 2.9, 4.1]
    found = compare_growth(ranks, values)
    squares = {}
    for law, x in ((LINEAR, ranks), (LOGARITHMIC, [0, 1, 2, 3])):
        weights = 1 / np.array(values)
        slope, constant = np.polyfit(x, values, 1, w=weights)
        squares[law] = sum(((constant + slope * a) / v - 1) ** 2 for a, v in zip(x, values, strict=True))
        assert found.fits[law].error_percent == pytest.approx(100 * math.sqrt(squares[law] / 4))
    assert found.evidence_ratio == pytest.approx((squares[LINEAR] / squares[LOGARITHMIC]) ** 2)
    assert found.better == LOGARITHMIC


def test_thin_evidence_names_no_law():
    found = compare_growth([4, 8, 16, 32], [10, 17, 26, 40])
    assert 1 <= found.evidence_ratio < 20
    assert any(fit.fits for fit in found.fits.values())
    assert (found.better, found.verdict) == (None, "cannot tell")


def test_a_law_that_is_far_off_is_not_named_however_much_worse_the_other_is():
    found = compare_growth(POWERS, [n**1.5 for n in POWERS])
    assert found.evidence_ratio > 20
    assert found.fits[LINEAR].error_percent > 10
    assert (found.better, found.verdict) == (None, "neither")


@pytest.mark.parametrize(
    ("ranks", "values"),
    [([4, 8, 16, 32], lambda n: 3 * math.log2(n) - 4), ([2, 4, 8, 16], lambda n: 3 * math.log2(n) + 4)],
    ids=["below zero at 2 ranks", "above"],
)
def test_a_law_must_be_positive_from_two_ranks_on(ranks, values):
    found = compare_growth(ranks, [values(n) for n in ranks])
    assert found.fits[LOGARITHMIC].error_percent == pytest.approx(0, abs=1e-9)
    positive = found.fits[LOGARITHMIC].at(2) > 0
    assert (found.verdict == LOGARITHMIC) == positive
    assert found.fits[LOGARITHMIC].fits == positive


@given(st.floats(0.01, 1e3), st.sampled_from([LINEAR, LOGARITHMIC]))
def test_the_unit_does_not_matter(scale, law):
    values = [5 + 3 * (n if law == LINEAR else math.log2(n)) + 0.1 * (n % 3) for n in POWERS]
    one, other = compare_growth(POWERS, values), compare_growth(POWERS, [scale * v for v in values])
    assert one.better == other.better == law
    assert one.fits[law].error_percent == pytest.approx(other.fits[law].error_percent)


@pytest.mark.parametrize(
    ("ranks", "values"), [([2, 4, 8], [1, 2, 3]), ([2, 2, 4, 8], [1, 1, 2, 3]), ([2, 4, 8, 16], [1, 2, 3])]
)
def test_too_few_numbers_of_ranks_are_refused(ranks, values):
    with pytest.raises(DataError, match="need 4 different numbers of ranks or more with one value each"):
        compare_growth(ranks, values)


def test_a_time_of_zero_is_refused():
    with pytest.raises(DataError, match="positive, finite values"):
        compare_growth(POWERS, [0, 1, 2, 3, 4])


# ── foreign load ────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_others_used_is_what_is_busy_beside_ourselves():
    before = Watch(at_s=0, busy_s=100, stolen_s=0, own_s=10)
    quiet = Watch(at_s=20, busy_s=130, stolen_s=0.5, own_s=38)  # 30 s busy, 28 s of it our own
    assert quiet.doubts(before, 2) == []
    busy = Watch(at_s=20, busy_s=130, stolen_s=3, own_s=15)  # 25 s by others in 20 s; 3 of 40 s stolen
    assert busy.doubts(before, 2) == [
        "other programs used 1.2 cores meanwhile, limit 0.25",
        "the host of this virtual machine kept 8% of its time, limit 5%",
    ]


def test_a_system_that_does_not_tell_is_a_doubt():
    before = Watch(at_s=0, busy_s=None, stolen_s=None, own_s=0)
    assert "not known" in Watch(at_s=1, busy_s=None, stolen_s=None, own_s=0).doubts(before, 2)[0]


def test_the_counts_of_this_system_grow_with_our_own_work():
    before = Watch.now()
    if before.busy_s is None:
        pytest.skip("this system has no counts of CPU time")
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    after = Watch.now()
    assert after.own_s - before.own_s >= 0.28
    assert after.busy_s - before.busy_s >= 0.2


NURSERY = """
import os, time
if os.fork() == 0:
    while time.process_time() < 0.3:
        pass
    os._exit(0)
os.wait()
print("done", flush=True)
input()
"""


def test_what_the_ended_children_of_a_living_child_used_is_our_own():
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        assert nursery.stdout.readline() == "done\n"
        if Watch.now().busy_s is None:
            pytest.skip("this system has no counts of CPU time")
        unnamed, named = Watch.now(), Watch.now([nursery.pid])
        assert named.own_s - unnamed.own_s >= 0.28
        nursery.stdin.close()
    assert Watch.now([nursery.pid]).busy_s is None, "a child that has ended cannot be asked"


def test_short_work_is_repeated_until_the_clock_does_not_count(monkeypatch):
    now, calls = [0], []

    def work():
        calls.append(None)
        now[0] += 50_000 if len(calls) > 1 else 40_000

    monkeypatch.setattr(sampling.time, "thread_time_ns", lambda: now[0])
    assert sampling.cpu_us(work) == pytest.approx(50), "the first call only tells how often to repeat"
    assert len(calls) == 1 + 200_000 // 40_000


# ── bursts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_burst_on_one_rank_makes_the_others_wait_for_all_of_its_work():
    found = burst_costs.burst_waste(
        6, prompt_tokens=1_000_000, num_ranks=3, ns_per_token=2, base_step_ms=10, caps=(None, 2)
    )
    rows = {(r["placement_of_burst"], r["cap"]): r for r in found.to_dicts()}
    # six admissions of 2 ms: 12 ms on one rank, two others wait; dealt, 4 ms on each and nobody waits
    assert rows["one rank", "none"]["step_max_ms"] == pytest.approx(22)
    assert rows["one rank", "none"]["rank_wait_s"] == pytest.approx(0.024)
    assert rows["one rank", "2"]["step_max_ms"] == pytest.approx(14)
    assert rows["one rank", "2"]["rank_wait_s"] == pytest.approx(0.024), "a cap spreads the waiting, it saves none"
    assert rows["one rank", "2"]["num_steps"] == 3
    assert rows["all 3", "none"]["rank_wait_s"] == pytest.approx(0)
    assert rows["all 3", "none"]["step_max_ms"] == pytest.approx(14)


def sweep(rows, spread=0.0, loads=None):
    names = ("arrivals", "admission_cost", "cap", "step_max_ms", "delay_p99_ms", "num_waiting")
    table = pl.DataFrame([("one by one", "before", *row) for row in rows], schema=names, orient="row")
    half = spread / 2
    return table.with_columns(
        delay_p99_low_ms=pl.col("delay_p99_ms") - half,
        delay_p99_high_ms=pl.col("delay_p99_ms") + half,
        admission_load_percent=pl.Series(loads or [50.0] * len(rows)),
        source=pl.lit("a seed"),
    )


def test_the_best_cap_admits_soonest_among_those_that_keep_the_limit():
    table = sweep([("1", 15.0, 900.0, 3), ("2", 20.0, 400.0, 0), ("4", 30.0, 300.0, 0), ("none", 80.0, 200.0, 0)])
    assert burst_costs.best_caps(table, 25).row(0, named=True)["best_cap"] == "2"
    assert burst_costs.best_caps(table, 30).row(0, named=True)["best_cap"] == "4"
    assert burst_costs.best_caps(table, 100).row(0, named=True)["best_cap"] == "none"
    none = burst_costs.best_caps(table, 14).row(0, named=True)
    assert none["best_cap"] is None
    assert none["missing_reason"] == "no cap keeps the limit, the shortest longest step is 15.0 ms"
    assert none["source"] == "a seed"


def test_a_cap_whose_queue_grows_is_never_the_best():
    rows = [("1", 15.0, 9e4, 999), ("4", 30.0, 2e4, 500), ("none", 80.0, 200.0, 0)]
    table = sweep(rows, loads=[340.0, 163.0, 77.0])
    assert burst_costs.best_caps(table, 100)["best_cap"].to_list() == ["none"]
    none = burst_costs.best_caps(table, 50).row(0, named=True)
    assert (none["best_cap"], none["num_waiting"]) == (None, None)
    reason = "no cap within the limit keeps up: to admit all takes 163 % of the time in which they arrive"
    assert none["missing_reason"] == reason
    edge = burst_costs.best_caps(sweep(rows[:1], loads=[100.0]), 50).row(0, named=True)
    assert (edge["best_cap"], edge["admission_load_percent"]) == ("1", 100.0)


def test_of_caps_that_admit_equally_soon_the_loosest_is_best():
    table = sweep([("2", 20.0, 400.0, 0), ("4", 20.0, 400.0, 0), ("none", 20.0, 400.0, 0)])
    assert burst_costs.best_caps(table, 25)["best_cap"].to_list() == ["none"]

    # the shortest delay is that of a cap of 2, but no further from the next than two repeats are
    table = sweep([("1", 15.0, 450.0, 0), ("2", 20.0, 400.0, 0), ("4", 22.0, 409.0, 0), ("none", 24.0, 411.0, 0)], 10.0)
    assert burst_costs.best_caps(table, 25)["best_cap"].to_list() == ["4"]
    table = sweep([("1", 15.0, None, 0), ("none", 15.0, None, 0)])
    assert burst_costs.best_caps(table, 25)["best_cap"].to_list() == ["none"], "nobody arrived"


def trace(rows):
    table = pl.DataFrame(
        [(i, None, at, tokens, None, 10) for i, (at, tokens) in enumerate(rows)],
        schema={
            "request": pl.Int64, "session": pl.String, "arrival_s": pl.Float64, "input_tokens": pl.Int64,
            "cached_tokens": pl.Int64, "output_tokens": pl.Int64,
        },
        orient="row",
    )  # fmt: skip
    return Trace("a trace", "published", table)


def test_a_trace_becomes_arrivals_dealt_in_turn():
    found = burst_costs.from_trace(trace([(0.0, 5), (1.5, 6), (1.5, 7), (9.0, 8)]), num_ranks=2, window_s=2)
    assert found.arrived_ms.tolist() == [0, 1500, 1500]
    assert found.rank.tolist() == [0, 1, 0]
    assert found.prompt_tokens.tolist() == [5, 6, 7]
    assert found.window_ms == 2000
    short = burst_costs.from_trace(trace([(0.0, 5), (1.5, 6)]), num_ranks=2, window_s=60)
    assert short.window_ms == 1500


def test_a_trace_that_starts_after_the_window_is_refused():
    with pytest.raises(ParameterError, match="a trace: no request in its first 2 s"):
        burst_costs.from_trace(trace([(5.0, 5)]), num_ranks=2, window_s=2)
