"""From requests to a loss: work and windows by hand, pairs and power, and known losses recovered by the same code."""

import itertools

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackbook.errors import DataError, ParameterError
from rackbook.replay import imbalance, lockstep, paired_losses, throughput, traces
from rackbook.replay.loads import NONE, closed_loop, open_loop
from rackbook.replay.lockstep import StepCost
from rackbook.replay.queues import lag, queue
from rackbook.replay.user_lockstep import simulate

CAP = 2_048


def requests(*rows, **columns):
    """Rows of rank, sent_s, done_s, input_tokens."""
    frame = pl.DataFrame(rows, schema=["rank", "sent_s", "done_s", "input_tokens"], orient="row")
    return frame.with_columns(pl.col("sent_s").alias("scheduled_s"), **{n: pl.lit(v) for n, v in columns.items()})


def agent_trace(seed=3, num_requests=120):
    return traces.agentic(np.random.default_rng(seed), num_requests).scaled(length=1 / 64)


def test_work_of_a_rank_by_hand():
    # two requests at once, answered one after the other; then nothing to do until 10 s
    (work,) = throughput.work(requests((0, 0.0, 2.0, 100), (0, 0.0, 3.0, 300), (0, 10.0, 12.0, 50)))
    assert work.at(1.0) == 50
    assert work.at(2.5) == 250
    assert work.at(7.0) == 400
    assert work.at(11.0) == 425
    assert work.reached_s(250) == 2.5
    assert work.reached_s(400) == 3  # and not 10, when it went on
    assert work.answered_within(2.0, 11.0) == (2, 3)
    assert work.busy_s(0, 12) == 5
    assert work.busy_s(2.5, 10.5) == 1
    assert (work.begin_s, work.first_answer_s, work.last_but_one_s, work.end_s) == (0, 2, 3, 12)


def test_a_later_request_answered_first_does_not_hide_the_work_on_the_older_one():
    (work,) = throughput.work(requests((0, 0.0, 6.0, 500), (0, 3.0, 4.0, 100)))
    assert work.at(2.0) == 50  # since 0 s, when the older of the unanswered requests was sent
    assert work.at(6.0) == 600


def test_throughput_of_a_replay_by_hand():
    lagged = requests(
        (0, 0.0, 1.0, 100), (0, 1.0, 2.0, 100), (0, 2.0, 3.0, 100), (0, 3.0, 4.0, 100),
        (1, 1.0, 2.0, 100), (1, 2.0, 3.0, 100), (1, 3.0, 5.0, 100),
    )  # fmt: skip
    found = throughput.measured(lagged)
    assert (found.from_s, found.to_s) == (2.0, 3.0)  # rank 1's first answer; rank 0's last but one, and rank 1's
    assert found.window_tok_per_s == 200
    assert found.whole_tok_per_s == 700 / 5
    assert found.run_s == 5
    assert found.busy_percent == 100
    paused = requests(
        (0, 0.0, 1.0, 9), (0, 2.0, 3.0, 9), (0, 3.0, 4.0, 9), (1, 0.0, 1.0, 9), (1, 1.0, 3.0, 9), (1, 3, 4, 9)
    )
    assert (
        throughput.measured(paused).busy_percent == 75
    )  # from 1 s to 3 s, of which rank 0 has nothing to do until 2 s


def test_ranks_that_never_work_together_have_no_window():
    apart = requests((0, 0.0, 1.0, 10), (0, 1.0, 2.0, 10), (1, 5.0, 6.0, 10), (1, 6.0, 7.0, 10))
    with pytest.raises(DataError, match="no common window: the last rank gives its first answer after 6.00 s"):
        throughput.measured(apart)


def test_a_request_without_an_answer_gives_no_throughput():
    cut = requests((0, 0.0, 1.0, 10), (0, 1.0, None, None))
    with pytest.raises(DataError, match="1 of 2 have no answer"):
        throughput.measured(cut)


def test_same_work_is_compared_with_the_time_of_that_work():
    # Rank 0's second half is slow work, in both replays; the lag replay is otherwise as fast as the mirror replay.
    times = [0, 1, 2, 4, 6, 8]
    rows = [(0, float(a), float(b), 100) for a, b in itertools.pairwise(times)]
    mirror = requests(*rows, *((1, *row[1:]) for row in rows))
    lagged = requests(*rows, *((1, begin + 1.5, end + 1.5, tokens) for _, begin, end, tokens in rows))
    assert throughput.same_work_loss(mirror, lagged) == pytest.approx(0, abs=1e-9)
    by_window = 1 - throughput.measured(lagged).window_tok_per_s / throughput.measured(mirror).window_tok_per_s
    assert by_window == pytest.approx(1 / 21)
    with pytest.raises(DataError, match="fewer than two answers between 4.50 and 5.50 s"):
        throughput.work(mirror)[0].answered_within(4.5, 5.5)
    with pytest.raises(DataError, match="not of the same requests"):
        throughput.same_work_loss(mirror, lagged.with_columns(pl.col("input_tokens") * 2))


