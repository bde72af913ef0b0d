"""The measured part of experiment 05: recorded against a scripted server, read back, judged by its controls."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from chart_checks import check_chart
from completions_server import Answer, CompletionsServer
from rackbook import runs
from rackbook.charts import replays as replay_charts
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import dp_imbalance as experiment
from rackbook.experiments.dp_imbalance_recorded import Recorded
from rackbook.measurements import dp_imbalance as live
from rackbook.replay import client, joint_steps, measurement, server_evidence, step_probe, throughput, traces
from rackbook.replay.lockstep import StepCost
from rackbook.replay.measurement import Design
from rackbook.replay.targets import Settings
from rackbook.replay.user_lockstep import simulate

SMALL = {
    "length_scale": 1 / 640, "max_num_batched_tokens": 512, "us_per_token": 9.0, "users": 2, "pairs": 2, "lag_s": 0.02,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def no_pauses(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement, "_SETTLE_S", 0.0)
        patch.setattr(live, "TURNS", 6)
        patch.setattr(live, "PROBES", (0.1, 0.4, 1.0))
        patch.setattr(live, "LATENESS_MS", 2_000.0)  # other work may run on this machine
        patch.setattr(live, "THINK_S", 0.01)
        patch.setenv("RACKBOOK_RUNS", str(tmp_path_factory.mktemp("runs")))
        yield


def quick(seen):
    return Answer(delay_s=0.015 + 1e-5 * len(seen.body["prompt"]))


@pytest.fixture(scope="module")
def recorded(no_pauses):
    with CompletionsServer(quick, num_engines=2) as one, CompletionsServer(quick) as a, CompletionsServer(quick) as b:
        params = experiment.Params(source="measure", base_url=f"{one.url}; {a.url}, {b.url}", **SMALL)
        evidence = experiment.collect(params)
    return evidence.measured


def test_a_run_holds_both_set_ups_and_its_pairs(recorded):
    assert recorded.run.flags == ()
    assert recorded.run.provenance["vllm"] == "0.0.1"
    assert recorded.replays.select("setting", "schedule").rows() == [
        (setting, schedule)
        for setting in (live.TOGETHER, live.ALONE)
        for schedule in ("mirror", "lag", "mirror again", "mirror again", "lag", "mirror")
    ]
    assert recorded.replays["num_requests"].to_list() == [24] * 12
    assert recorded.pairs["doubt"].null_count() == recorded.pairs.height == 8
    measured = recorded.losses.filter(pl.col("origin") == "measured")
    assert measured["num_pairs"].to_list() == [2] * 4
    assert (measured["loss_from_percent"] <= measured["loss_percent"]).all()
    assert set(recorded.losses["source"]) == {recorded.run.id}


def test_the_servers_counted_what_was_sent(recorded):
    assert recorded.counted["rank"].to_list() == [0, 1, 0, 1]
    assert recorded.counted["sent_tokens"].to_list() == recorded.counted["counted_tokens"].to_list()


def test_a_run_without_a_log_has_an_empty_table_of_steps(recorded):
    assert recorded.steps.is_empty()
    assert {"same_time_percent", "same_tokens_percent", "source"} < set(recorded.steps.columns)


def test_a_stored_run_is_shown_again_by_its_id(recorded):
    again = experiment.collect(experiment.Params(source=recorded.run.id)).measured
    assert again.pairs.equals(recorded.pairs)
    assert again.trace.requests.equals(recorded.trace.requests)
    with pytest.raises(ParameterError, match="source: unknown run"):
        experiment.collect(experiment.Params(source="dp_imbalance-nothing"))


def test_the_charts_of_a_run(recorded):
    chart = replay_charts.loss_by_comparison(recorded.pairs, recorded.losses, control="found", subtitle="scripted")
    assert check_chart(chart, name="loss_by_comparison")["title"]["subtitle"] == ["found", "scripted"]
    check_chart(replay_charts.work_over_time(recorded.work, subtitle="scripted"), name="work_over_time")
    check_chart(replay_charts.step_time_by_tokens(recorded.probes, subtitle="x"), name="step_time_by_tokens")


def test_the_finding_says_whether_the_interval_holds_none_and_whether_the_controls_holds_it(recorded):
    def titled(low, high, control):
        def by_setting(engine, other):
            return pl.when(pl.col("setting") == live.TOGETHER).then(pl.lit(engine)).otherwise(pl.lit(other))

        losses = recorded.losses.with_columns(
            by_setting(low, -control).alias("loss_from_percent"),
            by_setting((low + high) / 2, 0.0).alias("loss_percent"),
            by_setting(high, control).alias("loss_to_percent"),
        )
        chart = replay_charts.loss_by_comparison(recorded.pairs, losses, control="", subtitle="")
        return chart.to_dict()["title"]["text"]

    assert titled(1.0, 5.0, 2.0) == "Measured on one engine: 3.0 % ± 2.0 from 2 pairs, a loss"
    assert titled(1.0, 5.0, 4.0).endswith("from 2 pairs, a loss; the bar of separate servers holds it too")
    assert titled(-1.0, 5.0, 1.0).endswith("2.0 % ± 3.0 from 2 pairs, no loss that these pairs could tell from none")


def test_a_failed_replay_is_kept_flagged_and_has_no_loss():
    with CompletionsServer(lambda seen: Answer("status") if seen.number == 150 else quick(seen), num_engines=2) as one:
        found = experiment.collect(experiment.Params(source="measure", base_url=one.url, **SMALL)).measured
    assert len(found.run.flags) == 1
    assert "HTTP 500" in found.run.flags[0]
    assert "no_control" in found.run.provenance
    assert found.pairs["loss_percent"].null_count() >= 1
    assert found.pairs.filter(pl.col("doubt").str.contains("HTTP 500")).height >= 1
    assert found.requests.filter(pl.col("error").is_not_null()).height > 0


@pytest.mark.parametrize("in_a_replay", [True, False])
def test_ctrl_c_leaves_an_unfinished_run_with_what_was_measured(monkeypatch, in_a_replay):
    whole, done = client.replay, []
    warm_up_and_probes = 1 + len(live.PROBES) * 2 * 3

    def interrupted(*args, **options):
        found = whole(*args, **options)
        done.append(found)
        if len(done) < warm_up_and_probes + 2:
            return found
        if in_a_replay:
            return replace(found, interrupted=True, stopped="interrupted by the user")
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "replay", interrupted)
    with CompletionsServer(quick, num_engines=2) as one, pytest.raises(KeyboardInterrupt):
        experiment.collect(experiment.Params(source="measure", base_url=one.url, **SMALL | {"pairs": 1}))
    left = max(runs.unfinished(), key=lambda run: run.path.stat().st_mtime)
    assert "KeyboardInterrupt" in left.reason
    kept = pl.read_csv(left.path / "requests.csv")
    assert kept["replay"].unique().sort().to_list() == list(range(4 if in_a_replay else 3))


def test_a_run_that_failed_at_once_is_shown_without_losses():
    with CompletionsServer(lambda seen: Answer("status"), num_engines=2) as one:
        found = experiment.collect(experiment.Params(source="measure", base_url=one.url, **SMALL)).measured
    assert found.losses.is_empty() or found.losses["loss_percent"].null_count() == found.losses.height
    assert found.probes.is_empty()
    assert found.shown_pair == "No pair on one engine was answered in full"
    check_chart(replay_charts.work_over_time(found.work, subtitle="x"), name="work_over_time")
    assert found.control == "Not known: how much of a loss this load would show"
    check_chart(replay_charts.step_time_by_tokens(found.probes, subtitle="x"), name="step_time_by_tokens")


def test_servers_that_cannot_be_measured_are_refused():
    with (
        CompletionsServer(quick) as alone,
        pytest.raises(ParameterError, match=r"have \[1\] ranks; expected two ranks"),
    ):
        experiment.collect(experiment.Params(source="measure", base_url=alone.url, **SMALL))
    with pytest.raises(ParameterError, match=r"serve the models \[None\]; expected servers that answer"):
        experiment.collect(experiment.Params(source="measure", base_url="http://127.0.0.1:9", **SMALL))


def test_no_run_and_no_wish_to_measure_says_what_to_do(monkeypatch):
    monkeypatch.setattr(experiment.live, "recorded", lambda topic: None)
    assert experiment.collect(experiment.Params()).measured is None
    assert "rackbook record 05" in experiment.NO_RUN


def test_a_rank_that_got_other_tokens_is_a_doubt():
    sent = pl.DataFrame({"rank": [0, 0, 1], "input_tokens": [10, 20, 30]})
    counted = pl.DataFrame({"rank": [0, 1], "counted_tokens": [60, 0], "hit_tokens": [None, 7]})
    assert server_evidence.doubts(sent, counted, hits_wanted=False) == [
        "rank 0 counted 60 prompt tokens, sent were 30",
        "rank 1 counted 0 prompt tokens, sent were 30",
        "rank 1 found 7 prompt tokens in its prefix cache",
    ]
    assert len(server_evidence.doubts(sent, counted, hits_wanted=True)) == 2


def test_requests_that_reach_another_rank_are_noticed_by_the_counters():
    trace = traces.independent(np.random.default_rng(1), 4, "fixed", 50)
    design = Design(trace, 2, 0.01, 1, users=1, control=False, warm_up_requests=0)
    with CompletionsServer(quick, num_engines=2) as server:
        server.pinning = False
        found = measurement.measure(design, [server.url], Settings("scripted", lateness_limit_ms=2_000))
    assert found.doubts[0] == (
        "rank 0 counted 400 prompt tokens, sent were 200; rank 1 counted 0 prompt tokens, sent were 200"
    )
    assert len(found.flags) == 2


def test_steps_are_read_from_a_growing_log(tmp_path):
    log = tmp_path / "server.log"
    line = (
        "(APIServer pid=1) INFO 11-29 19:46:19 [loggers.py:1] Engine {rank:03d}: Iteration({n}): 1 context requests, "
        "{tokens} context tokens, 0 generation requests, 0 generation tokens, iteration elapsed time: {ms:.2f} ms, "
        "CPU KV cache usage: 0.1%\n"
    )
    log.write_text(line.format(rank=0, n=0, tokens=5, ms=1))
    witness = server_evidence.Witness(["http://127.0.0.1:9"], 2, [log])
    witness.begin()
    assert "no metrics" in witness.silent
    with log.open("a") as file:
        for rank in (0, 1):
            file.write(line.format(rank=rank, n=1, tokens=7, ms=2.5))
        file.write("unfinished line")
    steps = witness.steps()
    assert steps.select("rank", "iteration", "num_prefill_tokens", "step_ms").rows() == [(0, 1, 7, 2.5), (1, 1, 7, 2.5)]
    log.write_text("Iteration(1): something new, iteration elapsed time: 5 apples\n")
    witness.begin()
    log.write_text("x" * log.stat().st_size + "\nIteration(1): new, iteration elapsed time: 5 apples\n")
    assert witness.steps().is_empty()
    assert "unknown form" in witness.unread


def test_steps_are_put_side_by_side_although_the_ranks_count_from_other_numbers():
    times, tokens = [20.0, 31.0, 5.0, 12.0, 50.0], [100, 200, 10, 40, 300]
    rows = [(0, 7 + n, tokens[n], ms) for n, ms in enumerate(times)]
    rows += [(1, 9 + n, tokens[n] + (n == 3), 1.01 * ms) for n, ms in enumerate(times) if n != 1]
    steps = pl.DataFrame(rows, schema=["rank", "iteration", "num_prefill_tokens", "step_ms"], orient="row")
    found = joint_steps.joint(steps, 2)
    assert found["iteration"].to_list() == [7, 9, 10, 11]
    assert found["shortest_ms"].to_list() == [20, 5, 12, 50]
    assert found["longest_ms"].to_list() == pytest.approx([20.2, 5.05, 12.12, 50.5])
    assert found["same_tokens"].to_list() == [True, True, False, True]
    assert joint_steps.joint(steps, 3).is_empty()


def probed(cost, lengths, repeats, *, coupled=True, num_ranks=2, cap=2_048):
    """The requests of the probes as simulated ranks answer them."""
    parts = []
    for place, load in enumerate(step_probe.probes(lengths, repeats, num_ranks, cap)):
        frame, _ = simulate(load, cost, cap, coupled=coupled)
        parts.append(frame.with_columns(pl.col("request") + 2 * place))
    return pl.concat(parts)


@pytest.mark.parametrize("shared", [0.0, 900.0])
def test_the_fitted_step_time_is_that_of_the_simulator(shared):
    cost = StepCost(4.0, 300.0, 20_000.0, shared)
    lengths = (64, 256, 1024, 2048, 4096)
    frame = probed(cost, lengths, 2, num_ranks=4)
    found = step_probe.fit(frame, 4, 2_048)
    assert found.fixed_ms == pytest.approx(4, rel=1e-3)
    assert found.us_per_token == pytest.approx(300, rel=1e-3)
    assert found.ps_per_attended_token == pytest.approx(20_000, rel=1e-3)
    assert found.shared_us_per_token == pytest.approx(shared, rel=1e-3, abs=0.1)
    times = step_probe.medians(frame)
    assert times["num_busy"].to_list() == [1] * 5 + [4] * 5
    assert step_probe.modelled_s(times, found, 4, 2_048).to_list() == pytest.approx(times["step_s"].to_list())
    assert times.row(1, named=True)["step_s"] == pytest.approx(
        1e-9 * cost.step_ns([256, 0, 0, 0], [256 * 257 // 2, 0, 0, 0]), rel=1e-6
    )


def test_ranks_that_do_not_wait_share_nothing_but_may_be_slower_together():
    cost = StepCost(4.0, 300.0, 20_000.0, 100.0)
    found = step_probe.fit(probed(cost, (64, 256, 2048), 1, coupled=False), 2, 2_048)
    assert found.us_per_token + found.shared_us_per_token == pytest.approx(400, rel=1e-3)
    assert found.shared_us_per_token == pytest.approx(0, abs=0.1)


def test_a_prompt_that_was_sent_after_the_openers_step_is_timed_from_its_own_sending():
    late = pl.DataFrame(
        [(0, 0, "opener", 0.0, 0.1, 50), (0, 1, "probe", 0.3, 0.7, 10), (1, 1, "probe", 0.3, 0.9, 10)],
        schema=["rank", "request", "session", "sent_s", "done_s", "input_tokens"], orient="row",
    )  # fmt: skip
    assert step_probe.medians(late).rows() == [(2, 10, pytest.approx(0.4))]
    early = late.with_columns(pl.col("sent_s").replace(0.3, 0.02))
    assert step_probe.medians(early).rows() == [(2, 10, pytest.approx(0.6))]


def test_probes_that_give_no_function_are_refused():
    frame = probed(StepCost(4.0, 300.0, 20_000.0), (64, 256, 2048), 1)
    with pytest.raises(DataError, match="at least 3 lengths, got 2"):
        step_probe.fit(frame.filter(pl.col("input_tokens") != 256), 2, 2_048)
    steeper = pl.col("input_tokens").cast(pl.Float64) ** 3 * 1e-9
    too_steep = frame.with_columns(
        pl.when(pl.col("session") == "probe").then(pl.col("sent_s") + steeper).otherwise(0.0).alias("done_s")
    )
    with pytest.raises(DataError, match="grow with the depth alone"):
        step_probe.fit(too_steep, 2, 2_048)
    with pytest.raises(DataError, match="no earlier than those of its prompts"):
        step_probe.fit(frame.with_columns(pl.lit(5.0).alias("done_s")), 2, 2_048)
    with pytest.raises(DataError, match="of 9 probes have no answer"):
        step_probe.medians(frame.with_columns(pl.when(pl.col("request") > 0).then("done_s").alias("done_s")))
    with pytest.raises(ParameterError, match="allowed: lengths ≥ 1"):
        step_probe.probes((), 1, 2, 2_048)


INSERTED = ["simulator, 0 % inserted", "simulator, 5 % inserted", "simulator, 5 % inserted, nobody thinks"]


def think(recorded, seconds, step):
    """The run as if its users had thought for so long and its steps taken so long."""
    again = Recorded(recorded.run)
    trace, facts = recorded._trace_and_facts
    again.__dict__["_trace_and_facts"] = trace, facts | {"think_s": seconds}
    fitted = replace(recorded._step_functions[2], cost=StepCost(step, 0.1, 0.0))
    again.__dict__["_step_functions"] = {2: fitted}
    return again


def test_inserted_losses_come_back_where_the_ranks_are_busy(recorded):
    busy = think(recorded, 0.0, 20.0)
    assert busy.recovered["setting"].to_list() == INSERTED
    assert busy.recovered["loss_percent"].to_list() == pytest.approx([0, 5, 5], abs=0.3)
    assert busy.recovered["busy_percent"].min() > 99
    assert "of 5 % inserted the analysis finds" in busy.control
    assert "off" not in busy.control
    simulated = recorded.losses.filter(pl.col("origin") == "simulated")
    assert simulated["setting"].to_list() == ["simulator", *INSERTED]
    assert simulated["pairs_needed"].null_count() == 4


def test_users_who_think_for_long_hide_an_inserted_loss_and_the_run_says_so(recorded):
    idle = think(recorded, 1.0, 20.0)
    assert idle.recovered["loss_percent"].to_list() == pytest.approx([0, 0, 5], abs=0.5)
    busy = idle.recovered["busy_percent"][1]
    assert busy < 10
    assert idle.control.endswith(
        f"more than 1 point off: this load, with its ranks busy for {busy:.0f} % of the time, hides a part of a loss"
    )


def test_the_shown_pair_is_the_first_without_a_doubt(recorded):
    def shown(*doubtful):
        again = Recorded(recorded.run)
        lagged = pl.col("comparison") == "lag with mirror"
        doubt = pl.when(lagged & pl.col("pair").is_in(doubtful)).then(pl.lit("late")).alias("doubt")
        again.__dict__["pairs"] = recorded.pairs.with_columns(doubt)
        own = recorded.requests.filter(pl.col("setting") == live.TOGETHER, pl.col("schedule") == "lag")
        times = {pair: throughput.work(own.filter(pl.col("pair") == pair))[0].time_s.tolist() for pair in (0, 1)}
        drawn = again.work.filter(pl.col("schedule") == "lag", pl.col("rank") == 0)["at_s"].to_list()
        return again.shown_pair, [pair for pair, time_s in times.items() if time_s == drawn]

    assert shown() == ("Pair 1 of 2 on DEP2, the first without a doubt", [0])
    assert shown(0) == ("Pair 2 of 2 on DEP2, the first without a doubt", [1])
    assert shown(0, 1) == ("Pair 1 of 2 on DEP2, all pairs have doubts", [0])
