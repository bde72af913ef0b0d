"""Mirror and lag replays with their controls on a real vLLM with two data-parallel ranks, and its end in mid-replay."""

import threading
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from rackbook.replay import joint_steps, measurement, paired_losses, step_probe, traces
from rackbook.replay.measurement import Design
from rackbook.replay.targets import Settings

STEP_TOKENS = 512
PAIRS = 2


def drawn(num_requests):
    trace = traces.agentic(np.random.default_rng(5), num_requests).scaled(length=1 / 128)
    return replace(trace, requests=trace.requests.with_columns(pl.lit(1, pl.Int64).alias("output_tokens")))


@pytest.fixture(scope="module")
def server(lab_server):
    arguments = (
        "--max-num-batched-tokens", str(STEP_TOKENS), "--no-enable-prefix-caching",
        "--enable-logging-iteration-details",
    )  # fmt: skip
    return lab_server(num_ranks=2, extra_arguments=arguments)


def settings(server):
    return Settings(server.model, timeout_s=120, lateness_limit_ms=60_000)  # other tests share the cores


@pytest.fixture(scope="module")
def measured(server):
    design = Design(
        drawn(16), 2, lag_s=0.5, pairs=PAIRS, users=2, warm_up_requests=2, probe_lengths=(32, 128, 512),
        probe_repeats=2, step_tokens=STEP_TOKENS,
    )  # fmt: skip
    return measurement.measure(design, [server.base_url], settings(server), log_paths=[server.log_path])


def test_every_request_is_answered_by_the_rank_it_was_sent_to(measured):
    assert measured.flags == ()
    assert measured.requests["error"].null_count() == measured.requests.height
    assert measured.requests.filter(pl.col("schedule") == "lag").height == PAIRS * 2 * 16
    assert measured.counted.height == 2 * (2 + 3 * PAIRS)
    assert measured.counted["counted_tokens"].to_list() == measured.counted["sent_tokens"].to_list()
    assert (measured.requests["first_token_s"] <= measured.requests["done_s"]).all()


def test_each_pair_has_a_loss_and_a_control(measured):
    pairs = paired_losses.losses(measured.requests, measured.doubts)
    assert pairs["doubt"].null_count() == pairs.height == 2 * PAIRS
    found = {row["comparison"]: row for row in paired_losses.summary(pairs).iter_rows(named=True)}
    assert set(found) == {"lag with mirror", "mirror with mirror"}
    for row in found.values():  # how large they are is this machine's business, and that of whatever else runs on it
        assert row["num_pairs"] == PAIRS
        assert row["loss_from_percent"] < row["loss_percent"] < row["loss_to_percent"]
        assert row["pairs_needed"] is None or row["pairs_needed"] >= 2


def test_the_log_shows_both_ranks_stepping_together(measured):
    steps = measured.steps.filter(pl.col("schedule").is_in(["mirror", "lag"]))
    for _, own in steps.group_by("replay", maintain_order=True):
        both = joint_steps.joint(own, 2)
        assert both.height >= 3
        assert (both["shortest_ms"] / both["longest_ms"]).median() > 0.8
    computed = steps.group_by("replay").agg(pl.col("num_prefill_tokens").sum())
    sent = measured.requests.group_by("replay").agg(pl.col("input_tokens").sum()).join(computed, on="replay")
    assert sent.height == 2 * PAIRS
    assert sent["input_tokens"].to_list() == sent["num_prefill_tokens"].to_list()


def test_every_single_prompt_is_answered_on_both_ranks_and_on_one(measured):
    probes = measured.requests.filter(pl.col("schedule") == "probe")
    times = step_probe.medians(probes)  # how long they took is the business of whatever else runs on this machine
    assert times.select("num_busy", "input_tokens").rows() == [(busy, n) for busy in (1, 2) for n in (32, 128, 512)]
    assert times["step_s"].null_count() == 0


def test_a_server_that_ends_in_mid_replay_ends_the_experiment_and_keeps_what_was_measured(measured, server):
    design = Design(drawn(200), 2, lag_s=0.5, pairs=3, users=2, warm_up_requests=0)
    told = []

    def progress(line):
        told.append(line)
        if line.startswith("replay 1 of"):
            threading.Timer(4.0, server.stop).start()

    found = measurement.measure(
        design, [server.base_url], settings(server), log_paths=[server.log_path], progress=progress
    )
    assert told[-1].startswith("replay 1 of"), "nothing is begun after the server's end"
    assert found.requests["done_s"].drop_nulls().len() > 0
    assert found.requests["error"].drop_nulls().len() > 0
    assert any("ended early" in flag for flag in found.flags)
    losses = paired_losses.summary(paired_losses.losses(found.requests, found.doubts))["loss_percent"]
    assert losses.drop_nulls().is_empty(), "no pair was complete, so there is nothing to average"