def test_the_closed_simulator_is_the_open_one_where_nothing_waits():
    trace = agent_trace(num_requests=40)
    cost = StepCost(5, 400, 20_000)
    frame, (run,) = simulate(open_loop(trace, 3, 2.0), cost, CAP)
    reference = lockstep.replay(lag(queue(trace, prefix_caching=False), 3, 2.0), cost, CAP)
    for name in ("start_ns", "step_ns", "tokens", "attended_tokens"):
        assert (getattr(run, name) == getattr(reference, name)).all(), name
    waited = (frame["done_s"] - frame["sent_s"]).filter(frame["rank"] == 1).to_numpy()
    assert waited == pytest.approx(reference.wait_for_prompt_ns(1) * 1e-9)


def test_a_simulated_user_waits_for_the_answer_and_thinks():
    trace = traces.independent(np.random.default_rng(1), 3, "fixed", 100)
    load = closed_loop(trace, 1, users=1, think_s=0.5)
    frame, _ = simulate(load, StepCost(0, 1_000, 0), CAP)
    thinks = np.where(load.previous == NONE, load.at_ns, load.think_ns) * 1e-9
    assert frame["sent_s"].to_list() == pytest.approx(thinks.cumsum() + np.array([0, 0.1, 0.2]))
    assert frame["done_s"].to_list() == pytest.approx(thinks.cumsum() + np.array([0.1, 0.2, 0.3]))
    with pytest.raises(ParameterError, match="got 0, allowed: ≥ 1"):
        simulate(closed_loop(trace, 1, users=1), StepCost(1, 1, 1), 0)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 50), users=st.integers(1, 4), think_s=st.sampled_from([0.0, 0.2, 2.0]),
    lost=st.sampled_from([0.0, 0.05]),
)  # fmt: skip
def test_without_coupling_nothing_is_lost_but_what_was_inserted(seed, users, think_s, lost):
    trace = agent_trace(seed, 40)
    users = min(users, trace.requests["session"].n_unique())
    slower = 1 / (1 - lost)  # users think longer too, or the slower steps would hold other requests
    mirrored = closed_loop(trace, 2, users=users, think_s=think_s)
    lagged = closed_loop(trace, 2, 3.0, users=users, think_s=think_s * slower)
    mirror, _ = simulate(mirrored, StepCost(5, 400, 20_000), CAP)
    alone, _ = simulate(lagged, StepCost(5 * slower, 400 * slower, 20_000 * slower), CAP, coupled=False)
    assert throughput.same_work_loss(mirror, mirror) == pytest.approx(0, abs=1e-9)
    assert throughput.same_work_loss(mirror, alone) == pytest.approx(lost, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_of_simulated_requests_is_that_of_the_simulated_steps(seed):
    trace, cost = agent_trace(seed, 160), StepCost(5, 400, 20_000)
    mirror, _ = simulate(closed_loop(trace, 2, users=4), cost, CAP)
    lagged, (run,) = simulate(closed_loop(trace, 2, 3.0, users=4), cost, CAP)
    window = imbalance.common_window(run.tokens)
    known = imbalance.loss(run.own_ns[window], run.step_ns[window])
    assert known > 0.01
    assert throughput.same_work_loss(mirror, lagged) == pytest.approx(known, abs=0.004)


def experiment(num_pairs, lost, noise, seed=0):
    """Replays of an uncoupled simulator whose lag replays are slower by a known loss, each with its own noise."""
    trace, generator = agent_trace(num_requests=60), np.random.default_rng(seed)
    parts = []
    for number, (pair, schedule) in enumerate(paired_losses.order(num_pairs)):
        lagged = schedule == paired_losses.LAG
        factor = generator.normal(1, noise) / (1 - (lost if lagged else 0))
        load = closed_loop(trace, 2, 3.0 if lagged else 0.0, users=2)
        frame, _ = simulate(load, StepCost(5 * factor, 400 * factor, 20_000 * factor), CAP, coupled=False)
        names = [pl.lit(number).alias("replay"), pl.lit(pair).alias("pair"), pl.lit(schedule).alias("schedule")]
        parts.append(frame.select(*names, pl.all()))
    return pl.concat(parts)


def test_a_known_loss_is_recovered_within_its_interval_and_the_control_shows_none():
    found = paired_losses.summary(paired_losses.losses(experiment(8, 0.05, 0.005), {}))
    lag_row, control = found.iter_rows(named=True)
    assert (lag_row["comparison"], control["comparison"]) == ("lag with mirror", "mirror with mirror")
    assert lag_row["loss_from_percent"] < 5 < lag_row["loss_to_percent"]
    assert lag_row["loss_from_percent"] > 3.5
    assert control["loss_from_percent"] < 0 < control["loss_to_percent"]
    assert lag_row["num_pairs"] == 8


def test_without_noise_the_known_loss_is_found_exactly():
    pairs = paired_losses.losses(experiment(2, 0.05, 0.0), {})
    assert pairs["loss_percent"].to_list() == pytest.approx([5, 5, 0, 0], abs=1e-3)


def test_a_doubtful_replay_spoils_its_own_pair_and_is_not_averaged():
    frame = experiment(3, 0.05, 0.0)
    numbers = dict(frame.filter(pl.col("schedule") == "lag").select("pair", "replay").unique().iter_rows())
    pairs = paired_losses.losses(frame, {numbers[1]: "ended early: reset"})
    spoilt = pairs.filter(pl.col("doubt").is_not_null())
    assert spoilt.select("comparison", "pair", "doubt").rows() == [("lag with mirror", 1, "ended early: reset")]
    assert spoilt["loss_percent"].to_list() == [None]
    found = paired_losses.summary(pairs)
    assert found["num_pairs"].to_list() == [2, 3]
    assert found["loss_percent"][0] == pytest.approx(5, abs=1e-3)


def test_a_pair_with_an_unanswered_request_or_without_a_mirror_says_so():
    frame = experiment(1, 0.05, 0.0)
    cut = frame.with_columns(pl.when(pl.int_range(pl.len()) == 3).then(None).otherwise("done_s").alias("done_s"))
    assert "have no answer" in paired_losses.losses(cut, {})["doubt"][0]
    unpaired = frame.filter(pl.col("schedule") != "mirror")
    assert paired_losses.losses(unpaired, {})["doubt"].to_list() == ["no mirror replay in this pair"] * 2
    assert paired_losses.summary(paired_losses.losses(unpaired, {}))["loss_percent"].to_list() == [None, None]


def test_replays_as_a_table():
    frame = experiment(1, 0.05, 0.0)
    table = paired_losses.replays(frame, {2: "why"})
    assert table["schedule"].to_list() == ["mirror", "lag", "mirror again"]
    assert table["num_requests"].to_list() == [120] * 3
    assert table["doubt"].to_list() == [None, None, "why"]
    assert table["run_s"][1] > table["run_s"][0] + 2.9
    assert table["lateness_p99_ms"].to_list() == [0, 0, 0]


def test_the_order_of_replays_balances_a_drift():
    assert [name for _, name in paired_losses.order(4, control=False)] == ["mirror", "lag", "lag", "mirror"] * 2
    assert paired_losses.order(2) == [
        (0, "mirror"), (0, "lag"), (0, "mirror again"), (1, "mirror again"), (1, "lag"), (1, "mirror"),
    ]  # fmt: skip


def test_a_few_pairs_do_not_say_how_many_are_needed():
    def summed(*losses):
        rows = [("lag with mirror", pair, loss, 90.0 + pair, None) for pair, loss in enumerate(losses)]
        columns = {
            "comparison": pl.String, "pair": pl.Int64, "loss_percent": pl.Float64, "busy_percent": pl.Float64,
            "doubt": pl.String,
        }  # fmt: skip
        return paired_losses.summary(pl.DataFrame(rows, schema=columns, orient="row")).row(0, named=True)

    few, enough, wild = summed(1.0, 3.0, 5.0), summed(1.0, 3.0, 5.0, 3.0), summed(0.0, 1e6, 0.0, 1e6)
    assert (few["pairs_needed"], few["missing_reason"]) == (None, "pairs needed: fewer than 4 pairs")
    assert few["pair_spread_points"] == 2
    assert few["busy_percent"] == 91
    assert (enough["pairs_needed"], enough["missing_reason"]) == (paired_losses.pairs_needed([1, 3, 5, 3]), None)
    assert (wild["pairs_needed"], wild["missing_reason"]) == (None, "pairs needed: more than 10,000")


def test_pairs_needed_by_hand():
    # d = 1: n = 10 is the textbook answer of a paired t test at 5 % and 80 %
    assert paired_losses.pairs_needed([2.0 - 0.5**0.5, 2.0 + 0.5**0.5]) == 10
    assert paired_losses.pairs_needed([1.0, 1.0, 1.0]) == 2
    assert paired_losses.pairs_needed([3.0]) is None
    assert paired_losses.pairs_needed([0.0, 1e6]) is None
    narrow, wide = (paired_losses.pairs_needed([0, spread]) for spread in (3, 6))
    assert 3 * narrow < wide < 4.2 * narrow
